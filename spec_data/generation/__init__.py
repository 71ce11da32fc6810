"""Room: `spec-data generate` and `estimate`: plan, run, seal.

`setup` resolves the options, `plan` assigns documents to units, `run` captures unit after unit, and
the finished directory is sealed. A unit's bytes depend on the plan alone.

May import: spec_data.shards, spec_data.corpus, spec_data.target, spec_data.config,
spec_data.options, spec_data.devices, spec_data.progress.
"""
