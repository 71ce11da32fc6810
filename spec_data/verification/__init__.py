"""Room: `spec-data verify`: is a dataset intact, and does its target still produce it?

Checks every file against its checksum, every stored state for broken values, and, if the target is
available, sampled documents against a fresh capture.
"""
