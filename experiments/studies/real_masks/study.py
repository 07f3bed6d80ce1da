"""Sampling masks of a published model: log-probs over the whole vocabulary, or over the tokens that the filter kept.

Question. The study `filters` found no difference with a vocabulary of 12 tokens. SmolLM2-135M-Instruct has 49,152, of
which a filter leaves out nearly all. Does it matter there that the learner replays the sampling mask?

Rule, written before the runs. Seeds 0 to 4; none is left out. GRPO as in the study `real_model`: 16 rollouts of 4
prompts x 8 answers of at most 24 tokens, 4 updates each, compared at equal response tokens and paired by seed. The
filter is the one that Qwen3 recommends for its own samples, top-p 0.95 and top-k 20.
Primary measure: the training reward in the last fifth of the tokens, 95 % intervals.
1. Replay helps if the interval of its difference from no replay is above 0, and harms if it is below.
2. If neither, no difference shows, and the interval says how large it may be.
Everything else describes: the held-out reward, sampled without the filter, and the entropy.
"""

from functools import partial

from common import Measure, Study, Variant, draw_all
from starts import GRPO, SMOLLM2

FILTERED = (*GRPO, "schedule.minibatches=4", "sampling.top_p=0.95", "sampling.top_k=20")
REWARD = Measure("training reward", "reward/mean", over=0.2)
ENTROPY = Measure("entropy", "policy/entropy", over=0.2)

study = Study(
    variants=(
        Variant("no replay", SMOLLM2, FILTERED),
        Variant("replay", SMOLLM2, (*FILTERED, "sampling.mask_replay=20")),
    ),
    measures=(
        REWARD,
        Measure("mean reward of the run", "reward/mean", over=1),
        Measure("held-out reward without the filter", "eval/reward", over=0),
        Measure("untrained instructions", "eval/untrained/reward", over=0),
        Measure("tokens clipped", "policy/clip_fraction_tokens", over=1, percent=True),
        Measure("length", "response/length_mean", over=0.2),
        ENTROPY,
    ),
    panels=partial(draw_all, (REWARD, ENTROPY)),
)
