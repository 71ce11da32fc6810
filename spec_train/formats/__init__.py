"""The files of drafts, in our own form and in the forms of engines and trainers.

The code here handles plain dictionaries and tensors and imports no draft class. `spec_train.drafts`
reads files through this room, `spec_train.evaluation.exporting` writes them. One module per kind
of draft.
"""
