"""The command line: exit codes, one line on standard error, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tiered.cli import main
from tiered.config import FIELDS
from tiered.models.transformer import SHAPES

SMALL = ["train", "--preset", "tiny", "--batch", "2", "--sequence", "16"]
PROMISED = [
    "params",
    "state_bytes",
    "loss_first",
    "loss_last",
    "step_seconds",
    "tokens_per_second",
    "peak_rss_bytes",
    "baseline_rss_bytes",
    "nvme_read_bytes_per_param_step",
    "nvme_write_bytes_per_param_step",
    "stall_seconds",
    "steps",
]


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ([], "Missing command"),
        (["trian"], "No such command"),
        (["train", "--preset", "tinny"], "'tinny' is not one of 'tiny', 'demo', '1b', '3b'"),
        (["train", "--host-memroy", "4GiB"], "--host-memory"),
        (["train", "--steps", "0"], "--steps"),
        (["train", "--dtype", "float16"], "--dtype"),
        (["train", "extra"], "extra"),
        (["train", "--host-memory", "0"], "host_memory = '0' (flag --host-memory) is not more than zero"),
        (["train", "--optimizer-states", "nvm"], '(flag --optimizer-states) is impossible; allowed: "auto"'),
        (["train", "--io-block-bytes", "5000"], "no multiple of 4096: use 4096"),
        (
            ["train", "--prefetch-bytes", "2GiB", "--host-memory", "1GiB"],
            "(flag --prefetch-bytes) is larger than",
        ),
        (["train", "--config", "missing.toml"], "missing.toml cannot be read"),
        (["train", "--folder", "missing"], "missing"),
        (["train", "--output", "missing/x.safetensors"], "--output missing/x.safetensors"),
        (["train", "--json", "missing/x.json"], "--json missing/x.json"),
    ],
)
def test_usage_errors(
    arguments: list[str],
    cause: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert cause in written.err
    assert written.err.startswith("tiered: ") and written.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_and_a_flag_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.toml").write_text('host_memory = "1GiB"\n')
    assert main(["train", "--config", "t.toml", "--prefetch-bytes", "2GiB"]) == 2
    text = capsys.readouterr().err
    assert "(flag --prefetch-bytes)" in text
    assert "(file t.toml)" in text


def test_several_ranks_cannot_compare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "--compare"]) == 2
    assert "torchrun" in capsys.readouterr().err


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for key in FIELDS:
        assert f"--{key.replace('_', '-')}" in text


def test_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [*SMALL, "--steps", "3", "--json", "s.json", "--host-memory", "16MiB", "--dtype", "bfloat16"]
    assert main(arguments) == 0
    written = capsys.readouterr()
    assert "step 3/3" in written.err
    assert "NVMe read" in written.out and "def " in written.out
    values = json.loads(Path("s.json").read_text())
    assert set(PROMISED) <= set(values)
    assert values["params"] == SHAPES["tiny"].parameter_count
    assert values["steps"] == len(values["losses"]) == 3
    assert values["loss_last"] < values["loss_first"] == pytest.approx(5.6, abs=0.2)
    assert values["state_bytes_by_tier"]["nvme"] > 0
    assert values["nvme_write_bytes_per_param_step"] <= 16
    weights = load_file("tiered-tiny.safetensors")
    assert sum(tensor.numel() for tensor in weights.values()) == values["params"]
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.json", "tiered-tiny.safetensors"]


def test_tiers_and_memory_train_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = []
    for mode in ("--in-memory", "--host-memory=16MiB"):
        file = tmp_path / "s.json"
        arguments = [*SMALL, "--steps", "4", "--dtype", "float32", "--output", "none", mode]
        assert main([*arguments, "--folder", str(tmp_path), "--json", str(file)]) == 0
        losses.append(json.loads(file.read_text())["losses"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_failure_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a-file"
    file.touch()
    assert main([*SMALL, "--folder", str(tmp_path), "--output", "none", "--nvme", str(file)]) == 1
    cause = capsys.readouterr().err.splitlines()[-1]
    assert cause.startswith("tiered: ") and str(file) in cause
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, number: int, code: int) -> None:
    command = [sys.executable, "-m", "tiered.cli", *SMALL, "--steps", "100000", "--host-memory", "16MiB"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # a test run in the background ignores SIGINT
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:  # the first step is done, more are under way
            if "step 1/" in line:
                break
        time.sleep(0.05)
        process.send_signal(number)
        rest = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, rest
    assert any(line.startswith(("tiered: interrupted", "tiered: terminated")) for line in rest.splitlines())
    assert list(tmp_path.iterdir()) == []
