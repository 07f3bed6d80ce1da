"""Filters: sampling through top-p or top-k, with log-probs over the whole vocabulary or over the sampling mask.

Question. With a filter, log-probs over the whole vocabulary give a gradient that is not that of what was sampled, and
that moves probability to tokens that were never tried. DeepSeek-V3.2 (arXiv 2512.02556) keeps the sampling mask, and
others report that runs with truncated sampling collapse without it. Does it matter at this size, for GSPO and GRPO?

Rule, written before the runs. Five seeds; none is left out. All variants continue the same warm start of a seed and are
compared at equal response tokens, paired by seed. Primary measure: the training reward in the last tenth of the tokens.
Replay helps a loss with a filter if the 95 % interval of its difference from the same loss and filter without replay is
above 0, and hurts if it is below 0. Four such differences decide: two losses, two filters. Variants without a filter
describe: their training reward is that of another distribution than with one. So does the reward of held-out
problems, sampled without a filter: it shows what the policy is outside of the sets that it was trained
on. Four minibatches per rollout, so that three of four updates are off policy. The filters were chosen before any run,
top-p 0.8 because others measured there, and top-k 3 of 12 tokens to have a filter that is on at every token.
"""

from functools import partial

from common import Measure, Study, Variant, draw_all
from starts import GRPO, GSPO, SORT

FILTERS = {"top-p 0.8": ("sampling.top_p=0.8",), "top-k 3": ("sampling.top_k=3",)}
REPLAY = ("sampling.mask_replay=12",)


def variants(loss, overrides):
    """A loss without a filter, and with each, without replay and with it."""
    yield Variant(f"{loss}, no filter", SORT, overrides)
    for name, filters in FILTERS.items():
        without = f"{loss}, {name}"
        yield Variant(without, SORT, (*overrides, *filters), f"{loss}, no filter")
        yield Variant(f"{without}, replay", SORT, (*overrides, *filters, *REPLAY), without)


REWARD = Measure("training reward", "reward/mean")
HELDOUT = Measure("held-out reward without a filter", "eval/reward", over=0)
ENTROPY = Measure("entropy", "policy/entropy")


study = Study(
    variants=(*variants("GSPO", GSPO), *variants("GRPO", GRPO)),
    measures=(
        REWARD,
        Measure("mean reward of the run", "reward/mean", over=1),
        HELDOUT,
        ENTROPY,
        Measure("tokens clipped", "policy/clip_fraction_tokens", over=1, percent=True),
        Measure("response length", "response/length_mean", over=1),
    ),
    rows=tuple(tuple(variant.name for variant in variants(loss, ())) for loss in ("GSPO", "GRPO")),
    panels=partial(draw_all, (REWARD, ENTROPY)),
)
