"""P-EAGLE, which drafts all tokens of a round in one forward pass.

Layer 0 and the configuration extend those of EAGLE-3.
"""
