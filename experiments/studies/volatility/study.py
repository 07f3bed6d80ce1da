"""Router volatility as a treatment: GRPO and GSPO, with and without Routing Replay, where updates change 2 to 20 % of
the expert choices.

Question. The GSPO paper says that GRPO collapses on a mixture of experts because one update changes about 10 % of the
expert choices, and that Routing Replay or GSPO prevents it. No testbed of the other studies breaks in that way, but
their updates change 0.1 to 2 % of the choices (experts/README.md), and larger updates break a policy for other reasons
too. Here a random term in the routers' weights, a new one after every update (experiment.py), changes more choices
while everything else is learned as before. Does stale routing harm then, and does replay, or GSPO, help?

Rule, written before the runs. Seeds 1 to 5; none is left out. The testbed with 2 of its 4 layers. Seed 0 with 4 layers,
which is not in the results, served to choose two standard deviations, by the share of choices alone: 0.05 changed 25 %
of them, and 0.015 should change 5 to 10 %. The third dose is none: what the optimizer changes by itself. Each batch of
256 rows is divided into four updates, of which three have stale routing. The controls *on policy* take as many updates
of as many rows, each from a rollout of its own, with the same dose; the control with a frozen router changes choices
only through the layers below. R3 is tried at the largest dose alone: in float32 the sampler's routing is that of the
old policy (R2) except for rounding.

Primary measure: the training reward in the last tenth of the tokens, paired by seed, 95 % intervals.
1. The term itself harms at a dose if on policy at that dose is below on policy without it.
2. Stale routing harms at a dose if GRPO is below on policy of that dose, and this interval lies wholly below the one
   without the term, where updates off policy may harm for other reasons.
3. Replay helps a loss at a dose if its interval, from the same loss and dose without replay, is above 0, and harms if
   it is below 0.
4. GSPO withstands a dose better than GRPO if its interval from GRPO at that dose is above 0 and does not overlap with
   the one without the term.
5. A run collapses if the mean reward of 5 steps stays below half of its best for 10 steps (40 steps on policy, which
   are as many tokens); a loss or replay prevents collapses at a dose if it has them on at least four seeds fewer.
Seven intervals decide about replay; one of twenty would exclude 0 by chance.
"""

from collections.abc import Mapping
from functools import partial

from common import Measure, Start, Study, Variant, VariantRuns, compare_differences, draw_all, join_rows
from starts import GRPO, GSPO

COLLAPSE = ("guard.collapse=gspax.config.Collapse", "guard.collapse.steps=10", "guard.collapse.window=5")
SMALL = ("model.num_hidden_layers=2", "schedule.steps=30")
START = Start("volatility", "studies/volatility/experiment.py", (*COLLAPSE, *SMALL))
ON_POLICY = (
    *("sampling.prompts=8", "schedule.minibatches=1", "schedule.steps=120"),
    *("guard.collapse.steps=40", "guard.collapse.window=20"),
)
DOSES = {"": (), ", 0.015": ("optimizer.transform.sigma=0.015",), ", 0.05": ("optimizer.transform.sigma=0.05",)}
LOSSES = {  # name: overrides, and the variant that it is compared with
    "on policy": ((*GRPO, *ON_POLICY), ""),
    "GRPO": (GRPO, "on policy"),
    "GRPO, R2": ((*GRPO, "routing_replay=old"), "GRPO"),
    "GSPO": (GSPO, "GRPO"),
    "GSPO, R2": ((*GSPO, "routing_replay=old"), "GSPO"),
}
REWARD = Measure("training reward", "reward/mean")
CHANGED = Measure("expert choices changed by a batch", "routing/changed", over=1, percent=True)
OVER_THE_RUN = Measure("mean reward of the run", "reward/mean", over=1)


def compare_doses(variants: Mapping[str, VariantRuns], tokens: float) -> str:
    """What a dose costs a loss beyond what it costs on policy. Chosen after the runs, so no rule above refers to it."""
    lines = [["post hoc", *(f"{dose[2:]}, {at}" for dose in DOSES if dose for at in ("end (primary)", "over the run"))]]
    lines.append(["---"] * len(lines[0]))
    for loss in LOSSES:
        if loss == "on policy":
            continue
        none = variants[loss], variants["on policy"]
        pairs = [(variants[loss + dose], variants["on policy" + dose]) for dose in DOSES if dose]
        cells = [compare_differences(each, tokens, pair, none) for pair in pairs for each in (REWARD, OVER_THE_RUN)]
        lines.append([loss, *cells])
    title = "Differences of differences: a loss minus on policy at a dose, less the same without the term, by seed."
    return f"{title}\n\n{join_rows(lines)}"


study = Study(
    variants=(
        *(
            Variant(name + dose, START, (*overrides, *sigma), against + dose if against else "on policy")
            for dose, sigma in DOSES.items()
            for name, (overrides, against) in LOSSES.items()
        ),
        Variant("GRPO, R3, 0.05", START, (*GRPO, "routing_replay=sampler", *DOSES[", 0.05"]), "GRPO, 0.05"),
        Variant("GRPO, frozen router", START, (*GRPO, "optimizer.frozen=router"), "GRPO"),
    ),
    measures=(
        REWARD,
        OVER_THE_RUN,
        Measure("steps in a collapse", "alarm/collapse", over=1, percent=True),
        CHANGED,
        Measure("KL of a batch", "policy/kl", over=1),
        Measure("tokens clipped", "policy/clip_fraction_tokens", over=1, percent=True),
        Measure("entropy", "policy/entropy"),
    ),
    seeds=(1, 2, 3, 4, 5),
    rows=(
        *(tuple(name + dose for name in LOSSES) for dose in DOSES),
        ("GRPO", "GRPO, frozen router", "GRPO, 0.05", "GRPO, R3, 0.05"),
    ),
    panels=partial(draw_all, (REWARD, CHANGED)),
    more=compare_doses,
)
