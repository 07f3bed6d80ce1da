"""Run a study, or draw its figure and table again: `make study NAME=clipping`, `make study-page NAME=clipping`."""

import argparse
import sys
from pathlib import Path

from common import (
    FOLDER,
    check_study,
    collect,
    describe_runs,
    load_study,
    run_study,
    write_csv,
    write_results,
)

from gspax.errors import UserError


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="studies", description=__doc__)
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: 2)")
    parser.add_argument("--runs", type=Path, default=Path("runs/studies"), help="default: runs/studies")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--page", action="store_true", help="only the figure and the table, from results.csv")
    group.add_argument("--dry-run", action="store_true", help="only check the experiments and print their commands")
    options = parser.parse_args(arguments)
    try:
        study, folder, runs = load_study(options.name), FOLDER / options.name, options.runs / options.name
        check_study(study)
        if options.dry_run:
            print("\n".join(describe_runs(study)))
            return 0
        if not options.page:
            run_study(study, runs, options.jobs)
            write_csv(study, collect(study, runs), folder / "results.csv")
        write_results(study, folder)
    except UserError as problem:
        print(f"studies: {problem}", file=sys.stderr)
        return 1
    print(folder / "README.md")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
