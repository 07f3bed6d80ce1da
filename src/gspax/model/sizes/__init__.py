"""Parameter counts, memory, and layouts that follow from a configuration."""
