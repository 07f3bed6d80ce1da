"""GSPO-token with an advantage for each turn, against GSPO with one for the conversation.

Question. GSPO-token exists so that tokens of one response can have different advantages. Do advantages of turns help
in conversations of about three turns with a calculator?

Rule, written before the runs. Five seeds; none is left out. Primary measure: the training reward in the last tenth of
the tokens, paired by seed; GSPO-token is better only if the interval of the difference excludes 0. Three seeds of an
earlier commit showed none (experiments/README.md).
"""

from common import Measure, Start, Study, Variant

CALCULATOR = Start(
    "calculator",
    "calculator_gspo_token.py",
    ("schedule.eval_every=0", "schedule.checkpoint_every=0", "evaluation.problems=64"),
)

study = Study(
    variants=(
        Variant("GSPO", CALCULATOR, ("loss=gspax.losses.gspo", "turns.credit=conversation")),
        Variant("GSPO-token, advantages of the conversation", CALCULATOR, ("turns.credit=conversation",)),
        Variant("GSPO-token, advantages of turns", CALCULATOR),
    ),
    measures=(
        Measure("training reward", "reward/mean"),
        Measure("mean reward of the run", "reward/mean", over=1),
        Measure("tokens clipped", "policy/clip_fraction_tokens", over=1, percent=True),
        Measure("response length", "response/length_mean"),
    ),
)
