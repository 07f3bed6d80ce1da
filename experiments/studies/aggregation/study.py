"""Length bias: GSPO's and GRPO's losses as a mean over responses, over tokens, or divided by a constant.

Question. Under `by_sequence` a token of a long response counts less, so that long wrong responses are punished less.
Do responses become longer under it, or shorter under the others?

Rule, written before the runs. Five seeds; none is left out. Primary measure: the mean response length in the last
tenth of the tokens, paired by seed; an aggregation changes the length where the interval of its difference from
`by_sequence` excludes 0. Both tasks have answers of a fixed length, so what can be seen is small: responses that go
on after the answer or stop early.
"""

from common import Measure, Study, Variant
from starts import ADDITION, GRPO, GSPO

study = Study(
    variants=tuple(
        Variant(
            f"{loss}, {name}", ADDITION, (*overrides, f"loss.aggregate=gspax.losses.{name}"), f"{loss}, by_sequence"
        )
        for loss, overrides in {"GSPO": GSPO, "GRPO": GRPO}.items()
        for name in ("by_sequence", "by_token", "by_constant")
    ),
    measures=(
        Measure("response length", "response/length_mean"),
        Measure("truncated", "response/truncated", over=1, percent=True),
        Measure("training reward", "reward/mean"),
        Measure("gradient norm", "optim/grad_norm", over=1),
    ),
)
