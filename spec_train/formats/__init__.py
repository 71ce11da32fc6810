"""The files of drafts, in our own form and in the forms of engines and trainers.

The code here handles plain dictionaries and tensors, imports no draft class and names no kind of
draft: `files.py` in the folder of a kind has its keys, names and forms (`kind_files`).
`spec_train.drafts` reads files through this room, `spec_train.evaluation.exporting` writes them.
"""
