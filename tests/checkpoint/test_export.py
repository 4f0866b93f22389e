"""The safetensors writer, read back with the safetensors library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from tiered.checkpoint.export import DTYPE_NAMES, Entry, export_safetensors, write_safetensors
from tiered.errors import StorageError


class Tied(nn.Module):
    """A head tied to its embedding, a persistent and another buffer, a scalar, an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False, dtype=torch.float32)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.bfloat16))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("count", torch.arange(4))
        self.register_buffer("scratch", torch.ones(3), persistent=False)


def test_export_reads_back(tmp_path: Path) -> None:
    model, path = Tied(), tmp_path / "model.safetensors"
    export_safetensors(model, path)
    loaded = load_file(path)
    assert set(loaded) == {"embedding.weight", "scale", "nothing", "count"}
    expected = model.state_dict()
    for name, tensor in loaded.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name])
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPE_NAMES.values())), st.lists(st.integers(0, 5), max_size=3))))
def test_every_type_and_shape(tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[str, list[int]]]) -> None:
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    tensors = {f"t{index}": torch.randint(2, shape).to(dtypes[name]) for index, (name, shape) in enumerate(kinds)}
    path = tmp_path_factory.mktemp("export") / "x.safetensors"
    entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_safetensors(path, entries, tensors.values(), metadata={})
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_one_tensor_at_a_time(tmp_path: Path) -> None:
    alive = 0

    def tensors() -> object:
        nonlocal alive
        for index in range(3):
            alive += 1
            yield torch.full((2, 3), float(index)).T  # not contiguous
            alive -= 1

    entries = [Entry(f"t{index}", torch.float32, (3, 2)) for index in range(3)]
    write_safetensors(tmp_path / "x", entries, tensors(), metadata={})  # type: ignore[arg-type]
    assert torch.equal(load_file(tmp_path / "x")["t2"], torch.full((3, 2), 2.0))
    assert alive == 0


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(ValueError, match="changed while it was written"):
        write_safetensors(path, [Entry("t", torch.float32, (3,))], [torch.zeros(4)], metadata={})
    with pytest.raises(ValueError):
        write_safetensors(path, [Entry("t", torch.float32, (3,))], [], metadata={})
    assert path.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_bad_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="missing/x"):
        export_safetensors(Tied(), tmp_path / "missing" / "x")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode: opened(Path("/dev/full"), mode))
    with pytest.raises(StorageError, match="No space left"):
        export_safetensors(Tied(), tmp_path / "x")
