"""Speculative decoding with a target and a draft, one sequence at a time or several.

Chains, blocks and dynamic trees. Verification guarantees that the output is the target's own.
"""
