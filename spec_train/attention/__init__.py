"""Room: attention kernels and masks that the drafts share.

Functions of tensors alone: no draft, no batch, no file.

May import: spec_data.shards.
"""
