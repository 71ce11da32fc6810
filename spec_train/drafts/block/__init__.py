"""Drafts of a block of tokens in one forward pass: a backbone, and what may follow its logits."""
