"""Room: `spec-data generate` and `estimate`: plan, run, seal.

`setup` resolves the options and reads the corpus, `plan` assigns documents to units, `run` captures
unit after unit with a `replica` of the target, `unit_records` says which units are finished, and
`sealing` turns the finished directory into a dataset. The bytes of a unit depend on the plan alone.

"Plan" means one thing here: every document, tokenised, in order, cut into units (class `Plan`,
files plan.json and plan.arrow). A pack is a row of the target's batch with several documents.
"""
