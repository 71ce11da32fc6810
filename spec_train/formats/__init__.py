"""Room: the files of drafts, in our form and in those of the engines.

Everything here is plain dictionaries and tensors, and no draft class is known: `spec_train.drafts`
reads through this room, `spec_train.exporting` writes through it. One module per kind of draft.

May import: spec_data.shards, spec_data.config, spec_train.draft_options.
"""
