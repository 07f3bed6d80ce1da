"""Hugging Face checkpoints in and out. An experiment starts from one by `model=hf("Qwen/Qwen3-30B-A3B")`."""

from gspax.hf.peft import peft
from gspax.hf.source import hf

__all__ = ["hf", "peft"]
