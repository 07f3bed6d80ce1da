"""A run on disk and on screen: its directory, checkpoints, metrics, progress, signals, report."""
