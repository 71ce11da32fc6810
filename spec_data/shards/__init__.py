"""The dataset format, the one contract between spec-data and spec-train.

Schema, codecs, packing, writer, reader and seal; FORMAT.md beside this file is the specification.
The room holds only what both programs need, and imports nothing else of this project.
"""
