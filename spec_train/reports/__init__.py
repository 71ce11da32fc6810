"""Room: pages about runs and evaluations: curves, acceptance, drafted tokens.

`stored_figures` reads what `fit` and `eval` have written, `*_sections` turn it into parts of a
page, `run_page` puts the page together, and `page_after_*` write it after `fit` and `eval`.

May import: spec_data.pages, spec_data.paths, spec_data.shards, spec_train.evaluation,
spec_train.options, spec_train.simulation, spec_train.training.
"""
