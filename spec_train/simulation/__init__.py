"""Room: acceptance as in serving, without the target: `fit`, `eval` and `doctor` measure it.

`walk` judges drafted chains and follows the rounds of decoding through stored documents,
`batch_walk` does so for the documents of a batch, and `parting` tells when the result and the
figures of training part.

May import: spec_train.data.
"""
