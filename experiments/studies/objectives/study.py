"""Losses without an old policy, estimators, and terms: does any of them learn faster or slower than GRPO as it is?

Question. Papers and other frameworks offer losses on the ratio to the sampler (DIS, IPO, DRO), other baselines of the
group (OPO, OTB, pass@k), selections of tokens (M2PO, the fifth with the most entropy, Clip-Cov), and terms against a
falling entropy (an adaptive bonus, KL-Cov). Each is a field of an experiment. What does each change at this size?

Rule, written before the runs. Five seeds; none is left out. All variants continue the same warm start of a seed, sort 3
to 6 digits over 40 rollouts of 32 x 8 rows in 4 minibatches, and are compared at equal response tokens, paired by seed,
with GRPO; KL-Cov, which has no clip, with the importance-sampled loss that it regularizes. Settings are the defaults of
each function, which are those of its source; the share of Clip-Cov and KL-Cov is 0.02 and not 2e-4, since a minibatch
has about 300 tokens and not 10^5. Primary measure: the training reward in the last tenth of the tokens. A variant helps
if the 95 % interval of its difference is above 0 and hurts if it is below. Ten differences decide, so in two of five
such studies one would exclude 0 by chance. None of these variants was run on this task before.

Added before its runs, with the same rule: OTB, the baseline of each token. It is the eleventh difference.

Added before their runs, when all others were known, with the same rule: prime-rl's default loss of November 24, and
the adaptive bonus with a target of 0.6 nats, because GRPO's entropy falls to 0.44 and never reached the default target,
so that the bonus did nothing. They are the twelfth and the thirteenth difference. Another machine trained them, which
rounds differently, so they are compared with GRPO trained again there.
"""

from functools import partial

from common import Measure, Start, Study, Variant, draw_all
from starts import GRPO, PRIME_RL, QUIET

SORT = Start("sort", "sort_gspo.py", (*QUIET, "sampling.prompts=32", "schedule.steps=40"))
PLAIN, AGAIN = "importance sampling", "GRPO, again"
ENTROPY = "regularizers.adaptive_entropy=gspax.config.AdaptiveEntropy"
REWARD = Measure("training reward", "reward/mean")

study = Study(
    variants=(
        Variant("GRPO", SORT, GRPO),
        Variant("DIS", SORT, ("loss=gspax.losses.dis",)),
        Variant("IPO", SORT, ("loss=gspax.losses.ipo",)),
        Variant("DRO", SORT, ("loss=gspax.losses.dro",)),
        Variant("OPO", SORT, (*GRPO, "advantage=gspax.advantages.opo")),
        Variant("OTB", SORT, (*GRPO, "advantage=gspax.advantages.otb")),
        Variant("pass@8", SORT, (*GRPO, "advantage=gspax.advantages.best_of_group")),
        Variant("M2PO", SORT, (*GRPO, "selection=gspax.losses.selection.second_moment")),
        Variant("most entropy", SORT, (*GRPO, "selection=gspax.losses.selection.top_entropy")),
        Variant("Clip-Cov", SORT, (*GRPO, "selection=gspax.losses.selection.clip_cov", "selection.share=0.02")),
        Variant("adaptive entropy", SORT, (*GRPO, ENTROPY)),
        Variant(PLAIN, SORT, ("loss=gspax.losses.importance_sampling",)),
        Variant(
            "KL-Cov",
            SORT,
            (
                "loss=gspax.losses.importance_sampling",
                "regularizers.kl_cov=gspax.config.CovarianceKL",
                "regularizers.kl_cov.share=0.02",
            ),
            PLAIN,
        ),
        Variant(AGAIN, SORT, GRPO),
        Variant("adaptive entropy, 0.6", SORT, (*GRPO, ENTROPY, "regularizers.adaptive_entropy.target=0.6"), AGAIN),
        Variant("prime-rl's", SORT, PRIME_RL, AGAIN),
    ),
    measures=(
        REWARD,
        Measure("mean reward of the run", "reward/mean", over=1),
        Measure("entropy", "policy/entropy"),
        Measure("CPU seconds", "run/cpu_seconds", over=0),
    ),
    panels=partial(draw_all, (REWARD, Measure("entropy", "policy/entropy"))),
)
