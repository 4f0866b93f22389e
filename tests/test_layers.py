"""The rules of the house: who may import whom, and that no assert does work. Read from the source, nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiered

ROOT = Path(tiered.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py"))
FORBIDDEN = {
    "tiers": ("tiered.zero", "tiered.optim", "tiered.engine", "tiered.plan", "tiered.cli", "tiered.checkpoint"),
    "plan": ("tiered.zero", "tiered.optim", "tiered.engine", "tiered.cli", "tiered.checkpoint"),
    "models": ("tiered.",),
}
PURE = ("plan/trace.py", "plan/schedule.py", "plan/placement.py", "plan/estimate.py", "plan/simulate.py")
HARMLESS_CALLS = {"isinstance", "issubclass", "len", "all", "any", "min", "max", "sum", "set", "sorted", "type", "abs"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    parts = ("tiered", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, at_run_time: bool = True) -> Iterator[str]:
    """Every module that a file imports, also inside functions; without TYPE_CHECKING blocks when `at_run_time`."""
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if at_run_time and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(child for statement in node.body for child in ast.walk(statement))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_who_imports_whom(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    for module in imports(path):
        assert not module.startswith(FORBIDDEN.get(room, ())), f"{name_of(path)} imports {module}"
        if module.startswith("tiered.engine"):
            allowed = name_of(path) == "__init__.py" or room in ("cli", "checkpoint")
            assert allowed, f"{name_of(path)} imports the composition root"
        if "_tiered_native" in module or module.split(".")[0] in ("cffi", "_cffi_backend"):
            assert name_of(path) == "_native.py", f"{name_of(path)} imports the native module"


def test_the_words_know_no_room() -> None:
    for name in ("shard.py", "errors.py", "events.py", "config.py"):
        for module in imports(ROOT / name):
            if module.startswith("tiered."):
                assert module.split(".")[1] in ("shard", "errors", "events", "config"), f"{name} imports {module}"


def test_pure_plans_reach_no_torch_and_no_disk() -> None:
    """`plan/{trace,placement,...}`: no torch and no file access of their own."""
    for name in PURE:
        if (ROOT / name).exists():
            for module in imports(ROOT / name):
                assert module.split(".")[0] not in ("torch", "os", "io", "pathlib", "mmap", "threading"), (name, module)
                assert not module.startswith("tiered.tiers.") or module.startswith("tiered.tiers.memory"), (
                    name,
                    module,
                )


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_assert_does_work(path: Path) -> None:
    """Python may run without asserts: a call inside one may only look."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assert):
            for inner in ast.walk(node):
                assert not isinstance(inner, ast.NamedExpr | ast.Await | ast.Yield), f"{name_of(path)}:{node.lineno}"
                if isinstance(inner, ast.Call):
                    called = inner.func.id if isinstance(inner.func, ast.Name) else ast.unparse(inner.func)
                    assert called in HARMLESS_CALLS, f"{name_of(path)}:{node.lineno} calls {called} in an assert"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_module_says_what_it_is_for_in_ascii(path: Path) -> None:
    text = path.read_text()
    assert text.isascii()
    assert not text.strip() or ast.get_docstring(ast.parse(text))
