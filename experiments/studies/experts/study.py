"""Expert choices that an update changes, against the learning rate, the number of experts and of layers, and top-k.

Question. The GSPO paper reports that about 10 % of the experts differ after one update, in a model of 48 layers. What
does that share depend on, and how much of it is rounding in bfloat16?

Rule, written before the runs. Five seeds; none is left out. Primary measure: the share of a token's experts that are
others after one update (the last one of a rollout batch), mean over the measurements of the run. Learning rates of one
model are compared in pairs; the share depends on a setting of the model where the 95 % intervals of two models at the
same rate do not overlap. The noise floor is the share that differs between float32 and bfloat16 with equal weights. The
relation to the update's size is shown with the KL divergence of a batch.
"""

from functools import partial

from common import Measure, Start, Study, Variant, draw_points, draw_seeds
from starts import GSPO, SORT

MODELS = {
    "2 layers, 4 experts, top-2": (),
    "8 layers": ("model.num_hidden_layers=8",),
    "16 experts": ("model.num_experts=16", "model.moe_intermediate_size=16"),
    "64 experts": ("model.num_experts=64", "model.moe_intermediate_size=16"),
    "16 experts, top-4": ("model.num_experts=16", "model.moe_intermediate_size=16", "model.num_experts_per_tok=4"),
}
STARTS = {name: Start(name, SORT.base, (*SORT.overrides, *overrides)) for name, overrides in MODELS.items()}
MEASURED = ("instruments=gspax.config.Instruments", "instruments.every=5")
RATES = ("1e-4", "3e-4", "1e-3")
UPDATE = Measure("changed by an update", "routing/changed_by_update", over=1, percent=True)
BATCH = Measure("changed by a batch's updates", "routing/changed", over=1, percent=True)
ROUNDING = Measure("changed by rounding", "routing/changed_by_rounding", over=1, percent=True)
KL = Measure("KL of a batch", "policy/kl", over=1)


def panels(arms, tokens):
    """The three shares of each model at one rate, and the share of a batch against its KL divergence."""
    shares = [partial(draw_seeds, arms=arms, tokens=tokens, measure=each) for each in (UPDATE, BATCH, ROUNDING)]
    return [*shares, partial(draw_points, arms=arms, tokens=tokens, x=KL, y=BATCH, log=True)]


study = Study(
    arms=tuple(
        Variant(f"{name}, rate {rate}", start, (*GSPO, *MEASURED, f"optimizer.learning_rate={rate}"))
        for name, start in STARTS.items()
        for rate in RATES
    ),
    measures=(UPDATE, BATCH, ROUNDING, KL, Measure("training reward", "reward/mean")),
    rows=tuple(tuple(f"{name}, rate {rate}" for name in STARTS) for rate in RATES),
    panels=panels,
)
