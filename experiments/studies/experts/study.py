"""Expert choices that an update changes, against the learning rate, the number of experts and of layers, and top-k.

Question. The GSPO paper reports that about 10 % of the experts differ after one update, in a model of 48 layers. What
does that share depend on, and how much of it is rounding in bfloat16?

Rule, written before the runs. Five seeds; none is left out. Primary measure: the share of a token's experts that are
others after one update (the last one of a rollout batch), mean over the measurements of the run. Learning rates of one
model are compared in pairs; the share depends on a setting of the model where the 95 % intervals of two models at the
same rate do not overlap. The noise floor is the share that differs between float32 and bfloat16 with equal weights. The
relation to the update's size is shown with the KL divergence of a batch.

Added after the runs, from what they had left: the share by layer, in the model of 8 layers, and the norm of the last
update, relative to that of the parameters, from the moments in the last checkpoint. The share depends on depth at a
rate where the 95 % interval over seeds of the slope, by least squares over the layers, excludes 0. The norm describes.
"""

import json
import math
from functools import partial

import numpy as np
from common import Measure, Start, Study, Variant, color, draw_points, draw_seeds
from orbax.checkpoint import PyTreeCheckpointer
from starts import GSPO, SORT

from gspax.report.curves import style_axes
from gspax.report.statistics import estimate_mean

MODELS = {
    "2 layers, 4 experts, top-2": (),
    "8 layers": ("model.num_hidden_layers=8",),
    "16 experts": ("model.num_experts=16", "model.moe_intermediate_size=16"),
    "64 experts": ("model.num_experts=64", "model.moe_intermediate_size=16"),
    "16 experts, top-4": ("model.num_experts=16", "model.moe_intermediate_size=16", "model.num_experts_per_tok=4"),
}
STARTS = {name: Start(name, SORT.base, (*SORT.overrides, *overrides)) for name, overrides in MODELS.items()}
MEASURED = ("diagnostics=gspax.config.Diagnostics", "diagnostics.every=5")
RATES = ("1e-4", "3e-4", "1e-3")
UPDATE = Measure("changed by an update", "routing/changed_by_update", over=1, percent=True)
BATCH = Measure("changed by a batch's updates", "routing/changed", over=1, percent=True)
ROUNDING = Measure("changed by rounding", "routing/changed_by_rounding", over=1, percent=True)
KL = Measure("KL of a batch", "policy/kl", over=1)
LAYERS = tuple(
    Measure(f"layer {n + 1}", f"routing/changed_by_update/layer_{n}", over=1, percent=True) for n in range(8)
)
NORM = Measure("norm of an update", "update/relative_norm", over=0)


def panels(variants, tokens):
    """The panels of a row. Variants at one rate: the three shares, and a batch's share against its KL divergence.
    Variants at several rates: an update's share against its norm, and by layer."""
    if len({variant.name.rpartition(" ")[2] for variant in variants}) > 1:
        norms = partial(draw_points, variants=variants, tokens=tokens, x=NORM, y=UPDATE, log=True)
        return [norms, partial(draw_layers, variants=variants, tokens=tokens)]
    shares = [partial(draw_seeds, variants=variants, tokens=tokens, measure=each) for each in (UPDATE, BATCH, ROUNDING)]
    return [*shares, partial(draw_points, variants=variants, tokens=tokens, x=KL, y=BATCH, log=True)]


def draw_layers(axes, variants, tokens):
    """The share that an update changes in each layer: means over seeds with 95 % intervals."""
    for i, variant in enumerate(variants):
        found = [each for layer in LAYERS if (each := layer.values(variant, tokens))]
        means = [estimate_mean(np.array([*each.values()])) for each in found]
        bounds = [[each.mean - each.low for each in means], [each.high - each.mean for each in means]]
        at = np.arange(1, len(means) + 1) + 0.04 * i
        axes.errorbar(at, [each.mean for each in means], bounds, color=color(i), marker="o", capsize=2)
    style_axes(axes, "changed by an update, by layer", "layer", "mean, 95 % interval", legend=0)


def last_update(folder):
    """The norm of AdamW's last update, from the moments after it, over the norm of the parameters."""
    checkpoint = max((folder / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
    state = PyTreeCheckpointer().restore(checkpoint)
    settings = json.loads((folder / "experiment.json").read_text())["optimizer"]
    b1, b2, eps = (settings["transform"][name] for name in ("b1", "b2", "eps"))  # there is no weight decay
    adam = "opt_state/1/0/"
    count, moved, whole = state[f"{adam}count"], 0.0, 0.0
    for name in (name for name in state if name.startswith("params/")):
        mean, square = (state[name.replace("params/", f"{adam}{moment}/")] for moment in ("mu", "nu"))
        step = mean / (1 - b1**count) / (np.sqrt(square / (1 - b2**count)) + eps)
        moved, whole = moved + float((step**2).sum()), whole + float((state[name] ** 2).sum())
    return {NORM.metric: settings["learning_rate"] * math.sqrt(moved / whole)}


study = Study(
    variants=tuple(
        Variant(f"{name}, rate {rate}", start, (*GSPO, *MEASURED, f"optimizer.learning_rate={rate}"))
        for name, start in STARTS.items()
        for rate in RATES
    ),
    measures=(UPDATE, BATCH, ROUNDING, KL, Measure("training reward", "reward/mean")),
    rows=(
        *(tuple(f"{name}, rate {rate}" for name in STARTS) for rate in RATES),
        tuple(f"{name}, rate {rate}" for name in ("8 layers", "64 experts") for rate in RATES),
    ),
    panels=panels,
    columns=(*LAYERS, NORM),
    probe=last_update,
)
