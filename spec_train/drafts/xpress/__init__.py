"""XPress (arXiv 2608.02438): DFlash with a causal refiner."""
