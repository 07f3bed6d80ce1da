"""Problems from files, from data sets (`jsonl` and others) or from a generator; and tokenizers.

A generated task is a module with `Problems`, `reward`, `half_wrong` and `tokenizer`.
"""

from gspax.config.protocols import CompletionTokenizer, DataSource, Tokenizer
from gspax.data.chat import CharChat, ChatTokenizer, hf_chat, reward_answer, split_thinking
from gspax.data.problem import GeneratedProblems, Problem
from gspax.data.sources import huggingface, jsonl, parquet, sequence, tfds
from gspax.data.sources.mixture import Mixture, mixture
from gspax.data.sources.row_rules import AnswerMatches, PassRate, PromptTokens
from gspax.data.sources.row_source import RowSource
from gspax.data.sources.schema import Schema
from gspax.data.tokenizer import CharTokenizer, HFTokenizer, hf_tokenizer

__all__ = [
    "AnswerMatches",
    "CharChat",
    "CharTokenizer",
    "ChatTokenizer",
    "CompletionTokenizer",
    "DataSource",
    "GeneratedProblems",
    "HFTokenizer",
    "Mixture",
    "PassRate",
    "Problem",
    "PromptTokens",
    "RowSource",
    "Schema",
    "Tokenizer",
    "hf_chat",
    "hf_tokenizer",
    "huggingface",
    "jsonl",
    "mixture",
    "parquet",
    "reward_answer",
    "sequence",
    "split_thinking",
    "tfds",
]
