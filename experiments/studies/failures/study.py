"""Where GSPO fails: short responses and mixed lengths, beside GRPO, SAPO, CISPO, GMPO and LUSPO.

Question. A sequence's ratio is a mean over few tokens where responses are short, and over different numbers of them
in one batch where lengths are mixed. Does GSPO learn worse than other losses there?

Rule, written before the runs. Five seeds; none is left out. Each loss has its own paper's clip range and aggregation.
Primary measure: the training reward in the last tenth of the tokens, paired by seed. GSPO fails on a task where the
interval of another loss's difference excludes 0 in its favour, in this measure and in the mean reward of the run:
with ten comparisons one of them alone would exclude 0 by chance in two studies of five.
"""

from common import Measure, Start, Study, Variant
from starts import GRPO, GSPO, SORT

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
LOSSES = {
    "GSPO": GSPO,
    "GRPO": GRPO,
    "SAPO": ("loss=gspax.losses.sapo",),
    "CISPO": ("loss=gspax.losses.cispo",),
    "GMPO": ("loss=gspax.losses.gmpo",),
    "LUSPO": ("loss=gspax.losses.luspo",),
}

study = Study(
    arms=tuple(
        Variant(f"{name}, {start.name}", start, overrides)
        for start in (SHORT, MIXED)
        for name, overrides in LOSSES.items()
    ),
    measures=(
        Measure("training reward", "reward/mean"),
        Measure("mean reward of the run", "reward/mean", over=1),
        Measure("response length", "response/length_mean"),
        Measure("KL of a batch", "policy/kl", over=1),
    ),
)
