"""Room: `spec-data convert` and `export`: the stored states of other trainers, read and written.

`samples` reads what a tool stored, `conventions` finds what its states are by comparing them with
those that the target computes, block by block, and `run` hands both to the generation of datasets
as corpus and target. `export` writes a dataset in the layout of another trainer.
"""
