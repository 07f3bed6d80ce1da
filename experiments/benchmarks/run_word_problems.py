"""Pre-train, train by GSPO and evaluate the word problems for several seeds; the table of ../README.md.

    python experiments/benchmarks/run_word_problems.py FOLDER [SEED ...]

Commands whose results are in FOLDER are not run again, and interrupted runs are resumed. CPU-seconds are those of the
process that finished the command.
"""

import json
import resource
import subprocess
import sys
from pathlib import Path

EXPERIMENTS = Path(__file__).parents[1]
SEEDS = ("0", "1", "2")


def main(folder: Path, seeds: list[str]) -> None:
    tokenizer = folder / "tokenizer"
    if not tokenizer.exists():
        subprocess.run([sys.executable, str(EXPERIMENTS / "word_problems.py"), str(tokenizer)], check=True)
    for seed in seeds:
        run_seed(folder / f"seed_{seed}", tokenizer, [f"seed={seed}", f"data.seed={seed}"])
    print(tabulate([folder / f"seed_{seed}" for seed in seeds]))


def run_seed(folder: Path, tokenizer: Path, seeds: list[str]) -> None:
    sft, checkpoint, gspo = (str(folder / name) for name in ("sft", "checkpoint", "gspo"))
    if not (folder / "checkpoint").exists():
        gspax("sft", file("sft"), "--workdir", sft, f"tokenizer.path={tokenizer}", *seeds, seconds=folder / "sft.json")
        gspax("export", "--from", sft, "--to", checkpoint, "--dtype", "float32")
    start = [f"model.checkpoint={checkpoint}", f"tokenizer.path={checkpoint}"]
    if not (folder / "gspo.json").exists():
        gspax("train", file("gspo"), "--workdir", gspo, *start, *seeds, seconds=folder / "gspo.json")


def file(stage: str) -> str:
    return str(EXPERIMENTS / f"word_problems_{stage}.py")


def gspax(*command: str, seconds: Path | None = None) -> None:
    """Run a command; write its CPU-seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "gspax", *command], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if seconds is not None:
        seconds.write_text(json.dumps(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))


def tabulate(folders: list[Path]) -> str:
    """The table, one column for each seed, and the commit of the first run."""
    lines = [["", *(folder.name.replace("_", " ") for folder in folders)], ["---"] * (1 + len(folders))]
    for task in ("new_types", "familiar_types"):
        for when, index in (("before", 0), ("after", -1)):
            found = [summaries(folder, task)[index] for folder in folders]
            lines.append([f"{task.replace('_', ' ')}, {when}", *(interval(each["reward"]) for each in found)])
    rows = [read_rows(folder / "gspo" / "metrics.jsonl") for folder in folders]
    greedy = [[row["eval/greedy_reward"] for row in each if "eval/greedy_reward" in row] for each in rows]
    lines.append(["new types, greedy: before, after", *(f"{each[0]:.3f}, {each[-1]:.3f}" for each in greedy)])
    for stage in ("sft", "gspo"):
        seconds = [json.loads((folder / f"{stage}.json").read_text()) for folder in folders]
        lines.append([f"CPU-seconds of `word_problems_{stage}.py`", *(f"{each:.0f}" for each in seconds)])
    commit = json.loads((folders[0] / "gspo" / "environment.json").read_text())[0]["commit"]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\nCommit {commit[:7]}."


def summaries(folder: Path, task: str) -> list[dict]:
    """A task's summaries by step."""
    files = sorted((folder / "gspo" / "evaluations").glob(f"step_*/{task}.json"))
    return [json.loads(path.read_text())["summary"] for path in files]


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def interval(found: dict) -> str:
    return f"{found['mean']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(SEEDS))
