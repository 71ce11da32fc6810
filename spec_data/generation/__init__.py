"""Room: what `spec-data generate` does, as `commands/generate.py` tells it.

`setup` finds target and tokenizer, `plan` cuts the documents of a corpus into units, `proof`
proves the loaded target, `capture` and `units` write a shard for each unit, `finalize` makes the
directory a dataset; `output` is where it lies, `workers` which units a process takes, `status` how
far it is.
The bytes of a unit depend on the plan alone.

"Plan" means one thing here: every document, tokenised, in order, cut into units (class `Plan`,
files plan.json and plan.arrow). A pack is a row of the target's batch with several documents.
"""
