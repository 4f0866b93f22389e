"""What the README shows is what runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.main import get_command

import tiered
from tiered.cli.app import app

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def test_the_loop_runs_and_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    built: list[nn.Module] = []

    def build_model() -> nn.Module:
        torch.manual_seed(0)
        built.append(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4)))
        return built[0]

    inputs = torch.randn(16, 8)
    batches = [(inputs, torch.arange(16) % 4)] * 5
    names = {"build_model": build_model, "batches": batches}
    exec(compile(blocks("python")[0], "README.md", "exec"), names)

    torch.manual_seed(0)
    before = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4)).state_dict()
    after = load_file("model.safetensors")
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_the_commands_exist() -> None:
    shell = "".join(blocks("bash"))
    train = re.search(r"^tiered train (.*)$", shell, flags=re.MULTILINE)
    assert train is not None
    command = get_command(app).commands["train"]  # type: ignore[attr-defined]
    flags = {flag for parameter in command.params for flag in parameter.opts}
    assert {word for word in train.group(1).split() if word.startswith("--")} <= flags


def test_ci_runs_the_readmes_own_test_command() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    assert "python -m pytest" in blocks("bash")[1]
    assert "python -m pytest" in ci


@pytest.mark.parametrize("setting", sorted(tiered.Config.model_fields))
def test_every_setting_is_documented(setting: str) -> None:
    field = tiered.Config.model_fields[setting]
    assert field.description
    assert "Default:" in field.description
