"""Routing Replay: reward of GSPO, GRPO, and both with the old policy's (R2) or the sampler's (R3) routing.

Question. The GSPO paper reports that GRPO on a mixture of experts collapses without Routing Replay and that GSPO does
not need it; later work finds that replay helps every off-policy update. On policy, with 4 and with 16 minibatches?

Rule, written before the runs. Five seeds, 1 to 5; none is left out. The testbed was found with seeds 0, 101 and 102,
which are not in the results. A run collapses if `guard.collapse` finds it: the mean reward of 5 steps stays below
half of its best for 10 steps. Primary measure: the training reward in the last tenth of the tokens, paired by seed,
each variant against GRPO without replay at 16 minibatches; a claim appears if the interval excludes 0 or if the
collapses of two variants differ by at least four of five seeds. On this testbed GRPO with 16 minibatches collapses
and the same on policy does not, but on policy with as few rows per update collapses too (testbed/README.md): that
replay or another loss prevents the collapse would show that off-policy updates cause it; that nothing does would not
show the opposite.

Rule of the second testbed, written before its runs. Rollout batches of 8 x 8 rows, each used for 16 updates of all 64
rows: GRPO collapses on three of three seeds, and on policy it learns over as many updates of as many rows
(testbed/README.md), so the collapse needs stale rows. Seeds and primary measure as above, each variant against GRPO
without replay. A run of 20 batches collapses if the mean of 5 steps stays below half of its best for 5 steps. A
method prevents the collapse if it collapses on at least four seeds fewer; an interval that excludes 0 without that is
a milder collapse. GSPO appears with the paper's clip range and with a hundred times that: if only the paper's
prevents the collapse, the clipped share does it, not the level of the ratio. Two controls are on policy: over the
same 20 batches, in the same table, and over 320 batches, as many updates as the other variants take, where the steps
of the collapse are updates, 80 and 80.

Rule of the third testbed, written before its runs. The second testbed at 3e-4, over 40 batches: at 5e-4 updates of 64
rows collapse on policy too, after 550 of them. Everything else is decided as on the second testbed, without the
variants of the wider clip range and of 20 updates on policy. The control takes 640 updates.
"""

from functools import partial

from common import Measure, Start, Study, Variant, draw_all
from starts import GRPO, GSPO

TESTBED = Start(
    "testbed",
    "studies/testbed/experiment.py",
    ("guard.collapse=gspax.config.Collapse", "guard.collapse.steps=10", "guard.collapse.window=5"),
)
REUSE = (
    "guard.collapse=gspax.config.Collapse",
    "guard.collapse.steps=5",
    "guard.collapse.window=5",
    "sampling.prompts=8",
    "schedule.minibatches=1",
)
SLOW = "optimizer.learning_rate=3e-4"
STALE = Start("testbed, 16 epochs", TESTBED.base, (*REUSE, "schedule.steps=20"))
CONTROL = Start("testbed, on policy", TESTBED.base, REUSE, STALE.name)
STALE_SLOW = Start("testbed, 16 epochs, 3e-4", TESTBED.base, (*REUSE, SLOW, "schedule.steps=40"), STALE.name)
CONTROL_SLOW = Start("testbed, on policy, 3e-4", TESTBED.base, (*REUSE, SLOW), STALE.name)
REPLAY = {"": (), ", R2": ("routing_replay=old",), ", R3": ("routing_replay=sampler",)}
LOSSES = {
    **{f"GRPO{name}": (*GRPO, *overrides) for name, overrides in REPLAY.items()},
    **{f"GSPO{name}": (*GSPO, *overrides) for name, overrides in REPLAY.items() if name != ", R3"},
}
BY_UPDATE = ("guard.collapse.steps=80", "guard.collapse.window=80")
STALE_LOSSES = {**LOSSES, "GSPO 3e-2 / 4e-2": (GSPO[0], "loss.clip_low=3e-2", "loss.clip_high=4e-2")}
REWARD = Measure("training reward", "reward/mean")
CHANGED = Measure("expert choices changed", "routing/changed", over=1, percent=True)


study = Study(
    variants=(
        *(
            Variant(f"{name}, {count} minibatches", TESTBED, (*overrides, f"schedule.minibatches={count}"))
            for count in (16, 4)
            for name, overrides in LOSSES.items()
        ),
        Variant("on policy", TESTBED, (*GRPO, "schedule.minibatches=1")),
        *(
            Variant(f"{name}, 16 epochs", STALE, (*overrides, "schedule.epochs=16"))
            for name, overrides in STALE_LOSSES.items()
        ),
        Variant("on policy, 20 updates", STALE, GRPO),
        Variant("on policy, 320 updates", CONTROL, (*GRPO, "schedule.steps=320", *BY_UPDATE)),
        *(
            Variant(f"{name}, 16 epochs, 3e-4", STALE_SLOW, (*overrides, "schedule.epochs=16"))
            for name, overrides in LOSSES.items()
        ),
        Variant("on policy, 640 updates, 3e-4", CONTROL_SLOW, (*GRPO, "schedule.steps=640", *BY_UPDATE)),
    ),
    measures=(
        REWARD,
        Measure("mean reward of the run", "reward/mean", over=1),
        Measure("steps in a collapse", "alarm/collapse", over=1, percent=True),
        Measure("entropy", "policy/entropy"),
        CHANGED,
        Measure("tokens clipped", "policy/clip_fraction_tokens", over=1, percent=True),
        Measure("gradient norm", "optim/grad_norm", over=1),
    ),
    seeds=(1, 2, 3, 4, 5),
    rows=(
        *((*(f"{name}, {count} minibatches" for name in LOSSES), "on policy") for count in (16, 4)),
        (*(f"{name}, 16 epochs" for name in STALE_LOSSES), "on policy, 20 updates"),
        ("on policy, 320 updates",),
        tuple(f"{name}, 16 epochs, 3e-4" for name in LOSSES),
        ("on policy, 640 updates, 3e-4",),
    ),
    panels=partial(draw_all, (REWARD, CHANGED)),
)
