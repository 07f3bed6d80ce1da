"""The largest differences between the log-probs of the same tokens, computed in every way that gspax has: two tables.

    JAX_NUM_CPU_DEVICES=8 python experiments/benchmarks/bench_logprobs.py

The models are those of `gspax doctor --log-probs`, on one device and one of them on a mesh of eight, and SmolLM2, which
`make real` fetches. logprobs.csv keeps what is measured: only what it lacks is measured, and the tables between the
marks of docs/logprobs.md are written from it.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from gspax.config import Sampling
from gspax.hf import hf
from gspax.learner.state import abstract_params, load_model
from gspax.parallel.sharding import single_device_mesh
from gspax.sampler.placement import make_sampler
from gspax.tools.doctor import agreement, training
from gspax.tools.doctor.agreement import Policy, Scored
from gspax.tools.doctor.checklist import DTYPES

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "logprobs.csv", HERE.parents[1] / "docs" / "logprobs.md"
BEGIN, END = "<!-- results: written by bench_logprobs.py -->\n", "<!-- end of results -->"
COLUMNS = "model", "dtype", "one", "other", "nats", "tokens"
MESH, PUBLISHED, ONE_ROW = "experts, on 8 devices", "SmolLM2-135M-Instruct", "1 row"
SAMPLING = Sampling(prompts=4, group=4, max_prompt_tokens=64, max_tokens=32)
Rows = list[dict[str, str]]


def score_small(kind: str, dtype: str, devices: Sequence[jax.Device]) -> dict[str, Scored]:
    trainer = training.make_trainer(devices, dtype, agreement.KINDS[kind])
    policy = Policy(trainer.experiment.model, trainer.new_state().params, trainer.mesh, trainer.sampler)
    return agreement.score_every_way(policy, trainer.prompts(), trainer.experiment.sampling)


def score_published(dtype: str) -> dict[str, Scored]:
    sys.path.append(str(HERE.parent))
    import smollm2_constraints as task

    config, mesh, tokenizer = hf(task.CHECKPOINT, dtype=dtype), single_device_mesh(), task.experiment.tokenizer
    params = load_model(config, abstract_params(config, mesh))
    policy = Policy(config, params, mesh, make_sampler(config, mesh, mesh))
    prompts = [tokenizer.encode(task.Constraints().heldout(number).prompt) for number in range(SAMPLING.prompts)]
    return agreement.score_every_way(policy, prompts, SAMPLING)


def measure(model: str, dtype: str) -> Rows:
    """Measure a model."""
    devices = jax.devices()[: 8 if model == MESH else 1]
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        if model == PUBLISHED:
            ways = score_published(dtype)
        else:
            ways = score_small("experts" if model == MESH else model, dtype, devices)
    return [
        dict(zip(COLUMNS, (model, dtype, *each.ways, f"{each.nats:.2e}", str(each.tokens)), strict=True))
        for each in agreement.find_differences(ways)
    ]


def write_tables(rows: Rows) -> str:
    """Write for each dtype the differences from the learner's rows one by one, and those of each two ways."""
    ways = list(dict.fromkeys(row[side] for row in rows for side in ("one", "other")))
    others, text = [way for way in ways if way != ONE_ROW], ""
    for dtype in DTYPES:
        here = [row for row in rows if row["dtype"] == dtype]
        found = {(row["model"], *sorted((row["one"], row["other"]))): row["nats"] for row in here}
        text += f"\n### {dtype}\n\nLargest difference from the learner's microbatches of one row, in nats:\n\n"
        body = [
            [model, *(shorten(found.get((model, *sorted((ONE_ROW, way))))) for way in others)]
            for model in dict.fromkeys(row["model"] for row in here)
        ]
        text += table(["model", *others], body)
        for name, models in (("the small models", {*agreement.KINDS, MESH}), (PUBLISHED, {PUBLISHED})):
            body = []
            for place, one in enumerate(ways[:-1]):
                largest = [
                    max((found.get((model, *sorted((one, other))), "") for model in models), key=as_number)
                    for other in ways[1:]
                ]
                body.append([one, *(shorten(x) if at >= place else "" for at, x in enumerate(largest))])
            text += f"\nLargest difference between two ways, in nats, of {name}:\n\n" + table(["", *ways[1:]], body)
    return text


def as_number(nats: str) -> float:
    return float(nats or -1)


def shorten(nats: str | None) -> str:
    return f"{float(nats):.0e}" if nats else "–"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    rows: Rows = []
    if RESULTS.exists():
        with RESULTS.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    for dtype in DTYPES:
        for model in (*agreement.KINDS, MESH, PUBLISHED):
            if any((row["model"], row["dtype"]) == (model, dtype) for row in rows):
                continue
            rows += measure(model, dtype)
            with RESULTS.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
            print(model, dtype, flush=True)
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + write_tables(rows) + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
