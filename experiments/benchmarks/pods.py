"""The experiments for TPU pods, compiled: memory, traffic and the bound of a whole step, as a table.

Runs `gspax compile` for each, one after the other, unless its report is in DIR already (such as v5p_64_2_slices.txt).
One takes 5 to 10 CPU-minutes and 5 GB. The experiments on data sets read their files in the working directory.

Run: python experiments/benchmarks/pods.py DIR --commit COMMIT (pods.md)
     python experiments/benchmarks/pods.py DIR --commit COMMIT --of families (pods_families.md)
     python experiments/benchmarks/pods.py DIR --commit COMMIT --of datasets (pods_datasets.md)
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
Experiments = dict[str, tuple[str, ...]]
PODS: Experiments = {  # file, topology, overrides
    "v5p_64": ("qwen3_30b_a3b_v5p_64.py", "v5p:4x4x4"),
    "v5p_64, 2 slices": (
        "qwen3_30b_a3b_v5p_64.py",
        "2xv5p:4x4x4",
        "sampling.prompts=256",
        "schedule.microbatch_rows=256",
    ),
    "v5e_64": ("qwen3_30b_a3b_v5e_64.py", "v5e:8x8"),
    "v6e_64": ("qwen3_30b_a3b_v6e_64.py", "v6e:8x8"),
    "235B, v5p_512": ("qwen3_235b_a22b_v5p_512.py", "v5p:8x8x8"),
}
FAMILIES: Experiments = {
    "Qwen3.5-35B, v5p_64": ("qwen3_5_35b_a3b_v5p_64.py", "v5p:4x4x4"),
    "Qwen3.5-35B, v5p_64, rows of 65,536": (
        "qwen3_5_35b_a3b_v5p_64.py",
        "v5p:4x4x4",
        "sampling.max_tokens=64512",
        "sampling.prompts=32",
        "schedule.microbatch_rows=64",
    ),
    "Qwen3.5-35B, v6e_64": ("qwen3_5_35b_a3b_v6e_64.py", "v6e:8x8"),
    "GLM-4.5-Air, v5p_64": ("glm_4_5_air_v5p_64.py", "v5p:4x4x4"),
    "GLM-4.5-Air, v6e_128": ("glm_4_5_air_v6e_128.py", "v6e:8x16"),
    "gpt-oss-20b, v5e_64": ("gpt_oss_20b_v5e_64.py", "v5e:8x8"),
    "235B teaches 30B, v5p_64": ("qwen3_30b_a3b_distill_v5p_64.py", "v5p:4x4x4"),
}
DATASETS: Experiments = {
    "gsm8k_gspo": ("gsm8k_gspo.py", "v5p:4x4x4"),
    "gsm8k_lora": ("gsm8k_lora.py", "v5p:2x2x4"),
    "math_gspo": ("math_gspo.py", "v5p:4x4x4"),
    "code_gspo": ("code_gspo.py", "v5p:4x4x4"),
    "tools_gspo_token": ("tools_gspo_token.py", "v5p:4x4x4"),
}
TABLES: dict[str, tuple[Experiments, str, str]] = {
    "pods": (PODS, "pods.md", "The experiments for TPU pods, compiled"),
    "families": (FAMILIES, "pods_families.md", "Other models and a distillation on TPU pods, compiled"),
    "datasets": (DATASETS, "pods_datasets.md", "The experiments on data sets, compiled for TPU pods"),
}
PROGRAMS = ("train step", "old log-probs", "teacher", "inference weights", "rollout", "prompts", "turns", "replies")
PHASES = ("inference weights", "prefill", "decode, a token", "a reply", "old log-probs", "teacher", "train step")


def read_or_compile(path: Path, file: str, topology: str, overrides: Sequence[str]) -> str:
    """The report in `path`, compiled now if there is none. Exit code 1 means that something does not fit."""
    if not path.exists():
        command = [
            sys.executable,
            "-m",
            "gspax",
            "compile",
            str(HERE.parent / file),
            "--topology",
            topology,
            *overrides,
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode not in (0, 1):
            sys.exit(done.returncode)
        path.write_text(done.stdout, encoding="utf-8")
    return path.read_text(encoding="utf-8")


def read_figures(report: str) -> dict[str, str]:
    """The rows of the table, from the text of a report."""
    total, usable = (_numbers(report, title) for title in ("total of the last three", "a program may use"))
    head = re.search(r"^Memory per device, GB(.*)$", report, re.MULTILINE)
    compiled = [name for name in PROGRAMS if head and re.search(rf"\b{name}\b", head[1])]
    found = {f"GB at the peak, {name}": f"{size} of {usable[0]}" for name, size in zip(compiled, total, strict=False)}
    for phase in PHASES:
        if phase in ("a reply", "teacher") and not re.search(rf"^  {phase} ", report, re.MULTILINE):
            continue  # no environment, no teacher
        _, moved, sent, *seconds = _numbers(report, phase)
        found[f"{phase}: GB moved, sent"] = f"{moved}, {sent}"
        found[f"{phase}: seconds of FLOPs, memory, network"] = ", ".join(seconds[:3])
    between = sum(map(float, re.findall(r"^  train step .*DCN +([\d.]+)$", report, re.MULTILINE)))
    seconds = _numbers(report, "train step")[6:7]
    found["train step: GB sent between slices; seconds"] = f"{between:.2f}; {seconds[0]}" if between else "-"
    for part in ("at its start", "mean of a response", "at its end"):
        moved, needed, ratio, *_ = _numbers(report, part)
        found[f"a token, {part}: GB moved, needed, ratio"] = f"{moved}, {needed}, {ratio}"
    step = re.search(r"A step takes at least ([\d.]+) s: (.*)", report)
    tokens = re.search(r"MFU at most ([\d.]+%), ([\d,]+) sampled", report)
    if step and tokens:
        found["a step's parts, seconds"] = step[2]
        found["sampled tokens/s on each device; MFU at most"] = f"{tokens[2]}; {tokens[1]}"
        found["**a step takes at least, seconds**"] = f"**{step[1]}**"
    return found


def _numbers(report: str, title: str) -> list[str]:
    """The numbers after a row's title."""
    line = re.search(rf"^  {re.escape(title)} +(\d.*)$", report, re.MULTILINE)
    return line[1].split() if line else ["-"] * 6


