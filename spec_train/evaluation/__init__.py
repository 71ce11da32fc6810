"""Room: `spec-train eval`: how many drafted tokens are accepted?

Measured on a dataset without the target (simulated), or by real decoding with the target.

May import: spec_data.config, spec_data.corpus, spec_data.devices, spec_data.models,
spec_data.paths, spec_data.progress, spec_data.shards, spec_train.data, spec_train.decoding,
spec_train.drafts, spec_train.formats, spec_train.head, spec_train.metrics, spec_train.options,
spec_train.origin, spec_train.sampling, spec_train.simulation, spec_train.training.
"""
