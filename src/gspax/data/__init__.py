"""Where problems come from: a task is a module with `Problems`, `reward`, `half_wrong` and `tokenizer`."""

from gspax.data.chat import ChatTokenizer, hf_chat, reward_answer, split_thinking
from gspax.data.problem import Problem
from gspax.data.sources import RowSource, Schema, huggingface, jsonl, parquet, sequence, tfds
from gspax.data.tokenizer import CharTokenizer, HFTokenizer, hf_tokenizer
from gspax.protocols import CompletionTokenizer, DataSource, Tokenizer

__all__ = [
    "CharTokenizer",
    "ChatTokenizer",
    "CompletionTokenizer",
    "DataSource",
    "HFTokenizer",
    "Problem",
    "RowSource",
    "Schema",
    "Tokenizer",
    "hf_chat",
    "hf_tokenizer",
    "huggingface",
    "jsonl",
    "parquet",
    "reward_answer",
    "sequence",
    "split_thinking",
    "tfds",
]
