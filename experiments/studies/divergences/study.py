"""Forms of a distillation: which divergence from the teacher, and as a term of the loss or as an advantage?

Question. A teacher's whole distributions can be compared by the reverse KL, the forward KL, or a Jensen-Shannon
divergence, and the sampled tokens alone give an estimate of the reverse KL, either as a term of the loss or as an
advantage, which the loss then clips. Which form teaches a smaller student more, per response?

Rule, written before the runs. Five seeds; none is left out. The teacher is the model of `sort_gspo.py`, one for all
seeds, and the student is the dense one of `sort_distill.py` after a warm start of each seed: 60 rollouts of 128 prompts
with one response each, in 4 minibatches. Variants are compared at equal response tokens, paired by seed, with the
reverse KL of the whole vocabulary. Primary measure: the reward of the student's samples in the last tenth of the
tokens, for which no variant is trained. A form is better if the 95 % interval of its difference is above 0 and worse if
it is below. Four differences decide, so in one of five such studies one would exclude 0 by chance. The entropy
describes. None of these variants was run on this task before, except that `sort_distill.py` was, with 4 kept tokens.
"""

from functools import partial

from common import Measure, Start, Study, Variant, draw_all
from starts import QUIET

SORT = Start("sort", "sort_distill.py", (*QUIET, "teacher.kept=0", "schedule.steps=60", "schedule.minibatches=4"))
WHOLE = "teacher.divergence=gspax.losses.distill."
REWARD = Measure("training reward", "reward/mean")

study = Study(
    variants=(
        Variant("reverse KL", SORT, (f"{WHOLE}full_reverse_kl",)),
        Variant("forward KL", SORT, (f"{WHOLE}full_forward_kl",)),
        Variant("Jensen-Shannon, 0.5", SORT, (f"{WHOLE}jensen_shannon", "teacher.divergence.beta=0.5")),
        Variant("sampled token", SORT),
        Variant("sampled token, as an advantage", SORT, ("teacher.as_advantage=true",)),
    ),
    measures=(
        REWARD,
        Measure("mean reward of the run", "reward/mean", over=1),
        Measure("entropy", "policy/entropy"),
        Measure("tokens clipped", "policy/clip_fraction_tokens", over=1, percent=True),
        Measure("CPU seconds", "run/cpu_seconds", over=0),
    ),
    panels=partial(draw_all, (REWARD, Measure("entropy", "policy/entropy"))),
)
