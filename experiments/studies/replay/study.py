"""Routing Replay: reward of GSPO, GRPO, and both with the old policy's (R2) or the sampler's (R3) routing.

Question. The GSPO paper reports that GRPO on a mixture of experts collapses without Routing Replay and that GSPO does
not need it; later work finds that replay helps every off-policy update. On policy, with 4 and with 16 minibatches?

Rule, written before the runs. Five seeds, 1 to 5; none is left out. The bed was found with seeds 0, 101 and 102, which
are not in the results. A run collapses if `guard.collapse` finds it: the mean reward of 5 steps stays below half of its
best for 10 steps. Primary measure: the training reward in the last tenth of the tokens, paired by seed, each arm
against GRPO without replay at 16 minibatches; a claim appears if the interval excludes 0 or if the collapses of two
arms differ by at least four of five seeds. On this bed GRPO with 16 minibatches collapses and the same on policy does
not, but on policy with as few rows per update collapses too (bed/README.md): that replay or another loss prevents the
collapse would show that off-policy updates cause it; that nothing does would not show the opposite.
"""

from functools import partial

from common import Measure, Start, Study, Variant, draw_curve, draw_seeds
from starts import GRPO, GSPO

BED = Start(
    "bed",
    "studies/bed/experiment.py",
    ("guard.collapse=gspax.config.Collapse", "guard.collapse.steps=10", "guard.collapse.window=5"),
)
REPLAY = {"": (), ", R2": ("routing_replay=old",), ", R3": ("routing_replay=sampler",)}
LOSSES = {
    **{f"GRPO{name}": (*GRPO, *overrides) for name, overrides in REPLAY.items()},
    **{f"GSPO{name}": (*GSPO, *overrides) for name, overrides in REPLAY.items() if name != ", R3"},
}
REWARD = Measure("training reward", "reward/mean")
CHANGED = Measure("expert choices changed", "routing/changed", over=1, percent=True)


def panels(arms, tokens):
    """The reward of every seed, its curve, and the changed expert choices."""
    curves = [partial(draw_curve, arms=arms, tokens=tokens, measure=measure) for measure in (REWARD, CHANGED)]
    return [partial(draw_seeds, arms=arms, tokens=tokens, measure=REWARD), *curves]


study = Study(
    arms=(
        *(
            Variant(f"{name}, {count} minibatches", BED, (*overrides, f"schedule.minibatches={count}"))
            for count in (16, 4)
            for name, overrides in LOSSES.items()
        ),
        Variant("on policy", BED, (*GRPO, "schedule.minibatches=1")),
    ),
    measures=(
        REWARD,
        Measure("mean reward of the run", "reward/mean", over=1),
        Measure("steps in a collapse", "alarm/collapse", over=1, percent=True),
        Measure("entropy", "policy/entropy"),
        CHANGED,
        Measure("gradient norm", "optim/grad_norm", over=1),
    ),
    seeds=(1, 2, 3, 4, 5),
    rows=tuple((*(f"{name}, {count} minibatches" for name in LOSSES), "on policy") for count in (16, 4)),
    panels=panels,
)
