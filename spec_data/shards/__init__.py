"""Room: the dataset format, the one contract between spec-data and spec-train.

Schema, codecs, packing, writer, reader and seal; FORMAT.md beside this file is the specification.
Only what both programs need is here, and nothing here imports anything else of this project.

May import: nothing of this project.
"""
