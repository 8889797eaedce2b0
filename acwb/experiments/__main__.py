"""The commands behind `make`: `python -m acwb.experiments notebooks quick`, `… table largest`."""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from acwb.errors import AcwbError
from acwb.experiments import benchmarks, planner_study
from acwb.experiments.notebooks import NOTEBOOKS, publish
from acwb.experiments.results_page import write_pages
from acwb.experiments.scales import SCALES

TABLES: Mapping[str, Callable[[], None]] = {
    "bench": benchmarks.bench,
    "bench-inductor": benchmarks.bench_inductor,
    "capped": benchmarks.capped,
    "captured": benchmarks.captured,
    "largest": benchmarks.largest,
    "overheads": benchmarks.overheads,
    "predictions": benchmarks.predictions,
    "tradeoff": planner_study.main,
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command; what acwb refuses is one sentence on the standard error."""
    parser = argparse.ArgumentParser(prog="python -m acwb.experiments")
    commands = parser.add_subparsers(dest="command", required=True)
    notebooks = commands.add_parser("notebooks", help="run notebooks top to bottom")
    notebooks.add_argument("scale", choices=SCALES)
    notebooks.add_argument("paths", nargs="*", type=Path, help="all of them by default")
    table = commands.add_parser("table", help="measure a table and write it to results/full")
    table.add_argument("name", choices=TABLES)
    commands.add_parser("page", help="write results/README.md and the table of results in README.md")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "table":
            TABLES[chosen.name]()
        elif chosen.command == "page":
            results = NOTEBOOKS.parent / "results"
            write_pages(results / "full", results / "README.md", NOTEBOOKS.parent / "README.md")
        else:
            paths = [path.resolve() for path in chosen.paths] or sorted(NOTEBOOKS.glob("*.ipynb"))
            publish(chosen.scale, NOTEBOOKS.parent / "results" / chosen.scale, paths)
    except AcwbError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
