"""Compiling for a TPU that is not there: chips and topologies, the programs of an experiment, compiled code."""
