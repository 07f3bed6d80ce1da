"""One ratio for a rollout of several sequences, or one for each of them?

Question. gspax takes the geometric mean over all tokens that the policy sampled in a rollout, and clips it once
(docs/losses.md). With a ratio for each sequence instead, parts of a rollout are clipped separately, and a token of a
short sequence weighs more than one of a long sequence. Does this change what GSPO learns?

Rule, written before the runs. Ten seeds; none is left out. An agent asks twice in each rollout, and both answers have
one reward: all digits are sorted, 3 to 6, and the first two. Variants continue the same warm start of a seed over 60
rollouts of 32 x 8 rows in 4 minibatches, and are compared at equal response tokens, paired by seed.

Primary measure: the training reward in the last tenth of the tokens, 95 % intervals.
1. A ratio for each sequence is better if its interval from one ratio is above 0, and worse if it is below.
2. If neither, no difference shows, and the interval says how large it may be.
The shares of clipped tokens are a measure, and decide nothing: a mean over fewer tokens lies further from 1, so that
more is expected to be clipped. No clip range, other loss, or task is varied.
"""

from common import Measure, Start, Study, Variant
from starts import QUIET

TREES = Start("trees", "studies/trees/experiment.py", (*QUIET, "schedule.steps=60"))

study = Study(
    variants=(
        Variant("one ratio for a rollout", TREES),
        Variant("one for each sequence", TREES, ("loss.branches=True",)),
    ),
    measures=(
        Measure("training reward", "reward/mean"),
        Measure("mean reward of the run", "reward/mean", over=1),
        Measure("tokens clipped", "policy/clip_fraction_tokens", over=1, percent=True),
        Measure("entropy", "policy/entropy"),
        Measure("response length", "response/length_mean"),
    ),
    seeds=tuple(range(10)),
)
