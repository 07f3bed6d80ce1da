"""Where problems come from: a task is a module with `Problems`, `reward`, `half_wrong` and `tokenizer`."""

from gspax.data.chat import ChatTokenizer, hf_chat, reward_answer, split_thinking
from gspax.data.problem import Problem
from gspax.data.tokenizer import CharTokenizer, HFTokenizer, hf_tokenizer
from gspax.protocols import CompletionTokenizer, DataSource, Tokenizer

__all__ = [
    "CharTokenizer",
    "ChatTokenizer",
    "CompletionTokenizer",
    "DataSource",
    "HFTokenizer",
    "Problem",
    "Tokenizer",
    "hf_chat",
    "hf_tokenizer",
    "reward_answer",
    "split_thinking",
]
