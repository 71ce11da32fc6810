"""The forms in which engines and other trainers keep drafts: written, read back, and checked.

Everything here is plain dictionaries and tensors, and knows no draft class: `spec_train.drafts`
reads through it, `spec_train.exporting` writes through it. One module per draft kind.
"""
