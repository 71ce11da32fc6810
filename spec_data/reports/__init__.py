"""Room: the pages of a dataset, and of a corpus before it is captured: figures and documents.

`dataset_page` collects what a sealed dataset holds; `preview_page` renders a corpus as `generate`
does. Both show documents token by token (`token_viewer`).

May import: spec_data.corpus, spec_data.generation, spec_data.models, spec_data.options,
spec_data.pages, spec_data.progress, spec_data.report, spec_data.shards.
"""
