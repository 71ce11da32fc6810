"""Pages: one HTML file each, without network, for both programs.

`page` has the parts and writes the file; `dataset_page` is the page of a dataset, or of its plan.
"""
