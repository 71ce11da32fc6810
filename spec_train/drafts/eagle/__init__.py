"""Room: EAGLE-1/2, which predicts the target's next final hidden state.

May import: spec_data.config, spec_data.shards, spec_train.attention, spec_train.data,
spec_train.drafts, spec_train.formats, spec_train.head, spec_train.losses, spec_train.metrics,
spec_train.options, spec_train.origin.
"""
