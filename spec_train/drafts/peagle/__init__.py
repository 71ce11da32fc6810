"""P-EAGLE (arXiv 2602.01469)."""
