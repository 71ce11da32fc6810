"""The options of every command of `spec-train`, and of every draft.

One frozen dataclass per command or group of options: names, defaults, help texts, and checks of the
values; presets set some of them. Nothing here imports torch, so `--help` is
instant.
"""
