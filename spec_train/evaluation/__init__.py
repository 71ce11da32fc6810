"""Room: `spec-train eval`: how many drafted tokens are accepted?

Measured on a dataset without the target (simulated), or by real decoding with the target.
"""
