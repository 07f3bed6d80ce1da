"""The tasks and warm starts that studies share."""

from common import Start

QUIET = ("schedule.eval_every=0", "schedule.checkpoint_every=0", "evaluation.problems=64")
SORT = Start("sort", "sort_gspo.py", (*QUIET, "sampling.prompts=32", "schedule.steps=60"))
SMOLLM2 = Start("SmolLM2", "studies/real_model/experiment.py", checkpoint=".cache/smollm2")
ADDITION = Start(  # 3 or 4 terms: responses of 31 or 40 tokens
    "addition",
    "addition_gspo.py",
    (
        *QUIET,
        "data.min_terms=3",
        "data.max_terms=4",
        "sampling.prompts=16",
        "sampling.max_prompt_tokens=12",
        "sampling.max_tokens=41",
        "schedule.steps=40",
        "warm_start.steps=300",
    ),
)
GSPO = ("loss=gspax.losses.gspo", "loss.clip_low=3e-4", "loss.clip_high=4e-4")
GRPO = ("loss=gspax.losses.grpo", "loss.clip_low=0.2", "loss.clip_high=0.27")
PRIME_RL = (  # its default loss
    "loss=gspax.losses.dppo_tv",
    "loss.threshold=0.2",
    "loss.ratio_limit=1e9",
    "old_logp=sampler",
    "regularizers.log_ratio_square=1e-3",
)
