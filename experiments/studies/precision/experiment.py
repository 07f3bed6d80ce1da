"""A loss whose old log-probs have Gaussian noise, independent for each token of each update, also of the first one.

Otherwise the experiment of addition_gspo.py; study.py shortens its chains of additions.

Run: gspax train experiments/studies/precision/experiment.py --workdir runs/noise loss.base=gspax.losses.grpo
     loss.base.clip_low=0.2 loss.base.clip_high=0.27 loss.noise=0.3
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from gspax import losses
from gspax.experiment import load


def with_noise(logp, old_logp, advantage, mask, *, base: Callable[..., losses.Terms] = losses.gspo, noise: float = 0.0):
    """`base` with old_logp + noise · e, e standard normal [B, T], drawn with a key that is a hash of the old log-probs:
    a run repeats its noise exactly."""
    total = jnp.where(mask, old_logp, 0.0).sum()
    key = jax.random.fold_in(jax.random.key(0), jax.lax.bitcast_convert_type(total, jnp.uint32))
    return base(logp, old_logp + noise * jax.random.normal(key, old_logp.shape), advantage, mask)


experiment = replace(load(Path(__file__).parents[2] / "addition_gspo.py"), name="precision", loss=with_noise)
