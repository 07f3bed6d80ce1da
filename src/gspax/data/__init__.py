"""Where problems come from: a task is a module with `Problems`, `reward`, `half_wrong` and `tokenizer`."""

from gspax.data.problem import Problem
from gspax.data.tokenizer import CharTokenizer, HFTokenizer, Tokenizer, hf_tokenizer

__all__ = ["CharTokenizer", "HFTokenizer", "Problem", "Tokenizer", "hf_tokenizer"]
