"""Room: `spec-train fit`: one loop for every draft.

Prepares a run, trains it on one or several ranks, saves it and resumes it. No module here names a
kind of draft: the loop calls only the Draft protocol.

May import: spec_data.config, spec_data.console, spec_data.devices, spec_data.models,
spec_data.paths, spec_data.progress, spec_data.shards, spec_train.data, spec_train.drafts,
spec_train.formats, spec_train.head, spec_train.metrics, spec_train.options, spec_train.simulation,
spec_train.topk_bounds.
"""
