"""Room: DSpark and DFlash, which draft a block of tokens in one forward pass.

May import: spec_data.config, spec_data.shards, spec_train.attention, spec_train.data,
spec_train.drafts, spec_train.formats, spec_train.head, spec_train.losses, spec_train.metrics,
spec_train.options, spec_train.sampling, spec_train.teacher_rows, spec_train.tiles.
"""
