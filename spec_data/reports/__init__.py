"""The pages of a dataset, and of a corpus before it is captured: figures and documents.

`dataset_page` collects what a sealed dataset holds; `preview_page` renders a corpus as `generate`
does. Both show documents token by token (`token_viewer`).
"""
