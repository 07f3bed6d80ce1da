"""Write the table of docs/parity.md: every family against transformers, measured now.

    python tests/parity_table.py [--columns NAME,...] [MODEL_TYPE ...]

With columns, such as `logits,training`, or with families only their cells are measured, and the others are kept. A cell
that fails its bound is written in bold. The cells of a family take about 40 seconds of CPU time, most of it "training".
"""

import argparse
import re
import tempfile
import time
from functools import cached_property
from pathlib import Path

import conftest  # compiles as the tests do
import families

from gspax.hf.families import FAMILIES

assert conftest

PAGE = Path(__file__).parents[1] / "docs" / "parity.md"
BEGIN, END = "<!-- begin table of families -->\n", "<!-- end table of families -->\n"
STEPS, MORE_STEPS = 20, {"granitemoehybrid": 40}  # of training: docs/parity.md says why


class Case:
    """A small model of a family in transformers, and in gspax from the files that transformers saves."""

    def __init__(self, model_type, folder):
        self.model_type, self.folder = model_type, folder

    def new(self, name):
        """An empty folder."""
        (path := self.folder / name).mkdir()
        return path

    @cached_property
    def model(self):
        return families.make_model(self.model_type)

    @cached_property
    def files(self):
        self.model.save_pretrained(folder := self.new("files"))
        return folder

    @cached_property
    def ours(self):
        """The parameters and the configuration."""
        return families.read(self.files)[::-1]

    @cached_property
    def run(self):
        return families.train(self.files, self.new("run"), MORE_STEPS.get(self.model_type, STEPS))


def below(value, bound):
    return f"{value:.1g}" if value <= bound else f"**{value:.1g}**"


def is_so(value):
    return "equal" if value else "**different**"


def logits(case):
    params, config = case.ours
    tokens_BT = families.random_tokens(config, 8, 11)
    ours, theirs = families.our_logits(params, config, tokens_BT), families.their_logits(case.model, tokens_BT)
    return below(families.relative(ours, theirs), 1e-5)


def greedy(case):
    ours, theirs = families.greedy_tokens(*case.ours, case.model)
    return is_so(ours == theirs)


def training(case):
    first, last, _ = case.run
    steps = f" in {MORE_STEPS[case.model_type]} steps" if case.model_type in MORE_STEPS else ""
    return f"{first:.2f} → {last:.2f}{steps}" if last > first + 0.3 else f"**{first:.2f} → {last:.2f}{steps}**"


def parameters(case):
    ours, theirs = families.published_counts(case.model_type, case.new("published"))
    return f"{ours:,}" if ours == theirs else f"**{ours:,}, not {theirs:,}**"


def recurrence(case):
    if not FAMILIES[case.model_type].state:
        return "no state"
    return below(families.recurrence_difference(*case.ours), 1e-4)


COLUMNS = {
    "logits": logits,
    "gradient": lambda case: below(families.differences(*case.ours, case.model, case.new("gradient"))[1], 1e-4),
    "greedy": greedy,
    "packed rows": lambda case: below(families.packed_difference(*case.ours), 1e-5),
    "recurrence": recurrence,
    "slots": lambda case: is_so(families.slots_are_equal(*case.ours)),
    "conversations": lambda case: below(families.conversation_difference(*case.ours), 1e-4),
    "export, float32": lambda case: is_so(families.export_is_equal(case.model_type, case.new("float32"), "float32")),
    "export, bfloat16": lambda case: is_so(families.export_is_equal(case.model_type, case.new("bfloat16"), "bfloat16")),
    "LoRA": lambda case: below(families.lora_difference(*case.ours, case.new("lora")), 1e-5),
    "training": training,
    "resume": lambda case: is_so(case.run[2]),
    "published configuration": lambda case: families.PUBLISHED[case.model_type][0],
    "parameters": parameters,
}


def read(table):
    """model_type -> column -> cell of a written table."""
    lines = [re.split(r" ?\| ?", line)[1:-1] for line in table.splitlines()]
    return {cells[0].strip("`"): dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]}


def write(rows):
    """The table of rows as `read` returns them."""
    head = ["family", *COLUMNS]
    missing = dict.fromkeys(COLUMNS, "not measured")
    lines = [[f"`{name}`", *((missing | rows[name])[each] for each in COLUMNS)] for name in FAMILIES if name in rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *lines))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--columns", type=lambda text: text.split(","), default=list(COLUMNS))
    parser.add_argument("families", nargs="*", metavar="MODEL_TYPE")
    options = parser.parse_args()
    for model_type in options.families or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            case, start = Case(model_type, Path(folder)), time.process_time()
            cells = {column: COLUMNS[column](case) for column in options.columns}
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        table, _, after = rest.partition(END)
        rows = read(table)
        rows[model_type] = rows.get(model_type, {}) | cells
        PAGE.write_text(f"{before}{BEGIN}{write(rows)}{END}{after}", encoding="utf-8")
        print(f"{model_type}: {time.process_time() - start:.0f} CPU-s, {cells}", flush=True)


if __name__ == "__main__":
    main()
