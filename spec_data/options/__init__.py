"""Room: the options of every command of `spec-data`.

One frozen dataclass per command or group of options: names, defaults, help texts, and checks of the
values. Nothing here imports torch, so `--help` is instant.

May import: spec_data.config, spec_data.console, spec_data.corpus, spec_data.paths,
spec_data.shards.
"""
