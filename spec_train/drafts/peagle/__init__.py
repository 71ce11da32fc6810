"""Room: P-EAGLE, which drafts all tokens of a round in one forward.

Layer 0 and the configuration extend EAGLE-3's.

May import: spec_data.shards, spec_train.attention, spec_train.data, spec_train.draft_options,
spec_train.drafts, spec_train.drafts.eagle3, spec_train.head, spec_train.losses, spec_train.metrics,
spec_train.sampling.
"""
