"""Every benchmark script runs in smoke size and keeps the contract of its output (DESIGN 10)."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path.name for path in (ROOT / "bench").glob("*.py") if not path.name.startswith("_"))
TYPES = {"bench": str, "case": str, "value": float, "unit": str, "ceiling": float, "ratio": float, "repeats": int}
SECONDS_MAX = 300  # a hang is an error, slowness is not
NO_ACCELERATOR = "no accelerator found here"


def run_script(name: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs from a folder inside `folder`, so that what goes beside the current one lands there too."""
    current = folder / "current"
    current.mkdir()
    return subprocess.run(
        [sys.executable, str(ROOT / "bench" / name), *arguments],
        cwd=current,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_smoke(name: str, tmp_path: Path) -> None:
    output = tmp_path / "lines.json"
    done = run_script(name, "--smoke", "--json", str(output), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    if name == "gpu.py" and not torch.accelerator.is_available():
        assert NO_ACCELERATOR in done.stderr
        assert not done.stdout
        return
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines
    for line in lines:
        assert list(line) == list(TYPES)
        for key, kind in TYPES.items():
            assert isinstance(line[key], (int, float) if kind is float else kind), line
        assert line["bench"] == name.removesuffix(".py")
        assert "/" in line["case"]
        assert line["repeats"] >= 1
        assert math.isfinite(line["ratio"]) and line["ratio"] >= 0
    assert [json.loads(line) for line in output.read_text().splitlines()] == lines
    assert sorted(path.name for path in tmp_path.iterdir()) == ["current", "lines.json"]
    assert not any((tmp_path / "current").iterdir())


def test_an_unknown_case_is_a_usage_error(tmp_path: Path) -> None:
    done = run_script("adam.py", "--smoke", "--case", "no-such-case", folder=tmp_path)
    assert done.returncode == 2
    assert "no-such-case" in done.stderr.splitlines()[-1]
    assert not done.stdout
