"""Views and edits of finished datasets. No target is loaded.

`select`, `merge`, `drop-columns` and `recode` write a new dataset from the stored documents of
others; `append` adds shards to a dataset; `gc` deletes leftovers. `view_units` says which documents
make a shard of the view, `stored_documents` copies them, `write_view` writes and seals the
directory, and can be killed at any time. The bytes of a view depend on its options and its inputs
alone.
"""
