"""A loss for which one token of every response has an extreme ratio, another one in each update.

Otherwise the experiment of addition_gspo.py; study.py shortens its chains of additions.

Run: gspax train experiments/studies/failures/experiment.py --workdir runs/bad_token loss.base=gspax.losses.cispo
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from gspax import losses
from gspax.experiment import load


def with_bad_token(
    logp, old_logp, advantage, mask, *, base: Callable[..., losses.Terms] = losses.gspo, shift: float = 3.0
):
    """`base` with the old log-prob of one response token of each row raised or lowered by `shift`, both equally likely.

    Token and sign are drawn with a key that is a hash of the old log-probs, so a run repeats them exactly.
    """
    total = jnp.where(mask, old_logp, 0.0).sum()
    key = jax.random.fold_in(jax.random.key(0), jax.lax.bitcast_convert_type(total, jnp.uint32))
    which, sign = jax.random.split(key)
    chosen_B = jnp.where(mask, jax.random.uniform(which, mask.shape), -1.0).argmax(axis=-1)
    shift_B = shift * jax.random.rademacher(sign, chosen_B.shape, jnp.float32)
    shift_BT = jax.nn.one_hot(chosen_B, mask.shape[1]) * shift_B[:, None]
    return base(logp, old_logp + shift_BT, advantage, mask)


experiment = replace(load(Path(__file__).parents[2] / "addition_gspo.py"), name="failures", loss=with_bad_token)
