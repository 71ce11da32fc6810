"""The options of every command of `spec-data`.

One frozen dataclass per command or group of options: names, defaults, help texts, and checks of the
values. Nothing here imports torch, so `--help` is instant.
"""
