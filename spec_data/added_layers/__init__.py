"""Room: `spec-data add-layers`: further layers of a dataset that is sealed already.

`wider` says what the dataset becomes, `stored_plan` makes a plan of its stored documents, and
`layer_capture` runs the target on them. Every capture also computes columns that are stored, and
compares them: the proof that target, tokens and masks are those of the dataset. `run` writes one
file per shard (a side, see `shards.sides`); nothing that is stored is written again.
"""
