"""Every knob of the package, its limits, and the errors that explain them.

One flat set of names, with one meaning in a TOML file, a dict, keyword arguments and command-line flags.
Everything is checked here, at construction; what depends on the machine (free memory, free disk) is not.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from tiered.errors import ConfigError

DIRECT_IO_ALIGNMENT_BYTES = 4096
KEYWORD = "keyword argument"
FLAG = "flag"

SIZE = 'a number of bytes, or text like "4GiB", "256MiB" or "1.5GB"; more than zero'
SIZE_OR_AUTO = f'{SIZE}; or "auto"'

_UNIT_BYTES = {"B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_SIZE_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)


def parse_bytes(value: object) -> int:
    """Bytes from a whole number or from text with a unit; fractions of a byte are cut off."""
    match value:
        case bool():
            raise ValueError("is not a size")
        case int():
            size = value
        case str():
            size = _parse_size(value)
        case _:
            raise ValueError(f"is of type {type(value).__name__}")
    if size < 1:
        raise ValueError("is not more than zero")
    return size


def _parse_size(text: str) -> int:
    found = _SIZE_PATTERN.fullmatch(text)
    if found is None:
        raise ValueError("is not a size")
    number, unit = found.groups()
    for name, unit_bytes in _UNIT_BYTES.items():
        if unit.lower() == name.lower():
            return int(Decimal(number) * unit_bytes)
    if not unit:
        if "." in number:
            raise ValueError("has no unit")
        return int(number)
    raise ValueError(f"has no known unit (known: {', '.join(_UNIT_BYTES)})")


def format_bytes(size: float) -> str:
    """A size for people, such as "1.5 GiB"; `parse_bytes` reads it back to within half a percent."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.2f}".rstrip("0").rstrip(".") + f" {unit}"


def _size_or_auto(value: object) -> int | None:
    return None if value is None or value == "auto" else parse_bytes(value)


def _directories(value: object) -> tuple[Path, ...]:
    items = value if isinstance(value, list | tuple) else [value]
    paths = [Path(item) for item in items if isinstance(item, str | Path) and str(item).strip()]
    if len(paths) < len(items):
        raise ValueError("is not a directory or a list of directories")
    directories = tuple(path.expanduser() for path in paths)
    if len(set(directories)) < len(directories):
        raise ValueError("names a directory twice")
    return directories


def _knob(default: object, meaning: str, *, unit: str = "", allowed: str = "") -> Any:
    """One field: meaning, unit and default in its description, allowed values beside it for errors."""
    shown = '"auto"' if default is None else "empty" if default == () else f"{default}"
    parts = (meaning, unit and f"Unit: {unit}.", f"Default: {shown}.")
    return Field(default, description=" ".join(filter(None, parts)), json_schema_extra={"allowed": allowed})


Placement = Literal["auto", "device", "host", "nvme"]
IoEngineName = Literal["auto", "libaio", "io_uring", "aiofiles"]
ComputeDtype = Literal["auto", "float32", "bfloat16"]
MasterDtype = Literal["float32", "parameter"]
OptionalSize = Annotated[int | None, BeforeValidator(_size_or_auto)]
Size = Annotated[int, BeforeValidator(parse_bytes)]
QueueDepth = Annotated[int, Field(strict=True, ge=1, le=1024)]
UnitCount = Annotated[int, Field(strict=True, ge=0)]


class Source(NamedTuple):
    """Values and the place they come from: "file x.toml", `KEYWORD`, `FLAG`, ..."""

    place: str
    values: Mapping[str, object]

    def where(self, key: str) -> str:
        return f"{FLAG} --{key.replace('_', '-')}" if self.place == FLAG else self.place


