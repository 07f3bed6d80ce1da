"""Checkpoints of Hugging Face's formats. An experiment that starts from one says `model=hf("Qwen/Qwen3-30B-A3B")`."""

from gspax.hf.source import hf

__all__ = ["hf"]
