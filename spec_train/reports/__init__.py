"""Pages about runs and evaluations: curves, acceptance, drafted tokens.

`stored_figures` reads what `fit` and `eval` have written, `*_sections` turn it into parts of a
page, `run_page` puts the page together, and `page_after_*` write it after `fit` and `eval`.
"""
