"""Building, closing and going back: case 33 of the fault collection (DeepSpeed #7204), and nothing may pile up."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import tiered
from tiered.tiers.memory import process_memory


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 17), nn.GELU(), nn.Linear(17, 8))


def on_nvme(folder: Path) -> tiered.Config:
    return tiered.Config(
        parameters="nvme", gradients="nvme", optimizer_states="nvme", nvme=[folder], host_memory="4MiB"
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 16, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def hooks_of(model: nn.Module) -> int:
    tables = [name for name in vars(nn.Module()) if name.endswith("hooks")]
    return sum(len(vars(module)[name]) for module in model.modules() for name in tables)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_unshard_gives_the_plain_module_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = mlp()
    torch.manual_seed(0)
    model = tiered.shard(mlp, on_nvme(tmp_path))
    expected = train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-4), 2)
    assert train(model, tiered.AdamW(model.parameters(), lr=1e-2, eps=1e-4), 2) == pytest.approx(expected, abs=1e-6)

    tiered.engine(model).unshard()

    assert hooks_of(model) == 0
    assert [type(m) for m in model.modules()] == [type(m) for m in reference.modules()]
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert type(parameter) is nn.Parameter
        torch.testing.assert_close(parameter, other, atol=1e-6, rtol=0)
    assert not list(tmp_path.iterdir())
    train(model, torch.optim.AdamW(model.parameters()), 1)  # an ordinary module again

    again = tiered.shard(model, on_nvme(tmp_path))  # and it can be sharded again
    train(again, tiered.AdamW(again.parameters()), 1)
    tiered.engine(again).close()


def test_a_closed_model_says_so(tmp_path: Path) -> None:
    model = tiered.shard(mlp, on_nvme(tmp_path))
    optimizer = tiered.AdamW(model.parameters())
    train(model, optimizer, 1)
    engine = tiered.engine(model)
    engine.close()
    engine.close()
    with pytest.raises(tiered.ClosedError):
        model(torch.zeros(1, 16))
    with pytest.raises(tiered.ClosedError):
        next(model.parameters()).norm()
    with pytest.raises(tiered.ClosedError):
        engine.unshard()


def test_a_forgotten_engine_is_closed_with_its_model(tmp_path: Path) -> None:
    threads = threading.active_count()
    model = tiered.shard(mlp, on_nvme(tmp_path))
    train(model, tiered.AdamW(model.parameters()), 1)
    assert list(tmp_path.iterdir())
    del model
    gc.collect()
    assert not list(tmp_path.iterdir())
    assert threading.active_count() == threads


def test_an_exception_in_the_factory_is_the_one_shown_and_leaves_nothing(tmp_path: Path) -> None:
    class BoomError(Exception):
        pass

    def factory() -> nn.Module:
        model = mlp()
        raise BoomError(type(model).__name__)

    tiered.engine(tiered.shard(mlp())).close()  # the process group, made once, stays
    gc.collect()
    threads, files = threading.active_count(), open_files()
    with pytest.raises(BoomError):
        tiered.shard(factory, on_nvme(tmp_path))
    gc.collect()
    assert not list(tmp_path.iterdir())
    assert (threading.active_count(), open_files()) == (threads, files)


@pytest.mark.parametrize("end", ["close", "unshard", "forget"])
def test_fifty_lives_leave_memory_threads_and_files_flat(tmp_path: Path, end: str) -> None:
    def live() -> None:
        model = tiered.shard(mlp, on_nvme(tmp_path))
        train(model, tiered.AdamW(model.parameters()), 2)
        if end != "forget":
            getattr(tiered.engine(model), end)()

    for _ in range(5):
        live()
    gc.collect()
    before = threading.active_count(), open_files(), process_memory().rss_bytes
    for _ in range(50):
        live()
    gc.collect()
    after = threading.active_count(), open_files(), process_memory().rss_bytes
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 8 << 20
    assert not list(tmp_path.iterdir())


def test_two_hundred_steps_with_saves_stay_flat(tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    model = tiered.shard(mlp, on_nvme(swap))
    optimizer = tiered.AdamW(model.parameters())
    marks = []
    for step in range(20):
        train(model, optimizer, 10)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, tmp_path / f"save-{step % 2}.pt")
        del state
        gc.collect()
        marks.append((threading.active_count(), open_files(), process_memory().rss_bytes))
    assert marks[-1][:2] == marks[4][:2]
    assert marks[-1][2] - marks[4][2] < max(4 << 20, marks[4][2] // 50)
    tiered.engine(model).close()
