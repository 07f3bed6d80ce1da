"""Tasks whose problems are generated."""
