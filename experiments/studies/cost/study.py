"""The cost of a step: GSPO, GRPO, Routing Replay, and old log-probs computed by the learner or taken from the sampler.

Question. GSPO needs no Routing Replay and, its paper suggests, no pass for old log-probs. What does that
save?

Rule, written before the runs. Five seeds; none is left out. Primary measure: CPU-seconds of a step, mean over the
second half of the run, paired by seed; a cost is reported where the 95 % interval of its difference from GSPO excludes
0. Peak memory is that of the whole process, compilation included. CPU time of one thread: no other machine is meant.
"""

from functools import partial

from common import Measure, Study, Variant, draw_seeds
from starts import ADDITION, GRPO, GSPO

MEASURES = (
    Measure("CPU-s a step", "cpu/step", over=0.5),
    Measure("rollout", "cpu/rollout", over=0.5),
    Measure("old log-probs", "cpu/old_logp", over=0.5),
    Measure("updates", "cpu/train", over=0.5),
    Measure("peak MB", "run/peak_mb", over=0),
)

study = Study(
    variants=(
        Variant("GSPO", ADDITION, (*GSPO, "schedule.steps=12")),
        Variant("GRPO", ADDITION, (*GRPO, "schedule.steps=12")),
        Variant("GSPO, old log-probs of the sampler", ADDITION, (*GSPO, "old_logp=sampler", "schedule.steps=12")),
        Variant("GSPO, R2", ADDITION, (*GSPO, "routing_replay=old", "schedule.steps=12")),
        Variant("GSPO, R3", ADDITION, (*GSPO, "routing_replay=sampler", "schedule.steps=12")),
        Variant(
            "GSPO, R3, old log-probs of the sampler",
            ADDITION,
            (*GSPO, "routing_replay=sampler", "old_logp=sampler", "schedule.steps=12"),
        ),
    ),
    measures=MEASURES,
    panels=lambda variants, tokens: [
        partial(draw_seeds, variants=variants, tokens=tokens, measure=each) for each in MEASURES
    ],
)
