"""Room: `spec-data push` and `pull`: datasets on the Hugging Face Hub.

The Hub has the files of a dataset as they are, and the documents without states, for its viewer.
manifest.json goes up and comes down last, so what has a manifest is complete.
"""
