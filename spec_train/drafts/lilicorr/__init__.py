"""LiLiCorr (arXiv 2608.20530): DFlash with a transformer over candidates."""
