"""Pre-training of a small Qwen3-MoE on word problems, for word_problems_gspo.py.

800 updates of 32 solutions of familiar types: 60 % are the right answer alone, 40 % are worked out, and a quarter of
these have a wrong calculation. The tokenizer is trained first, on the same problems.

Run:
    python experiments/word_problems.py runs/word_problems/tokenizer
    gspax sft experiments/word_problems_sft.py --workdir runs/word_problems/sft
    gspax export --from runs/word_problems/sft --to runs/word_problems/checkpoint --dtype float32
"""

from functools import partial

import word_problems

from gspax import advantages, losses
from gspax.config import Experiment, ModelConfig, Optimizer, Sampling, WarmStart
from gspax.config.optimizers import cosine
from gspax.data import HFTokenizer
from gspax.rewards import math

UPDATES = 800

experiment = Experiment(
    name="word_problems_sft",
    model=ModelConfig(
        vocab_size=word_problems.VOCABULARY,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        rope_theta=1e4,
        tie_word_embeddings=True,
        initializer_range=0.1,
        max_position_embeddings=128,
    ),
    data=word_problems.Problems(),
    tokenizer=HFTokenizer("runs/word_problems/tokenizer"),
    reward=partial(math.reward, form="hash"),
    advantage=advantages.standardize,
    loss=losses.gspo,
    sampling=Sampling(prompts=32, group=8, max_prompt_tokens=40, max_tokens=34),
    warm_start=WarmStart(
        demonstration=word_problems.mostly_short,
        steps=UPDATES,
        rows=32,
        optimizer=Optimizer(learning_rate=4e-3, schedule=partial(cosine, updates=UPDATES)),
    ),
)
