"""Where GSPO fails: short responses, mixed lengths, sparse rewards and one bad token, beside five other losses.

Question. A sequence's ratio is a mean over few tokens where responses are short, and over different numbers of them
in one batch where lengths are mixed. Does GSPO learn worse than other losses there?

Rule, written before the runs. Five seeds; none is left out. Each loss has its own paper's clip range and aggregation.
Primary measure: the training reward in the last tenth of the tokens, paired by seed. GSPO fails on a task where the
interval of another loss's difference excludes 0 in its favor, in this measure and in the mean reward of the run:
with ten comparisons one of them alone would exclude 0 by chance in two studies of five.

Added later, before the runs of these variants:

- Sparse rewards: sorting 6 to 9 digits after a short warm start, so that at first nine groups of ten have no right
  answer among their 8 samples, and no gradient (chosen with seed 100, which is not in the results). Decided by the same
  rule.
- Long responses: chains of 3 or 4 additions, 31 to 40 tokens, where one wrong token costs the whole reward. Decided by
  the same rule. The runs of GSPO and GRPO are those of the study `precision`, whose settings are the same.
- One bad token: on the same task, the old log-prob of one random token of every response is off by 3 in each update,
  up or down, so that its ratio is 20 times too large or too small. In the mean of 35 log-ratios that is 0.09. A loss
  is hurt where the interval of its difference from itself without bad tokens excludes 0. GSPO fails where it is hurt
  more than another loss: the interval of the difference between the two differences, paired by seed, excludes 0 in
  both measures.
"""

from dataclasses import replace
from functools import partial

from common import Measure, Start, Study, Variant, draw_curve, draw_seeds
from starts import ADDITION, GRPO, GSPO, SORT

SHORT = Start("short", SORT.base, (*SORT.overrides, "data.min_digits=2", "data.max_digits=4"))
MIXED = Start(
    "mixed",
    SORT.base,
    (
        *SORT.overrides,
        "data.min_digits=2",
        "data.max_digits=12",
        "sampling.max_prompt_tokens=13",
        "sampling.max_tokens=13",
        "warm_start.steps=200",
    ),
)
SPARSE = Start(
    "sparse",
    SORT.base,
    (
        *SORT.overrides,
        "data.min_digits=6",
        "data.max_digits=9",
        "sampling.max_prompt_tokens=10",
        "sampling.max_tokens=10",
    ),
)
BAD_TOKEN = replace(ADDITION, base="studies/failures/experiment.py")  # with the warm starts of ADDITION
LOSSES = {
    "GSPO": GSPO,
    "GRPO": GRPO,
    "SAPO": ("loss=gspax.losses.sapo",),
    "CISPO": ("loss=gspax.losses.cispo",),
    "GMPO": ("loss=gspax.losses.gmpo",),
    "LUSPO": ("loss=gspax.losses.luspo",),
}
TASKS = {"short": SHORT, "mixed": MIXED, "sparse": SPARSE, "long": ADDITION}

REWARD = Measure("training reward", "reward/mean")
SPEED = Measure("mean reward of the run", "reward/mean", over=1)


def panels(variants, tokens):
    """The two measures that decide, and the reward over the run."""
    seeds = [partial(draw_seeds, variants=variants, tokens=tokens, measure=each) for each in (REWARD, SPEED)]
    return [*seeds, partial(draw_curve, variants=variants, tokens=tokens, measure=REWARD)]


study = Study(
    variants=(
        *(Variant(f"{name}, {task}", start, LOSSES[name]) for task, start in TASKS.items() for name in LOSSES),
        *(
            Variant(
                f"{name}, bad token",
                BAD_TOKEN,
                tuple(each.replace("loss", "loss.base", 1) for each in overrides),
                against=f"{name}, long",
            )
            for name, overrides in LOSSES.items()
        ),
    ),
    measures=(
        REWARD,
        SPEED,
        Measure("response length", "response/length_mean"),
        Measure("KL of a batch", "policy/kl", over=1),
        Measure("groups of equal rewards", "reward/zero_std_groups", over=1, percent=True),
        Measure("tokens clipped", "policy/clip_fraction_tokens", over=1, percent=True),
    ),
    rows=tuple(tuple(f"{name}, {condition}" for name in LOSSES) for condition in (*TASKS, "bad token")),
    panels=panels,
)
