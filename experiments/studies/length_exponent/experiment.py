"""GSPO with the ratio's length exponent as a field: s = exp(|y|^-p Σ_t log r_t); 1 is GSPO, 0 the plain product.

Otherwise the experiment of addition_gspo.py; study.py shortens its chains of additions.

Run: gspax train experiments/studies/length_exponent/experiment.py --workdir runs/half loss.exponent=0.5
"""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp

from gspax import losses
from gspax.experiment import load


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


experiment = replace(load(Path(__file__).parents[2] / "addition_gspo.py"), name="length_exponent", loss=gspo_power)
