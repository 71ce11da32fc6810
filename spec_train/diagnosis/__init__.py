"""Room: `spec-train doctor`: why is a draft not accepted?

It runs the checks that a draft of any trainer, a dataset and a target can decide, and tries the
neighbouring conventions on the dataset's states. A rule that another room has is called there; here
its result gets a name, evidence and a fix.

May import: spec_data.conversion, spec_data.devices, spec_data.models, spec_data.options,
spec_data.paths, spec_data.progress, spec_data.shards, spec_data.verification, spec_train.data,
spec_train.drafts, spec_train.evaluation, spec_train.exporting, spec_train.formats, spec_train.head,
spec_train.options, spec_train.simulation, spec_train.training.
"""
