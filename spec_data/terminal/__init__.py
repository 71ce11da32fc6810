"""What both programs do on a terminal: options, paths, bars, log lines, errors, exit codes."""
