"""GSPO with the ratio's length exponent as a field: s = exp(|y|^-p Σ_t log r_t); 1 is GSPO, 0 the plain product.

Chains of 3 or 4 additions, as in addition_gspo.py.

Run: gspax train experiments/studies/length_exponent/experiment.py --workdir runs/half loss.exponent=0.5
"""

from dataclasses import replace

import jax.numpy as jnp

from gspax import advantages, losses
from gspax.config import Evaluation, Experiment, Optimizer, Sampling, Schedule, WarmStart
from gspax.data import addition
from gspax.model import presets


@losses.has_traits(losses.Traits(ratio="sequence", clip_range=True))
def gspo_power(
    logp, old_logp, advantage, mask, *, exponent: float = 1.0, clip_low: float = 3e-4, clip_high: float = 4e-4
):
    """GSPO's clipped objective with s = exp(|y|^-exponent Σ_t log r_t)."""
    length_B = jnp.maximum(mask.sum(axis=-1), 1).astype(jnp.float32)
    log_ratio_B = jnp.where(mask, logp - old_logp, 0.0).sum(axis=-1) / length_B**exponent
    ratio_B = jnp.exp(jnp.clip(log_ratio_B, -25, 25))
    high_B, low_B = (advantage > 0) & (ratio_B > 1 + clip_high), (advantage < 0) & (ratio_B < 1 - clip_low)
    held_B = jnp.where(high_B, 1 + clip_high, jnp.where(low_B, 1 - clip_low, ratio_B))
    weight_B = mask.any(axis=-1).astype(jnp.float32)
    clipped_B = weight_B * (high_B | low_B)
    metrics = {
        "clip_fraction_sequences": losses.Share(clipped_B, weight_B),
        "clip_fraction_tokens": losses.Share(clipped_B * length_B, weight_B * length_B),
        "ratio": losses.Spread(ratio_B[:, None], weight_B[:, None] > 0),
    }
    return losses.Terms(-held_B * advantage * weight_B, weight_B, metrics)


experiment = Experiment(
    name="length_exponent",
    model=replace(presets.tiny_moe, vocab_size=addition.tokenizer.vocab_size),
    data=addition.Problems(min_terms=3, max_terms=4),
    tokenizer=addition.tokenizer,
    reward=addition.reward,
    advantage=advantages.standardize,
    loss=gspo_power,
    sampling=Sampling(prompts=16, group=8, max_prompt_tokens=12, max_tokens=41),
    optimizer=Optimizer(learning_rate=3e-4),
    schedule=Schedule(steps=40, minibatches=4, eval_every=0, checkpoint_every=0),
    evaluation=Evaluation(problems=64),
    warm_start=WarmStart(
        demonstration=addition.half_wrong, steps=300, rows=32, optimizer=Optimizer(learning_rate=6e-3)
    ),
)
