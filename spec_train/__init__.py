"""spec-train: fit speculative-decoding drafts on a spec-data dataset, without the target."""
