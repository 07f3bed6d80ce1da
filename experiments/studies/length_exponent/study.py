"""The length exponent: s = exp(|y|^-p Σ_t log r_t) with p = 1 (GSPO), 1/2 and 0, and what a clip range means at each.

Question. GSPO normalizes the log-ratio by the length. The spread of its mean falls as 1/√|y| and that of its sum
grows as √|y|; with p = 1/2 it would not depend on the length. Does a policy learn better with one of them, and is the
reason the exponent or the share that its clip range clips?

Rule, written before the runs. Five seeds; none is left out. Primary measure: the training reward in the last tenth of
the tokens, paired by seed. Each exponent has two clip ranges: GSPO's own, and that times 35^(1 - p), which is the
same bound on the mean log-ratio of a response of 35 tokens. An exponent is better only if its interval against p = 1
excludes 0 at the scaled range.
"""

from dataclasses import replace

import starts
from common import Measure, Study, Variant

ADDITION = replace(starts.ADDITION, base="studies/length_exponent/experiment.py")


def clip(factor):
    return f"loss.clip_low={3e-4 * factor:.3g}", f"loss.clip_high={4e-4 * factor:.3g}"


study = Study(
    variants=(
        Variant("p = 1", ADDITION, ("loss.exponent=1", *clip(1))),
        Variant("p = 1/2, same range", ADDITION, ("loss.exponent=0.5", *clip(1))),
        Variant("p = 1/2, scaled", ADDITION, ("loss.exponent=0.5", *clip(35**0.5))),
        Variant("p = 0, same range", ADDITION, ("loss.exponent=0", *clip(1))),
        Variant("p = 0, scaled", ADDITION, ("loss.exponent=0", *clip(35))),
    ),
    measures=(
        Measure("training reward", "reward/mean"),
        Measure("mean reward of the run", "reward/mean", over=1),
        Measure("sequences clipped", "policy/clip_fraction_sequences", over=1, percent=True),
    ),
)
