"""Stale samples: corrections, A-3PO, M2PO, and losses without an old policy, against GRPO and GSPO as they are.

Question. An asynchronous run trains on samples that are several rollouts old. With the learner's own old log-probs,
GRPO and GSPO bound what a rollout's updates do, and nothing accounts for the policy that sampled. Weights and
rejections (`losses.correction`), old log-probs between the sampler's and the current ones (A-3PO), the sampler's own,
M2PO, and losses on the ratio to the sampler (DIS, IPO, DRO) are made for this. What does staleness cost, and what do
they give back?

Rule, written before the runs. Five seeds; none is left out. All variants continue the same warm start of a seed, sort 3
to 6 digits over 40 rollouts of 32 x 8 rows in 4 minibatches, and are compared at equal response tokens, paired by seed.
*Fresh* has no lag. All others have a lag of 4 rollouts, so that a sample is 16 to 19 updates old; the first 5 rollouts
are of the policy of the start. Seed 9, which is not in the results, served to choose the lag with GRPO alone, over 60
rollouts: the smallest of 2, 4, 8, and 16 at which its reward at the end falls by 0.1 or more. Settings are the defaults
of each function, which are those of its source, and for the rejection, which has none, geometric means from 1/2 to 2.

Primary measure: the training reward in the last tenth of the tokens, 95 % intervals.
1. Staleness harms a loss if its interval from the same loss fresh is below 0. Only then can a treatment of it help.
2. A treatment helps if its interval from the same loss with the lag is above 0, and hurts if it is below. DIS, IPO, and
   DRO are compared with GRPO.
3. A-3PO replaces the pass for old log-probs if no difference shows from GRPO with that pass, without weights and with.
Thirteen differences decide, so in half of such studies one would exclude 0 by chance.

Added before its runs, when all others were known, with the same rule: prime-rl's default loss of November 24. It is
the fourteenth difference. Another machine trained it, which rounds differently, so it is compared with GRPO trained
again there.
"""

from functools import partial

from common import Measure, Start, Study, Variant, draw_all
from starts import GRPO, GSPO, PRIME_RL, QUIET

LAG = ("placement.staleness=4",)
STALE = Start("stale", "studies/staleness/experiment.py", (*QUIET, "sampling.prompts=32", "schedule.steps=40"))
A3PO = ("old_logp=interpolated",)
TRUNCATED = ("correction=gspax.losses.correction.truncate_tokens",)
TREATMENTS = {  # of GRPO: overrides
    "sampler's": ("old_logp=sampler",),
    "A-3PO": A3PO,
    "truncated": TRUNCATED,
    "masked": ("correction=gspax.losses.correction.mask_tokens",),
    "rejected": ("correction=gspax.losses.correction.reject_geometric", "correction.low=0.5", "correction.high=2"),
    "M2PO": ("selection=gspax.losses.selection.second_moment",),
}
REWARD = Measure("training reward", "reward/mean")


study = Study(
    variants=(
        Variant("GRPO, fresh", STALE, GRPO),
        Variant("GRPO", STALE, (*GRPO, *LAG)),
        *(Variant(f"GRPO, {name}", STALE, (*GRPO, *LAG, *how), "GRPO") for name, how in TREATMENTS.items()),
        Variant("GRPO, A-3PO, truncated", STALE, (*GRPO, *LAG, *A3PO, *TRUNCATED), "GRPO, truncated"),
        *(Variant(name, STALE, (f"loss=gspax.losses.{name.lower()}", *LAG), "GRPO") for name in ("DIS", "IPO", "DRO")),
        Variant("GRPO, again", STALE, (*GRPO, *LAG)),
        Variant("prime-rl's", STALE, (*PRIME_RL, *LAG), "GRPO, again"),
        Variant("GSPO, fresh", STALE, GSPO),
        Variant("GSPO", STALE, (*GSPO, *LAG), "GSPO, fresh"),
        Variant("GSPO, truncated", STALE, (*GSPO, *LAG, TRUNCATED[0].replace("tokens", "sequences")), "GSPO"),
    ),
    measures=(
        REWARD,
        Measure("mean reward of the run", "reward/mean", over=1),
        Measure("effective samples", "mismatch/ess_sequences", over=1, percent=True),
        Measure("tokens clipped", "policy/clip_fraction_tokens", over=1, percent=True),
        Measure("tokens of weight 0", "policy/correction_rejected", over=1, percent=True),
        Measure("entropy", "policy/entropy"),
    ),
    rows=(
        ("GRPO, fresh", "GRPO", *(f"GRPO, {name}" for name in TREATMENTS)),
        ("GRPO, fresh", "GRPO", "GRPO, truncated", "GRPO, A-3PO, truncated", "DIS", "IPO", "DRO"),
        ("GRPO, again", "prime-rl's"),
        ("GSPO, fresh", "GSPO", "GSPO, truncated"),
    ),
    panels=partial(draw_all, (REWARD, Measure("entropy", "policy/entropy"))),
    devices=2,  # the sampler has one
)
