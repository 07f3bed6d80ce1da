"""Ahead-of-time compilation without TPU hardware: chips and topologies, a run's programs, what they cost."""
