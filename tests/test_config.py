"""Config: the same names and checks from every source, and errors that say what to do."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered.config import FIELDS, FLAG, Config, Source, format_bytes, parse_bytes
from tiered.errors import ConfigError

UNITS = {
    "B": 1,
    "KB": 10**3,
    "KiB": 2**10,
    "MB": 10**6,
    "MiB": 2**20,
    "GB": 10**9,
    "GiB": 2**30,
    "TB": 10**12,
}


def error_of(**values: object) -> str:
    with pytest.raises(ConfigError) as caught:
        Config(**values)
    return str(caught.value)


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]), st.booleans())
def test_parse_bytes_reads_every_unit(number: int, unit: str, space: str, lower: bool) -> None:
    text = f"{number}{space}{unit.lower() if lower else unit}"
    assert parse_bytes(text) == number * UNITS[unit]


@given(st.integers(1, 2**50))
def test_format_bytes_is_read_back(size: int) -> None:
    assert parse_bytes(size) == parse_bytes(str(size)) == size
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.005)


@given(st.integers(1, 1023), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_whole_sizes_are_read_back_exactly(number: int, unit: str) -> None:
    text = f"{number} {unit}"
    assert format_bytes(parse_bytes(text)) == text


@pytest.mark.parametrize(
    "value", [0, -1, "0", "0GiB", "-4GiB", "", "GiB", "4G", "4 gib b", "1.5", "lots", True, 1.5, None, [1]]
)
def test_parse_bytes_refuses(value: object) -> None:
    with pytest.raises(ValueError):
        parse_bytes(value)


def test_fractions() -> None:
    assert parse_bytes("1.5GB") == 1_500_000_000
    assert parse_bytes("0.1KiB") == 102


def test_one_meaning_from_every_source(tmp_path: Path) -> None:
    file = tmp_path / "tiered.toml"
    file.write_text('host_memory = "4GiB"\nnvme = ["/a", "/b"]\nparameters = "nvme"\nio_queue_depth = 8\n')
    values = {
        "host_memory": 4 << 30,
        "nvme": (Path("/a"), Path("/b")),
        "parameters": "nvme",
        "io_queue_depth": 8,
    }
    assert Config.load(file) == Config.from_dict(values) == Config(**values)
    assert Config.from_sources(Source(FLAG, values)) == Config(**values)
    assert Config.model_validate(values) == Config(**values)
    assert pickle.loads(pickle.dumps(Config(**values))) == Config(**values)


def test_later_sources_win_key_by_key() -> None:
    config = Config.from_sources(
        Source("file a", {"host_memory": "1GiB", "nvme": "/a"}), Source(FLAG, {"host_memory": "2GiB"})
    )
    assert config.host_memory == 2 << 30
    assert config.nvme == (Path("/a"),)
    assert config.model_fields_set == {"host_memory", "nvme"}


def test_auto_is_the_default_of_sizes() -> None:
    assert Config(host_memory="auto") == Config(host_memory=None) == Config()


def test_every_field_is_described() -> None:
    for key, field in FIELDS.items():
        assert field.description is not None, key
        assert "Default: " in field.description
        if "bytes" in key or "memory" in key:
            assert "Unit: bytes." in field.description


def test_frozen() -> None:
    with pytest.raises(ValueError):
        Config().io_queue_depth = 3  # type: ignore[misc]


# Case 26: a misspelt key, a right key in the wrong section, a wrong type, a zero size.


def test_misspelt_key_names_place_and_nearest() -> None:
    assert re.search(
        r'"host_memry" \(keyword argument\) is no key: the nearest is "host_memory"', error_of(host_memry=1)
    )


@pytest.mark.parametrize("header", ["[training]", "[tiered.io]"])
def test_right_key_in_a_section(tmp_path: Path, header: str) -> None:
    file = tmp_path / "tiered.toml"
    file.write_text(f'{header}\nhost_memory = "4GiB"\n')
    with pytest.raises(ConfigError) as caught:
        Config.load(file)
    assert f'"host_memory" (section {header} of file {file}) is in the wrong place' in str(caught.value)
    assert "top level" in str(caught.value)


@pytest.mark.parametrize("values", [{"optimizer": {"host_memory": 1}}, {"optimizer": {"momentum": 0.9}}, {"x": {}}])
def test_sections_of_a_dict(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"of dict|\(dict\)"):
        Config.from_dict(values)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("host_memory", 0),
        ("host_memory", "0MiB"),
        ("device_memory", -1),
        ("host_memory", 1.5),
        ("prefetch_bytes", 0),
        ("io_block_bytes", 0),
        ("io_queue_depth", 0),
        ("io_queue_depth", "8"),
        ("io_queue_depth", True),
        ("io_queue_depth", 4.0),
        ("prefetch_units", -1),
        ("nvme", 3),
        ("nvme", ""),
        ("nvme", ["/a", "/a"]),
        ("parameters", "disk"),
        ("parameters", None),
        ("io_engine", "uring"),
        ("compute_dtype", "float16"),
        ("master_dtype", "bfloat16"),
    ],
)
def test_impossible_value_names_key_place_value_and_allowed(key: str, value: object) -> None:
    text = error_of(**{key: value})
    assert text.startswith(f"{key} = {value!r} (keyword argument) ")
    assert "; allowed: " in text


def test_nearest_choice() -> None:
    assert 'the nearest is "nvme"' in error_of(optimizer_states="nvm")


def test_flag_is_named_as_it_is_typed() -> None:
    with pytest.raises(ConfigError, match=r"\(flag --host-memory\)"):
        Config.from_sources(Source(FLAG, {"host_memory": "lots"}))


@pytest.mark.parametrize(
    ("values", "both"),
    [
        ({"optimizer_states": "nvme"}, ("optimizer_states", "nvme names no directory")),
        ({"gradients": "nvme", "nvme": []}, ("gradients", "nvme names no directory")),
        ({"io_block_bytes": 10_000}, ("io_block_bytes", "use 8192")),
        ({"prefetch_bytes": "2GiB", "host_memory": "1GiB"}, ("prefetch_bytes", "host_memory")),
        ({"host_memory": "512KiB"}, ("io_block_bytes", "host_memory")),
    ],
)
def test_contradictions_name_both_sides(values: dict[str, object], both: tuple[str, str]) -> None:
    text = error_of(**values)
    assert all(side in text for side in both)


def test_all_problems_at_once() -> None:
    text = error_of(hostmemory=1, io_queue_depth=0, parameters="disk")
    assert all(key in text for key in ("hostmemory", "io_queue_depth", "parameters"))
    assert "\n" not in text


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Config.load(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        Config.load(tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_text("host_memory = = 3\n")
    with pytest.raises(ConfigError, match=r"broken.toml is not TOML: .*line 1"):
        Config.load(broken)
