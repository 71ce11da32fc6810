"""From datasets to batches.

It decides which documents make global batch k, separates training from validation documents, mixes
datasets, follows a dataset that is still being generated, and streams batches into reused buffers.
"""
