"""Worker processes: the pool that starts them, and the scripts that they run."""
