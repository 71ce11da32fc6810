"""Room: EAGLE-3 and 3.1, trained by the training-time test.

May import: spec_data.config, spec_data.shards, spec_train.attention, spec_train.data,
spec_train.drafts, spec_train.formats, spec_train.head, spec_train.losses, spec_train.metrics,
spec_train.options.
"""
