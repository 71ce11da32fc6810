"""Room: `spec-data convert` and `export`: the stored states of other trainers, read and written.

One module per layout (`from_*.py`) reads what a tool stored; `stored_backend` hands it to the
generation of datasets as if a target had just computed it. Before anything is written, `evidence`
compares the states with those that the target itself computes, block by block (`target_walk`), so a
wrong layer id, norm, shift or order is refused together with the one that fits. `to_*.py` write a
dataset in the layout of another trainer.
"""
