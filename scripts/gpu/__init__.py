"""The parts of `scripts/prove_gpu.py`: what a GPU must show, one module per subject."""