class Config(BaseModel):
    """Where training state lives, within which budgets, and how it moves."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)

    parameters: Placement = _knob("auto", 'Home of the parameters. "auto": the fastest tier whose budget holds them.')
    gradients: Placement = _knob(
        "auto",
        'Home of gradients between backward and update. "auto": the fastest tier whose budget holds them.',
    )
    optimizer_states: Placement = _knob(
        "auto",
        'Home of the optimizer states and fp32 masters. "auto": the fastest tier whose budget holds them.',
    )
    device_memory: OptionalSize = _knob(
        None,
        "Budget on the device (without an accelerator: in ordinary memory) for unsharded units and staging; "
        'activations come on top. "auto": from what is free at the start.',
        unit="bytes",
        allowed=SIZE_OR_AUTO,
    )
    host_memory: OptionalSize = _knob(
        None,
        "Budget in host memory for the staging arena and what is kept there. "
        '"auto": from what is free at the start, within the cgroup limit.',
        unit="bytes",
        allowed=SIZE_OR_AUTO,
    )
    nvme: Annotated[tuple[Path, ...], BeforeValidator(_directories)] = _knob(
        (),
        "Directories for the files of the NVMe tier, each best on a drive of its own.",
        allowed="a directory, or a list of different directories",
    )
    io_engine: IoEngineName = _knob(
        "auto", 'How files are read and written. "auto": what a short probe at the start finds to work.'
    )
    io_queue_depth: QueueDepth = _knob(
        16, "Most requests in flight at once.", unit="requests", allowed="a whole number from 1 to 1024"
    )
    io_block_bytes: Size = _knob(
        1 << 20,
        f"Largest single request; longer transfers are cut. A multiple of {DIRECT_IO_ALIGNMENT_BYTES}.",
        unit="bytes",
        allowed=f"{SIZE}; a multiple of {DIRECT_IO_ALIGNMENT_BYTES}",
    )
    prefetch_units: UnitCount = _knob(
        2,
        "Most units read ahead of their use; 0 reads at need.",
        unit="units",
        allowed="a whole number, 0 or more",
    )
    prefetch_bytes: OptionalSize = _knob(
        None,
        'Most bytes read ahead of their use. "auto": what the host budget leaves beyond demand and update.',
        unit="bytes",
        allowed=SIZE_OR_AUTO,
    )
    compute_dtype: ComputeDtype = _knob(
        "auto", 'Type that forward and backward compute in. "auto": the type the parameters were built with.'
    )
    master_dtype: MasterDtype = _knob(
        "float32",
        'Type the optimizer updates in. "float32": lower-precision parameters get fp32 masters; '
        '"parameter": the parameter itself is updated.',
    )

    def __init__(self, **values: Any) -> None:
        self._fill(Source(KEYWORD, values))

    @classmethod
    def from_sources(cls, *sources: Source) -> Config:
        """Several layers of values, the later ones winning key by key."""
        config = cls.__new__(cls)
        config._fill(*sources)
        return config

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Config:
        return cls.from_sources(Source("dict", values))

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """From the top level of a TOML file."""
        return cls.from_sources(read_toml(path))

    def _fill(self, *sources: Source) -> None:
        """Check all layers together and become their sum, or raise one ConfigError with every problem."""
        merged: dict[str, object] = {}
        places: dict[str, str] = {}
        problems: list[str] = []
        for source in sources:
            problems.extend(_misplaced(source))
            known = {key: value for key, value in source.values.items() if key in FIELDS}
            merged.update(known)
            places.update({key: source.where(key) for key in known})
        try:
            super().__init__(**merged)
        except ValidationError as error:
            problems.extend(_explain(detail["loc"], detail["msg"], merged, places) for detail in error.errors())
        else:
            problems.extend(_contradictions(self, lambda key: places.get(key, "default")))
        if problems:
            raise ConfigError("; ".join(problems))


FIELDS: Mapping[str, FieldInfo] = Config.model_fields


def read_toml(path: str | Path) -> Source:
    """The values of a TOML file, unchecked."""
    try:
        with Path(path).open("rb") as file:
            return Source(f"file {path}", tomllib.load(file))
    except OSError as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} is not TOML: {error}") from error


def allowed_values(key: str) -> str:
    """What `key` may be, in words."""
    field = FIELDS[key]
    if isinstance(field.json_schema_extra, dict) and (allowed := field.json_schema_extra["allowed"]):
        return str(allowed)
    return ", ".join(f'"{choice}"' for choice in choices(key))


def choices(key: str) -> list[str]:
    """The words that `key` chooses from; none where it is no choice of words."""
    return [value for value in get_args(FIELDS[key].annotation) if isinstance(value, str)]


def _misplaced(source: Source) -> Iterator[str]:
    """Keys that do not exist, and keys that stand in a section; a section is only named for its keys."""
    for key, value in source.values.items():
        if key in FIELDS:
            continue
        if isinstance(value, Mapping) and value:
            for section, inner in _leaves(value, (str(key),)):
                yield _unknown(inner, f"section [{section}] of {source.place}")
        else:
            yield _unknown(str(key), source.where(str(key)))


def _leaves(table: Mapping[str, object], path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value and key not in FIELDS:
            yield from _leaves(value, (*path, str(key)))
        else:
            yield ".".join(path), str(key)


def _unknown(key: str, place: str) -> str:
    if key in FIELDS:
        return f'"{key}" ({place}) is in the wrong place: write it at the top level, outside any section'
    nearest = get_close_matches(key.lower().replace("-", "_"), FIELDS, n=1, cutoff=0.5)
    hint = f'the nearest is "{nearest[0]}" ({allowed_values(nearest[0])})' if nearest else "nothing is near it"
    return f'"{key}" ({place}) is no key: {hint}; keys: {", ".join(FIELDS)}'


def _explain(
    location: tuple[int | str, ...], message: str, values: Mapping[str, object], places: Mapping[str, str]
) -> str:
    key = str(location[0])
    value = values[key]
    reason = message.removeprefix("Value error, ") if message.startswith("Value error") else "is impossible"
    nearest = get_close_matches(str(value).lower(), choices(key), n=1)
    hint = f'; the nearest is "{nearest[0]}"' if nearest else ""
    return f"{key} = {value!r} ({places[key]}) {reason}; allowed: {allowed_values(key)}{hint}"


def _contradictions(config: Config, where: Callable[[str], str]) -> Iterator[str]:
    """Values that are possible each, but not together."""

    def shown(key: str) -> str:
        value = getattr(config, key)
        return f"{key} = {value!r} ({where(key)})"

    for key in ("parameters", "gradients", "optimizer_states"):
        if getattr(config, key) == "nvme" and not config.nvme:
            yield f"{shown(key)} but nvme names no directory: set nvme, or use another tier"
    if config.io_block_bytes % DIRECT_IO_ALIGNMENT_BYTES:
        nearest = max(1, round(config.io_block_bytes / DIRECT_IO_ALIGNMENT_BYTES)) * DIRECT_IO_ALIGNMENT_BYTES
        yield f"{shown('io_block_bytes')} is no multiple of {DIRECT_IO_ALIGNMENT_BYTES}: use {nearest}"
    if config.host_memory is not None:
        for key in ("io_block_bytes", "prefetch_bytes"):
            value = getattr(config, key)
            if value is not None and value > config.host_memory:
                yield f"{shown(key)} is larger than {shown('host_memory')}: lower the one or raise the other"
