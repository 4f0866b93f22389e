"""One command-line flag for each field of Config: same name, same meaning, same checks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from tiered.config import FIELDS, FLAG, Source, choices

PANEL = "Tiers and budgets"


def takes_config_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Replaces the parameter `flags: Source` of `command` by the flags themselves."""
    signature = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def with_flags(**values: Any) -> None:
        given = {key: values.pop(key) for key in FIELDS}
        flags = {key: value for key, value in given.items() if value not in (None, [])}
        command(**values, flags=Source(FLAG, flags))

    own = [parameter for name, parameter in signature.parameters.items() if name != "flags"]
    parameters = own + [_flag(key) for key in FIELDS]
    vars(with_flags)["__signature__"] = signature.replace(parameters=parameters)
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_flags


def _flag(key: str) -> inspect.Parameter:
    """Text, whole number or a repeatable text; what it may be is Config's to say."""
    kind: Any = list[str] if key == "nvme" else int if FIELDS[key].annotation is int and _counts(key) else str
    metavar = "|".join(choices(key)) or ("DIRECTORY" if key == "nvme" else "N" if kind is int else "SIZE")
    option = typer.Option(
        f"--{key.replace('_', '-')}",
        help=FIELDS[key].description,
        metavar=metavar,
        show_default=False,
        rich_help_panel=PANEL,
    )
    return inspect.Parameter(
        key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _counts(key: str) -> bool:
    return not key.endswith("_bytes")
