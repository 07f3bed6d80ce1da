"""Worker processes: the pool that starts them, and the programs that they run, each a script by itself."""
