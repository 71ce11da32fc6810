"""The commands, one typed function each: `terminal/command.py` says how."""
