"""The experiment of this folder's run, which commit 929977a wrote, in today's API."""

from functools import partial

from gspax import advantages, losses, optimizers
from gspax.config import (
    Evaluation,
    Experiment,
    ModelConfig,
    Optimizer,
    Reference,
    Regularizers,
    Sampling,
    Schedule,
    WarmStart,
)
from gspax.data import sort
from gspax.losses import correction, kl

experiment = Experiment(
    name="old_run",
    model=ModelConfig(
        vocab_size=sort.tokenizer.vocab_size,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        rope_theta=1e4,
        tie_word_embeddings=True,
        max_position_embeddings=64,
    ),
    data=sort.Problems(max_digits=3),
    tokenizer=sort.tokenizer,
    reward=sort.reward,
    advantage=advantages.standardize,
    loss=partial(losses.gspo, clip_low=3e-4, clip_high=4e-4),
    correction=partial(correction.truncate_sequences, cap=2.0),
    reference=Reference(loss=kl.token_kl),
    regularizers=Regularizers(entropy=1e-3),
    sampling=Sampling(prompts=8, group=2, max_prompt_tokens=4, max_tokens=4),
    optimizer=Optimizer(
        learning_rate=1e-3,
        warmup_updates=1,
        transform=partial(optimizers.adamw, weight_decay=0.1, decayed=optimizers.everything),
    ),
    schedule=Schedule(steps=2, minibatches=2, checkpoint_every=1, keep_checkpoints=1, eval_every=0),
    evaluation=Evaluation(problems=8),
    warm_start=WarmStart(demonstration=sort.half_wrong, steps=1, rows=8),
)
