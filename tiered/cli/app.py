"""The command line's frame: the commands, exit codes, and one line on standard error for every failure.

A command is a function in a file of its own, registered below. It exits 0 on success, 2 on a wrong command
line or configuration, 1 on a failure, 130 or 143 when it is told to stop. Progress goes to standard error,
results to standard output.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Annotated, cast

import typer

from tiered.cli.train import train
from tiered.errors import ConfigError, TieredError

app = typer.Typer(name="tiered", add_completion=False, rich_markup_mode=None)
app.command()(train)

INTERRUPTED = 128 + signal.SIGINT

# The parser's own exception for any wrong command line; it has no public name in every version.
WrongCommandLine: type[Exception] = typer.BadParameter.__mro__[1]


class Terminated(BaseException):
    """SIGTERM arrived."""


@app.callback()
def tiered(
    debug: Annotated[bool, typer.Option(help="Show the traceback of a failure.")] = False,
) -> None:
    """Train models larger than memory: parameters and optimizer states on device, host and NVMe."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        return _run(arguments)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(arguments: Sequence[str]) -> int:
    try:
        code = app(arguments, standalone_mode=False)
    except WrongCommandLine as error:
        return _fail(2, f"{cast(typer.BadParameter, error).format_message()} (see 'tiered --help')")
    except ConfigError as error:
        return _fail(2, str(error))
    except Terminated:
        return _fail(128 + signal.SIGTERM, "terminated")
    except (TieredError, OSError) as error:
        return _fail(1, str(error), arguments)
    except Exception as error:
        return _fail(1, f"{type(error).__name__}: {error} (--debug shows where)", arguments)
    if code == INTERRUPTED:
        return _fail(INTERRUPTED, "interrupted")
    return code if isinstance(code, int) else 0


def _fail(code: int, cause: str, arguments: Sequence[str] = ()) -> int:
    print(f"tiered: {cause}", file=sys.stderr)
    if "--debug" in arguments[:1]:
        sys.excepthook(*sys.exc_info())
    return code


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    """Leave through every `finally`, so that nothing is left behind."""
    raise Terminated
