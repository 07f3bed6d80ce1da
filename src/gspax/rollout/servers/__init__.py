"""Servers that sample for a run, or score for its teacher: vLLM and SGLang behind `rollout.contract`."""
