"""What both programs do on a terminal: commands, bars, log lines, tables of text, exit codes."""

NOTICE = 25
"""The level of log lines that every user reads: between INFO and WARNING."""
WIDTH = 80
"""Columns of what is printed."""
