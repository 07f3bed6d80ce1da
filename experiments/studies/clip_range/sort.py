"""GSPO whose clip range changes during the run: from `first` to `last` times its widths, geometrically.

Otherwise the experiment of sort_gspo.py; addition.py is the same for addition_gspo.py.

Run: gspax train experiments/studies/clip_range/sort.py --workdir runs/narrowing loss.first=100 loss.count=600
"""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp

from gspax import losses
from gspax.experiment import load


@losses.has_traits(losses.Traits(ratio="sequence", clip_range=True, updates=True))
def scheduled_gspo(
    logp,
    old_logp,
    advantage,
    mask,
    *,
    updates=0,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    first: float = 1.0,
    last: float = 1.0,
    count: int = 240,
):
    """GSPO with its widths times first^(1 - p) last^p, p = updates / count, at most 1."""
    done = jnp.minimum(updates / count, 1.0)
    factor = first ** (1 - done) * last**done
    return losses.gspo(logp, old_logp, advantage, mask, clip_low=factor * clip_low, clip_high=factor * clip_high)


experiment = replace(load(Path(__file__).parents[2] / "sort_gspo.py"), name="clip_range", loss=scheduled_gspo)
