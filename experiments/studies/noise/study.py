"""Noise of its own for each problem, the same in every epoch: what does it do to learning?

Question. With `sampling.noise="problem"` the random numbers of a sample are the same in every epoch, so that drafts
from the epoch before are mostly right. From the second epoch on a sample is then not quite one of the policy, which was
trained on its samples of the same noise. Does a policy learn less from such samples, or generalize worse?

Rule, written before the runs. Five seeds; none is left out. Sorting 3 to 6 digits, 60 rollouts of 32 x 8 samples, with
128 problems that come again in 15 epochs, and with 32 that come again in every rollout, so that a harm has time to
show. Both kinds of noise continue the same warm start of a seed and see the same problems in the same order. Primary
measure: the reward of 512 held-out problems after the last step, one sample each with fresh noise, the same in all
runs. Noise of problems harms if the 95 % interval of its difference from fresh noise with as many problems, paired by
seed, is below 0; it helps if it is above 0. Two differences decide, so in one of ten such studies one would exclude 0
by chance. The training reward, the entropy, and the share of groups whose rewards are all equal describe: the training
reward with noise of problems is of samples that the policy was trained on. The runs with noise of problems are repeated
with `sampling.drafts=3`, at first on seed 0 alone, and since those results on all seeds. Drafts change what is learned
unless their difference in held-out reward is 0 in every seed. Neither kind of noise was run on these problems before.
"""

from functools import partial

from common import Measure, Start, Study, Variant, draw_all

SORT = Start(
    "sort",
    "studies/noise/experiment.py",
    (
        *("schedule.eval_every=20", "schedule.checkpoint_every=0", "evaluation.problems=512"),
        *("sampling.prompts=32", "schedule.steps=60"),
    ),
)
SHARED, DRAFTS = ("sampling.noise=problem",), "sampling.drafts=3"
HELDOUT = Measure("held-out reward", "eval/reward", over=0)
REWARD = Measure("training reward", "reward/mean")

study = Study(
    variants=(
        Variant("128 problems, fresh noise", SORT, ("data.count=128",)),
        Variant("128 problems, their own noise", SORT, ("data.count=128", *SHARED)),
        Variant(
            "these 128 problems with 3 drafts",
            SORT,
            ("data.count=128", *SHARED, DRAFTS),
            "128 problems, their own noise",
        ),
        Variant("32 problems, fresh noise", SORT, ("data.count=32",)),
        Variant("32 problems, their own noise", SORT, ("data.count=32", *SHARED), "32 problems, fresh noise"),
        Variant(
            "these 32 problems with 3 drafts", SORT, ("data.count=32", *SHARED, DRAFTS), "32 problems, their own noise"
        ),
    ),
    measures=(
        HELDOUT,
        REWARD,
        Measure("mean training reward of the run", "reward/mean", over=1),
        Measure("entropy", "policy/entropy"),
        Measure("groups of equal rewards", "reward/zero_std_groups", percent=True),
    ),
    panels=partial(draw_all, (HELDOUT, REWARD, Measure("entropy", "policy/entropy"))),
)
