"""Model directories: found, read, identified and loaded, by one rule for both programs.

`spec-data generate` and `verify` and `spec-train eval` and `export` find a target through this
room, so all of them hash and load the same files. `spec-train fit` never uses it.
"""
