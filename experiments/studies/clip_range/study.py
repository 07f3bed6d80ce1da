"""Choosing GSPO's clip range: the paper's, or measured so that a given share of the sequences is clipped.

Question. The paper's 3e-4 / 4e-4 is for long responses of a large model. Is a range that is calibrated to a share
better on short ones, and does the share matter?

Rule, written before the runs. Five seeds; none is left out. Primary measure: the training reward in the last tenth of
the tokens, paired by seed. A calibrated range is better only if the interval of its difference from the paper's range
excludes 0.
"""

from common import Measure, Study, Variant
from starts import ADDITION, GSPO, SORT


def share(value):
    return ("calibration=gspax.config.Calibration", f"calibration.share={value}")


study = Study(
    arms=tuple(
        Variant(f"{name}, {start.name}", start, (*GSPO, *overrides))
        for start in (SORT, ADDITION)
        for name, overrides in {
            "paper": (),
            "5 % clipped": share(0.05),
            "15 % clipped": share(0.15),
            "30 % clipped": share(0.3),
        }.items()
    ),
    measures=(
        Measure("training reward", "reward/mean"),
        Measure("mean reward of the run", "reward/mean", over=1),
        Measure("sequences clipped", "policy/clip_fraction_sequences", over=1, percent=True),
        Measure("KL of a batch", "policy/kl", over=1),
    ),
)
