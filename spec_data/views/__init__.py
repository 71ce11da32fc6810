"""Datasets made of datasets, without the target: views, which refer to others, and copies.

`select` and `merge` (with `join`) say which rows and columns a view has; `rows` writes it. `copy`
writes shards of its own, `recode` in another codec. `derive` makes the manifests.
"""
