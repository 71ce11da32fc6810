"""Acceptance as in serving, without the target: `fit`, `eval` and `doctor` measure it."""
