"""Acceptance as in serving, without the target: `fit`, `eval` and `doctor` measure it.

`walk` judges drafted chains and follows the rounds of decoding through stored documents.
`batch_walk` finds the documents of a batch, `breakdown` adds them up by source and position and
keeps some with every drafted token (`samples`, `sample_texts`), and `parting` tells when the result
and the figures of training part.
"""
