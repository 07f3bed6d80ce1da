"""Choosing GSPO's clip range: the paper's, one measured so that a given share is clipped, or a scheduled one.

Question. The paper's 3e-4 / 4e-4 is for long responses of a large model. Is a range that is calibrated to a share
better on short ones, and does the share matter? Is one better that narrows or widens during the run?

Rule, written before the runs. Five seeds; none is left out. Primary measure: the training reward in the last tenth of
the tokens, paired by seed. A calibrated range is better only if the interval of its difference from the paper's range
excludes 0.

Added later, before the runs of these variants. `narrowing` starts at a hundred times the paper's range and falls
geometrically to the paper's, `widening` is the reverse, and `ten times` is fixed at the geometric mean of both. A
schedule is better, or worse, than a fixed range only if the interval of its difference from `ten times` excludes 0.
"""

from dataclasses import replace

from common import Measure, Study, Variant
from starts import ADDITION, GSPO, SORT


def share(value):
    return ("calibration=gspax.config.Calibration", f"calibration.share={value}")


def scheduled(start, count, first, last):
    """A variant of `first` to `last` times the paper's range within `count` updates, compared with `ten times`."""
    name = "narrowing" if first > last else "widening"
    own = replace(start, base=f"studies/clip_range/{start.name}.py")  # with the warm starts of the other variants
    overrides = (f"loss.first={first}", f"loss.last={last}", f"loss.count={count}")
    return Variant(f"{name}, {start.name}", own, overrides, f"ten times, {start.name}")


def variants(start, count):
    for name, overrides in {
        "paper": (),
        "5 % clipped": share(0.05),
        "15 % clipped": share(0.15),
        "30 % clipped": share(0.3),
        "ten times": ("loss.clip_low=3e-3", "loss.clip_high=4e-3"),
    }.items():
        yield Variant(f"{name}, {start.name}", start, (*GSPO, *overrides))
    yield scheduled(start, count, 100, 1)
    yield scheduled(start, count, 1, 100)


study = Study(
    variants=(*variants(SORT, 240), *variants(ADDITION, 160)),
    measures=(
        Measure("training reward", "reward/mean"),
        Measure("mean reward of the run", "reward/mean", over=1),
        Measure("sequences clipped", "policy/clip_fraction_sequences", over=1, percent=True),
        Measure("KL of a batch", "policy/kl", over=1),
    ),
)
