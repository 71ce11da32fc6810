"""Room: `spec-train doctor`: why is a draft not accepted?

It runs the checks that a draft of any trainer, a dataset and a target can decide (`examination`),
and tries the neighbouring conventions (`conventions`) on the dataset's states (`trials`). A rule
that another room has is called there; here its result gets a name, evidence and a fix (`checks`).
"""
