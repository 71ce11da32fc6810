"""Pages about runs and evaluations.

`results` reads what `fit` and `eval` have written, `run_page` puts the page together.
"""
