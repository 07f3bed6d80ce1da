"""Write the table of docs/parity.md: every family against transformers, measured now.

    python tests/parity_table.py [MODEL_TYPE ...]

With names only those rows are measured and the others are kept. A cell that fails its bound is written in bold.
"""

import re
import sys
import tempfile
from pathlib import Path

import conftest  # compiles as the tests do
import families

from gspax.hf.families import FAMILIES

assert conftest

PAGE = Path(__file__).parents[1] / "docs" / "parity.md"
BEGIN, END = "<!-- begin table of families -->\n", "<!-- end table of families -->\n"
HEAD = (
    "| family | logits | gradient | greedy | packed rows | slots | export, float32 | export, bfloat16 | LoRA "
    "| published configuration | parameters |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
)


def below(value, bound):
    return f"{value:.1g}" if value <= bound else f"**{value:.1g}**"


def is_so(value):
    return "equal" if value else "**different**"


def measure(model_type, folder):
    """A row of the table."""

    def new(name):
        (path := folder / name).mkdir()
        return path

    model = families.make_model(model_type)
    model.save_pretrained(files := new("files"))
    config, params = families.read(files)
    tokens_BT = families.random_tokens(config, 8, 11)
    ours, theirs = families.our_logits(params, config, tokens_BT), families.their_logits(model, tokens_BT)
    greedy = families.greedy_tokens(params, config, model)
    counts = families.published_counts(model_type, new("published"))
    cells = [
        f"`{model_type}`",
        below(families.relative(ours, theirs), 1e-5),
        below(families.gradient_difference(params, config, model, new("gradient")), 1e-4),
        is_so(greedy[0] == greedy[1]),
        below(families.packed_difference(params, config), 1e-5),
        is_so(families.slots_are_equal(params, config)),
        *(is_so(families.export_is_equal(model_type, new(dtype), dtype)) for dtype in ("float32", "bfloat16")),
        below(families.lora_difference(params, config, new("lora")), 1e-5),
        families.PUBLISHED[model_type][0],
        f"{counts[0]:,}" if counts[0] == counts[1] else f"**{counts[0]:,}, not {counts[1]:,}**",
    ]
    return f"| {' | '.join(cells)} |\n"


def main(names):
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = {name: line + "\n" for line in table.splitlines() for name in re.findall(r"^\| `(\w+)` ", line)}
    for model_type in names or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            rows[model_type] = measure(model_type, Path(folder))
        print(rows[model_type], end="", flush=True)
    ordered = "".join(rows[name] for name in FAMILIES if name in rows)
    PAGE.write_text(f"{before}{BEGIN}{HEAD}{ordered}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
