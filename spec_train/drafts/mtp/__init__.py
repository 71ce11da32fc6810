"""The target's own MTP block, trained for several steps (FastMTP, arXiv 2509.18362)."""
