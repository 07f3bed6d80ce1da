"""Score centering: does it help where samples are stale, or where the updates of a rollout move the policy?

Question. `center_scores` subtracts from each token's score its mean under the policy that sampled, weighted as the
loss weighs tokens (arXiv 2609.20807). Where weights are clipped, that mean is not 0: a loss imitates or avoids the
sampler by the mean advantage of a context, the more the older the samples. Elsewhere gains of centering were found on
three seeds and not found again on three others. Does it change what GRPO learns, from fresh samples and from old ones?

Rule, written before the runs. Ten seeds; none is left out. Variants continue the same warm start of a seed, sort 3 to 6
digits over 40 rollouts of 32 x 8 rows in 4 minibatches, and are compared at equal response tokens, paired by seed.
GRPO has the sampler's log-probs as old ones, so that its ratio is to the policy that sampled, and its default range.
Ages are 0, 4, and 16 rollouts (`placement.staleness`); the first 1, 5, or 17 rollouts are of the policy of the start.

Primary measure: the training reward in the last tenth of the tokens, 95 % intervals.
1. Centering helps at an age if its interval from the same age without it is above 0, and hurts if it is below.
2. If neither, no difference shows, and the interval says how large it may be.
Three differences decide, so one of seven such studies would find one by chance. *Centering* is how far the weights are
from those that need none, half the sum of the differences over the vocabulary; it decides nothing.

The size is bounded by the time of a small machine: 60 runs in about 15 CPU-minutes. No learning rate, clip range, other
loss, or task is varied.
"""

from functools import partial

from common import Measure, Start, Study, Variant, draw_all
from starts import GRPO, QUIET

AGES = (0, 4, 16)
STALE = Start("stale", "studies/staleness/experiment.py", (*QUIET, "sampling.prompts=32", "schedule.steps=40"))
REWARD = Measure("training reward", "reward/mean")


def of_age(age: int) -> tuple[Variant, Variant]:
    """Return GRPO on samples of this age, without centering and with it."""
    settings, name = (*GRPO, "old_logp=sampler", f"placement.staleness={age}"), f"age {age}"
    centered = Variant(f"{name}, centered", STALE, (*settings, "center_scores=True"), name)
    return Variant(name, STALE, settings, "" if age == 0 else "age 0"), centered


study = Study(
    variants=tuple(variant for age in AGES for variant in of_age(age)),
    measures=(
        REWARD,
        Measure("mean reward of the run", "reward/mean", over=1),
        Measure("centering", "policy/centering", over=1),
        Measure("tokens clipped", "policy/clip_fraction_tokens", over=1, percent=True),
        Measure("entropy", "policy/entropy"),
    ),
    seeds=tuple(range(10)),
    rows=tuple(tuple(variant.name for variant in of_age(age)) for age in AGES),
    panels=partial(draw_all, (REWARD, Measure("entropy", "policy/entropy"))),
    devices=2,  # the sampler has one
)
