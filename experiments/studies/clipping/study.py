"""The clipping paradox: how much GSPO and GRPO clip, over the clip range and the length, and how fast they learn.

The GSPO paper (arXiv 2507.18071, figure 2) reports 15 % of tokens clipped for GSPO and 0.13 % for GRPO, and that GSPO
learns faster nevertheless.

Rule, written before the runs. Five seeds; none is left out. Variants of one task continue the same warm start of a seed
and are compared at equal response tokens, paired by seed. Primary measure: the training reward in the last tenth of
the tokens; every step has new problems. Learning speed: the mean training reward of the run. Clipped shares: the mean
of the run. Only the difference between GSPO 3e-4 / 4e-4 and GRPO 0.2 / 0.27 on each task decides whether one learns
better: its 95 % interval has to exclude 0. All other differences describe. Steps and sizes were chosen with seed 100,
which is not in the results.
"""

from functools import partial

from common import Measure, Study, Variant, draw_curve, draw_points
from starts import ADDITION, SORT

GSPO = {
    "GSPO 3e-4 / 4e-4": ("loss.clip_low=3e-4", "loss.clip_high=4e-4"),
    "GSPO 3e-3 / 4e-3": ("loss.clip_low=3e-3", "loss.clip_high=4e-3"),
    "GSPO 3e-2 / 4e-2": ("loss.clip_low=3e-2", "loss.clip_high=4e-2"),
}
GRPO = {
    "GRPO 0.2 / 0.27": ("loss=gspax.losses.grpo", "loss.clip_low=0.2", "loss.clip_high=0.27"),
    "GRPO 0.02 / 0.027": ("loss=gspax.losses.grpo", "loss.clip_low=0.02", "loss.clip_high=0.027"),
}
REWARD = Measure("training reward", "reward/mean")
SPEED = Measure("mean reward of the run", "reward/mean", over=1)
TOKENS = Measure("tokens clipped", "policy/clip_fraction_tokens", over=1, percent=True)
SEQUENCES = Measure("sequences clipped", "policy/clip_fraction_sequences", over=1, percent=True)


def panels(variants, tokens):
    """Clipped tokens and reward over the run, and one against the other."""
    return [
        partial(draw_curve, variants=variants, tokens=tokens, measure=TOKENS),
        partial(draw_curve, variants=variants, tokens=tokens, measure=REWARD),
        partial(draw_points, variants=variants, tokens=tokens, x=TOKENS, y=REWARD, log=True),
    ]


PAPER = ("GSPO 3e-4 / 4e-4", "GSPO 3e-3 / 4e-3", "GRPO 0.2 / 0.27")  # what the longer task is run with
study = Study(
    variants=(
        *(Variant(f"{name}, sort", SORT, overrides) for name, overrides in (GSPO | GRPO).items()),
        *(Variant(f"{name}, addition", ADDITION, (GSPO | GRPO)[name]) for name in PAPER),
    ),
    measures=(REWARD, SPEED, TOKENS, SEQUENCES, Measure("response length", "response/length_mean", over=1)),
    panels=panels,
)