def table(columns: dict[str, dict[str, str]]) -> list[str]:
    """Rows of figures, a column for each experiment."""
    lines = [f"| on each device | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    titles = list(dict.fromkeys(title for figures in columns.values() for title in figures))
    return [*lines, *(f"| {t} | {' | '.join(figures.get(t, '-') for figures in columns.values())} |" for t in titles)]


def read_columns(page: Path) -> dict[str, dict[str, str]]:
    """The columns of a page that was written before, by name."""
    rows = re.findall(r"^\| (.*) \|$", page.read_text(encoding="utf-8"), re.MULTILINE) if page.exists() else []
    cells = [row.split(" | ") for row in rows]
    (_, *names), *figures = [row for row in cells if row[0] != "---"] or [[""]]
    return {
        name: {title: values[place] for title, *values in figures if values[place] != "-"}
        for place, name in enumerate(names)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="of the reports")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="such as tokenizer.checkpoint=FOLDER")
    parser.add_argument("--commit", required=True, help="what is compiled")
    parser.add_argument("--of", choices=TABLES, default="pods", help="which experiments")
    parser.add_argument("--only", nargs="+", choices=[*PODS, *FAMILIES, *DATASETS], help="keep the other columns")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    experiments, page, title = TABLES[options.of]
    columns = read_columns(HERE / page)
    for name in options.only or experiments:
        file, topology, *overrides = experiments[name]
        path = options.folder / f"{re.sub(r'[^a-zA-Z0-9]+', '_', name)}.txt"
        report = read_or_compile(path, file, topology, [*overrides, *options.overrides])
        columns[name] = {"compiled at": options.commit, **read_figures(report)}
    columns = {name: columns[name] for name in experiments if name in columns}
    intro = [
        f"# {title}",
        "",
        "Written by `pods.py`: `gspax compile` of each; [compile.md](../../docs/compile.md) defines the figures.",
        "Nothing here has run on a TPU; times are rooflines. The sampler is extrapolated from two models of few",
        "layers; the learner's programs are compiled whole. A dash: not compiled.",
        "",
    ]
    (HERE / page).write_text("\n".join([*intro, *table(columns), ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
