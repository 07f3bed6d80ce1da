"""Precision: old log-probs recomputed or the sampler's own, in float32, bfloat16 and 8 bits, and with added noise.

Question. The GSPO paper expects that sequence likelihoods tolerate imprecise log-probs, so that those of the sampler
could be the ratio's denominator. Is GSPO hurt less by them than GRPO? Does a correction help with an 8-bit sampler?

Rule, written before the runs. Five seeds; none is left out. Primary measure: the training reward in the last tenth of
the tokens, paired by seed. A loss is hurt where the interval of its difference from recomputed float32 log-probs
excludes 0. GSPO's claim holds if GRPO is hurt by a precision and GSPO is not. If neither is, the claim was not
tested. Clip ranges are not changed with the precision.

Added later, before the runs of these variants:

- Noise: each token's old log-prob has Gaussian noise with a standard deviation of 0.01, 0.1, 0.3 or 1, new in each
  update. A mean over T tokens has 1/√T of it. What decides at each of the four is the difference between the harms:
  GSPO tolerates noise better, or worse, than GRPO where the 95 % interval of
  (GSPO - GSPO without noise) - (GRPO - GRPO without noise), paired by seed, excludes 0.
- bfloat16: activations and matrix products of the sampler, of scoring and of training are in bfloat16
  (`model.dtype`), parameters and log-softmax in float32. The sampler's log-probs are compared with recomputed ones,
  both in bfloat16, in the same way as the noise.
- Corrections for the 8-bit sampler: `truncate_sequences` for GSPO and `truncate_tokens` for GRPO, each compared with
  the same sampler and recomputed log-probs without a correction. A correction helps, or hurts, where that interval
  excludes 0.
"""

from dataclasses import replace
from functools import partial

from common import Measure, Study, Variant, draw_seeds
from starts import ADDITION, GRPO, GSPO

NOISY = replace(ADDITION, base="studies/precision/experiment.py")  # with the warm starts of ADDITION
EIGHT_BITS = ("sampling.weights_dtype=int8", "sampling.kv_cache_dtype=int8")
BFLOAT16 = ("model.dtype=bfloat16",)
PRECISIONS = {
    "recomputed": (),
    "sampler's, float32": ("old_logp=sampler",),
    "recomputed, 8-bit sampler": EIGHT_BITS,
    "sampler's, 8-bit": ("old_logp=sampler", *EIGHT_BITS),
    "recomputed, bfloat16": BFLOAT16,
    "sampler's, bfloat16": ("old_logp=sampler", *BFLOAT16),
}
NOISE = ("0.01", "0.1", "0.3", "1")
CORRECTIONS = {"GSPO": "truncate_sequences", "GRPO": "truncate_tokens"}


def variants(loss, losses):
    """Precisions, noise and corrections of one loss."""
    for precision, overrides in PRECISIONS.items():
        against = "recomputed, bfloat16" if precision == "sampler's, bfloat16" else "recomputed"
        yield Variant(f"{loss}, {precision}", ADDITION, (*losses, *overrides), f"{loss}, {against}")
    based = tuple(each.replace("loss", "loss.base", 1) for each in losses)
    for noise in NOISE:
        yield Variant(f"{loss}, noise {noise}", NOISY, (*based, f"loss.noise={noise}"), f"{loss}, recomputed")
    corrected = (*losses, *EIGHT_BITS, f"correction=gspax.losses.correction.{CORRECTIONS[loss]}")
    yield Variant(f"{loss}, corrected, 8-bit sampler", ADDITION, corrected, f"{loss}, recomputed, 8-bit sampler")


REWARD = Measure("training reward", "reward/mean")
SPEED = Measure("mean reward of the run", "reward/mean", over=1)
CLIPPED = Measure("tokens clipped", "policy/clip_fraction_tokens", over=1, percent=True)


def panels(variants, tokens):
    """Every seed of the measures that decide or describe."""
    return [partial(draw_seeds, variants=variants, tokens=tokens, measure=each) for each in (REWARD, SPEED, CLIPPED)]


study = Study(
    variants=(*variants("GSPO", GSPO), *variants("GRPO", GRPO)),
    measures=(
        REWARD,
        SPEED,
        CLIPPED,
        Measure("KL of a batch", "policy/kl", over=1),
    ),
    panels=panels,
    rows=tuple(
        tuple(f"{loss}, {name}" for name in names)
        for names in (
            (*PRECISIONS, "corrected, 8-bit sampler"),
            ("recomputed", *(f"noise {noise}" for noise in NOISE)),
        )
        for loss in ("GSPO", "GRPO")
    ),
)
