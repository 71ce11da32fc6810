"""P-EAGLE, which drafts all its tokens in one forward pass.

Layer 0 and the configuration extend those of EAGLE-3.
"""
