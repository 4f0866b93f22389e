"""What every benchmark script shares: its arguments, turn-taking measurement, and one JSON object a line.

A script times its contestants in turns in one run and compares medians, because a busy machine changes from
minute to minute and only neighbours in time can be compared. Results go to standard output, the rest to
standard error.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import median

import torch

from tiered.errors import TieredError


@dataclass(frozen=True, slots=True)
class Result:
    """One line. `ratio` compares with what `case` names after its slash; bigger is always better."""

    bench: str
    case: str
    value: float
    unit: str
    ceiling: float
    ratio: float
    repeats: int


class NothingHereError(Exception):
    """What a script measures is not on this machine; that is no failure."""


@dataclass
class Bench:
    """One run of one script; `arguments` are all that were given, the script's own too."""

    name: str
    smoke: bool
    pattern: str
    arguments: argparse.Namespace
    results: list[Result] = field(default_factory=list)

    def wants(self, *cases: str) -> bool:
        """Whether any of these cases was asked for."""
        return any(fnmatchcase(case, self.pattern) for case in cases)

    def rate(self, case: str, value: float, *, ceiling: float, unit: str, repeats: int) -> None:
        """Reports a rate beside the rate of the ceiling."""
        self._report(Result(self.name, case, value, unit, ceiling, value / ceiling, repeats))

    def time(self, case: str, value: float, *, ceiling: float, unit: str, repeats: int) -> None:
        """Reports a time beside the contestant's."""
        self._report(Result(self.name, case, value, unit, ceiling, ceiling / value, repeats))

    def _report(self, result: Result) -> None:
        if self.wants(result.case):
            self.results.append(result)
            print(json.dumps(asdict(result)), flush=True)


def alternate(contestants: Mapping[str, Callable[[], object]], *, repeats: int) -> dict[str, float]:
    """Median seconds of each. Every round runs all, each time another one first; round one is warm-up."""
    names = list(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            contestants[name]()
            seconds[name].append(time.perf_counter() - start)
    return {name: median(taken[1:]) for name, taken in seconds.items()}


def run(
    name: str,
    description: str,
    body: Callable[[Bench], None],
    *,
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None,
) -> int:
    """Parses the command line, measures, and returns the exit status."""
    parser = argparse.ArgumentParser(prog=f"bench/{name}.py", description=description)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run, not how fast")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the lines to FILE too")
    parser.add_argument("--case", default="*", metavar="PATTERN", help="only these cases, such as '*/traffic'")
    if add_arguments is not None:
        add_arguments(parser)
    arguments = parser.parse_args()
    bench = Bench(name, arguments.smoke, arguments.case, arguments)
    note(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}")
    try:
        body(bench)
        if arguments.json is not None:
            lines = [json.dumps(asdict(result)) + "\n" for result in bench.results]
            arguments.json.write_text("".join(lines))
    except NothingHereError as error:
        note(f"bench/{name}.py: {error}")
        return 0
    except (TieredError, OSError) as error:
        note(f"bench/{name}.py: {error}")
        return 1
    if not bench.results:
        note(f"bench/{name}.py: no case matches {arguments.case}")
        return 2
    return 0


def note(line: str) -> None:
    """Tells the person at the terminal."""
    print(line, file=sys.stderr, flush=True)
