"""One run: its directory, checkpoints, log files, progress, signals and report."""
