"""Room: what `spec-data generate` does, as `run` tells it.

`setup` finds target and tokenizer, `plan` cuts the documents of a corpus into units, `proof`
proves the loaded target, `calibrate` chooses the codecs, `capture` and `units` write a shard for
each unit, and the dataset at the end; `output` is where it lies, `workers` which units a process
takes, `status` how far it is. The bytes of a unit depend on the plan alone.

A pack is a row of the target's batch with several documents.
"""
