"""Evaluation: held-out rewards of an experiment, and benchmark tasks with pass@k, maj@k and confidence intervals."""
