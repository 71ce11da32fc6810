"""Room: P-EAGLE, which drafts all tokens of a round in one forward pass.

Layer 0 and the configuration extend those of EAGLE-3.

May import: spec_data.shards, spec_train.attention, spec_train.data, spec_train.drafts,
spec_train.drafts.eagle3, spec_train.formats, spec_train.head, spec_train.losses,
spec_train.metrics, spec_train.options, spec_train.sampling, spec_train.teacher_rows.
"""
