"""The run of conversation.py with answers of one turn, for a published model without a chat template."""

import os
from dataclasses import replace

import conversation

from gspax.config import Turns
from gspax.data import hf_tokenizer
from gspax.hf import hf

CHECKPOINT = os.environ["PUBLISHED"]

experiment = replace(
    conversation.experiment,
    name="single_turn",
    model=hf(CHECKPOINT),
    tokenizer=hf_tokenizer(CHECKPOINT),
    environment=None,
    turns=Turns(),
    sampling=replace(conversation.experiment.sampling, max_tokens=16, stop=()),
)
