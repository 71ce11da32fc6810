"""Room: from datasets to batches.

Decides which documents make global batch k, splits train from validation, mixes datasets, follows a
dataset that is still being generated, and streams batches into reused buffers.

May import: spec_data.shards, spec_data.config, spec_train.data_option, spec_train.options,
spec_train.origin.
"""
