"""The contract that spec_data and spec_train share: the dataset format and nothing else.

FORMAT.md is the specification. This package imports no other part of the project.
"""
