"""Precision: old log-probs recomputed or the sampler's own, in float32 and from 8-bit weights, for both ratios.

Question. The GSPO paper expects that sequence likelihoods tolerate imprecise log-probs, so that those of the sampler
could be the ratio's denominator. Is GSPO hurt less by them than GRPO?

Rule, written before the runs. Five seeds; none is left out. Primary measure: the training reward in the last tenth of
the tokens, paired by seed. A loss is hurt where the interval of its difference from recomputed float32 log-probs
excludes 0. GSPO's claim holds if GRPO is hurt by a precision and GSPO is not. If neither is, the claim was not
tested. Clip ranges are not changed with the precision.
"""

from common import Measure, Study, Variant
from starts import ADDITION, GRPO, GSPO

EIGHT_BITS = ("sampling.weights_dtype=int8", "sampling.kv_cache_dtype=int8")
PRECISIONS = {
    "recomputed": (),
    "sampler's, float32": ("old_logp=sampler",),
    "recomputed, 8-bit sampler": EIGHT_BITS,
    "sampler's, 8-bit": ("old_logp=sampler", *EIGHT_BITS),
}

study = Study(
    arms=tuple(
        Variant(f"{loss}, {precision}", ADDITION, (*losses, *overrides), f"{loss}, recomputed")
        for loss, losses in {"GSPO": GSPO, "GRPO": GRPO}.items()
        for precision, overrides in PRECISIONS.items()
    ),
    measures=(
        Measure("training reward", "reward/mean"),
        Measure("mean reward of the run", "reward/mean", over=1),
        Measure("tokens clipped", "policy/clip_fraction_tokens", over=1, percent=True),
        Measure("KL of a batch", "policy/kl", over=1),
    ),
)
