"""Does tiered train exactly on an accelerator, and how near are its copies to what the machine can do?

    python bench/gpu.py [--smoke] [--json FILE] [--case PATTERN] [--size 300m] [--folder FOLDER]

In this order: 20 steps with the state in every tier, which must give equal bits, near to plain torch; copies between
the staging arena and the device against torch's own pinned memory; copies beside arithmetic against the longer of the
two; a step of a larger model against plain torch on the device; what is left on the device and in the process after
all that. Says so and ends well where there is no accelerator. Needs torch 2.11; takes a few minutes.
"""

from __future__ import annotations

import argparse
import gc
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import train
from _harness import Bench, NothingHereError, alternate, note, run
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tiered
from tiered.cli.swap_folder import swap_folder
from tiered.config import Config
from tiered.engine import Parts
from tiered.errors import TieredError
from tiered.models.transformer import Shape, Transformer
from tiered.plan.placement import Arena
from tiered.tiers.buffer_pool import allocate_host
from tiered.tiers.copier import Fence, StreamCopier

STEPS = 20
SHAPE = Shape(layers=4, width=192, heads=4)
BATCH, SEQUENCE = 4, 64
LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-4, 0.1, 1.0
WEIGHT_DIFFERENCE_MAX = {torch.float32: 1e-5, torch.bfloat16: 2**-6}  # to plain torch; bf16: two units at 1.0
PIECE_BYTES = 4 << 20  # a slot of the arena
SMALL_SLOTS = "-small-slots"
LEAK_CYCLES = 5


# ---- exactness ----


def batch_at(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, SHAPE.vocabulary, (BATCH, SEQUENCE + 1), generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def build(dtype: torch.dtype) -> Transformer:
    torch.manual_seed(0)
    return Transformer(SHAPE, dtype=dtype)


def run_steps(model: nn.Module, update: Callable[[], None], device: torch.device) -> list[Tensor]:
    losses = []
    for step in range(STEPS):
        with sdpa_kernel(SDPBackend.MATH):  # the one whose backward has a fixed order
            loss = model(*batch_at(step, device))
            loss.backward()
        update()
        losses.append(loss.detach())
    return losses


def train_plain(dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    model = build(dtype).to(device)
    weights = list(model.parameters())
    masters = [nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)

    @torch.no_grad()
    def update() -> None:
        for weight, master in zip(weights, masters, strict=True):
            master.grad, weight.grad = (None if weight.grad is None else weight.grad.float()), None
        nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        for weight, master in zip(weights, masters, strict=True):
            weight.copy_(master)

    losses = run_steps(model, update, device)
    return {"losses": torch.stack(losses).cpu(), **{n: p.detach().cpu() for n, p in model.named_parameters()}}


def train_tiered(
    dtype: torch.dtype, device: torch.device, config: Config, parts: Parts | None = None
) -> dict[str, Tensor]:
    model = tiered.shard(lambda: build(dtype), config, _parts=parts or Parts())
    with tiered.engine(model):
        optimizer = tiered.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)

        def update() -> None:
            optimizer.clip_grad_norm_(CLIP)
            optimizer.step()
            optimizer.zero_grad()

        losses = run_steps(model, update, device)
        weights = {name: value.full_tensor().cpu().clone() for name, value in model.state_dict().items()}
    return {"losses": torch.stack(losses).cpu(), **weights}


def placements(folder: Path) -> dict[str, Config]:
    """The first one is the reference. A small arena has small slots, so every segment is many shards."""
    small = {"nvme": [folder], "host_memory": "8MiB"}
    host, device = train.everything_in("host"), train.everything_in("device")
    return {
        "host": host,
        "host-again": host,
        f"host{SMALL_SLOTS}": host,
        "nvme": train.everything_in("nvme", nvme=[folder], host_memory="256MiB"),
        "nvme-small-arena": train.everything_in("nvme", **small),
        "nvme-no-prefetch": train.everything_in("nvme", **small, prefetch_units=0),
        "device": device,
        f"device{SMALL_SLOTS}": device,
        "mixed": Config(
            parameters="device", gradients="host", optimizer_states="nvme", nvme=[folder], host_memory="32MiB"
        ),
    }


def check_exactness(bench: Bench, device: torch.device, folder: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        label = f"exact-{str(dtype).removeprefix('torch.')}"
        if not bench.wants(*(f"{label}-{name}" for name in (*(f"{n}/host" for n in placements(folder)), "host/plain"))):
            continue
        reference: dict[str, Tensor] | None = None
        for name, config in placements(folder).items():
            parts = Parts(arena=Arena(64 << 10, 0)) if name.endswith(SMALL_SLOTS) else Parts()
            result = train_tiered(dtype, device, config, parts)
            if reference is None:
                reference = result
                continue
            equal = sum(torch.equal(result[key], value) for key, value in reference.items())
            count = len(reference)
            bench.rate(f"{label}-{name}/host", equal, ceiling=count, unit="equal tensors", repeats=STEPS)
            if equal < count:
                worst = max((result[key].double() - reference[key].double()).abs().max().item() for key in reference)
                raise TieredError(f"{label}: {count - equal} of {count} tensors of {name} differ, by up to {worst:.3g}")
        plain = train_plain(dtype, device)
        if reference is None or plain.keys() != reference.keys():
            raise TieredError(f"{label}: the names of the parameters changed")
        names = [name for name in plain if name != "losses"]
        worst = max((plain[name].double() - reference[name].double()).abs().max().item() for name in names)
        limit = WEIGHT_DIFFERENCE_MAX[dtype]
        note(f"{label}: largest difference to plain torch {worst:.3g}, allowed {limit:.3g}")
        if not worst <= limit:
            raise TieredError(f"{label}: the weights differ from plain torch's by {worst:.3g}")
        bench.time(f"{label}-host/plain", worst, ceiling=limit, unit="weight difference", repeats=STEPS)


# ---- copies ----


def wait(fence: Fence | None) -> None:
    if fence is not None:
        fence.wait()


def measure_copies(bench: Bench, device: torch.device) -> None:
    cases = [
        f"{way}-{memory}/torch-pinned" for way in ("h2d", "d2h") for memory in ("arena", "arena-pieces", "pageable")
    ]
    if not bench.wants(*cases):
        return
    nbytes, repeats = (16 << 20, 3) if bench.smoke else (1 << 30, 7)
    region = allocate_host(nbytes, register=True)
    if not region.registered:
        note("the arena could not be pinned")
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=device)
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    pageable = torch.ones(nbytes, dtype=torch.uint8)
    copier = StreamCopier(device)
    region.tensor.copy_(torch.arange(nbytes, dtype=torch.int32).to(torch.uint8))

    def out_in_pieces() -> None:
        pairs = zip(torch.split(on_device, PIECE_BYTES), torch.split(region.tensor, PIECE_BYTES), strict=True)
        wait([copier.copy_out(target, staged) for target, staged in pairs][-1])

    def in_in_pieces() -> None:
        pairs = zip(torch.split(on_device, PIECE_BYTES), torch.split(region.tensor, PIECE_BYTES), strict=True)
        wait([copier.copy_in(staged, source) for source, staged in pairs][-1])

    def theirs(target: Tensor, source: Tensor) -> Callable[[], None]:
        def copy() -> None:
            target.copy_(source, non_blocking=True)
            torch.accelerator.synchronize(device)

        return copy

    ways = {
        "h2d": {
            "arena": lambda: wait(copier.copy_out(on_device, region.tensor)),
            "arena-pieces": out_in_pieces,
            "pageable": theirs(on_device, pageable),
            "torch-pinned": theirs(on_device, pinned),
        },
        "d2h": {
            "arena": lambda: wait(copier.copy_in(region.tensor, on_device)),
            "arena-pieces": in_in_pieces,
            "pageable": theirs(pageable, on_device),
            "torch-pinned": theirs(pinned, on_device),
        },
    }
    out_in_pieces()
    expected = region.tensor.clone()
    region.tensor.zero_()
    in_in_pieces()
    if not torch.equal(region.tensor, expected):
        raise TieredError("bytes that went to the device and back are not the same")
    for way, memories in ways.items():
        seconds = alternate(memories, repeats=repeats)
        for memory in ("arena", "arena-pieces", "pageable"):
            bench.rate(
                f"{way}-{memory}/torch-pinned",
                nbytes / seconds[memory] / 1e9,
                ceiling=nbytes / seconds["torch-pinned"] / 1e9,
                unit="GB/s",
                repeats=repeats,
            )
    torch.accelerator.synchronize(device)
    region.close()


def measure_overlap(bench: Bench, device: torch.device) -> None:
    """Arithmetic on the current stream, and a copy for each piece of it: how long beside how long each alone takes."""
    if not bench.wants("overlap-d2h/ideal", "overlap-h2d/ideal"):
        return
    rounds, nbytes, width, repeats = (4, 1 << 20, 256, 3) if bench.smoke else (16, 64 << 20, 4096, 7)
    region = allocate_host(nbytes, register=True)
    gradients = torch.zeros(rounds, nbytes, dtype=torch.uint8, device=device)
    matrix = torch.randn(width, width, device=device, dtype=torch.bfloat16)
    copier, gather_stream = StreamCopier(device), torch.Stream(device=device)

    def compute() -> None:
        for _ in range(4):
            torch.mm(matrix, matrix)

    def bring_in(number: int) -> None:
        copier.copy_in(region.tensor, gradients[number])

    def bring_out(number: int) -> None:
        with gather_stream:  # as FSDP2 gathers with several ranks
            copier.copy_out(gradients[number], region.tensor)

    def together(copy: Callable[[int], None] | None, *, arithmetic: bool) -> Callable[[], None]:
        def body() -> None:
            for number in range(rounds):
                if arithmetic:
                    compute()
                if copy is not None:
                    copy(number)
            torch.accelerator.synchronize(device)

        return body

    for way, copy in {"d2h": bring_in, "h2d": bring_out}.items():
        seconds = alternate(
            {
                "both": together(copy, arithmetic=True),
                "copies": together(copy, arithmetic=False),
                "arithmetic": together(None, arithmetic=True),
            },
            repeats=repeats,
        )
        note(f"{way}: copies alone {seconds['copies'] * 1e3:.1f} ms, arithmetic {seconds['arithmetic'] * 1e3:.1f} ms")
        ideal = max(seconds["copies"], seconds["arithmetic"])
        bench.time(f"overlap-{way}/ideal", seconds["both"] * 1e3, ceiling=ideal * 1e3, unit="ms", repeats=repeats)
    region.close()


# ---- leaks ----


def check_leaks(bench: Bench, device: torch.device, folder: Path) -> None:
    """What is left after several lives, against after one."""
    cases = {name: f"leak-{name}/first" for name in ("device", "threads", "files")}
    if not bench.wants(*cases.values()):
        return

    def left() -> dict[str, int]:
        gc.collect()
        torch.accelerator.synchronize(device)
        threads = threading.active_count()
        files = len(list(Path("/proc/self/fd").iterdir()))
        return {"device": torch.accelerator.memory_allocated(device), "threads": threads, "files": files}

    config = train.everything_in("nvme", nvme=[folder], host_memory="64MiB")
    train_tiered(torch.bfloat16, device, config)
    before = left()
    for _ in range(1 if bench.smoke else LEAK_CYCLES):
        train_tiered(torch.bfloat16, device, config)
    after = left()
    for name, case in cases.items():
        unit = "bytes" if name == "device" else name
        bench.time(case, after[name] or 1, ceiling=before[name] or 1, unit=unit, repeats=LEAK_CYCLES)
        if after[name] > before[name]:
            raise TieredError(f"leak of {name}: {before[name]} after one life, {after[name]} after {LEAK_CYCLES} more")
    if any(folder.iterdir()):
        raise TieredError(f"left behind: {', '.join(path.name for path in folder.iterdir())}")


# ---- a larger model ----


def measure_steps(bench: Bench, folder: Path) -> None:
    size = "10m" if bench.smoke else bench.arguments.size
    job = train.Job(shape=train.SIZES[size], batch=4, sequence=64 if bench.smoke else 512)
    rivals = {
        "nvme": train.everything_in("nvme", nvme=[folder], host_memory="2GiB"),
        "host": train.everything_in("host"),
        "device": train.everything_in("device"),
    }
    train.compare(bench, size, job, rivals, steps=2 if bench.smoke else 4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=train.SIZES, default="300m", help="the larger model (default: 300m)")
    parser.add_argument("--folder", type=Path, help="swap files go below it (default: beside the current folder)")


def main(bench: Bench) -> None:
    found = train.accelerator()
    if found is None:
        raise NothingHereError("no accelerator found here, so there is nothing to measure")
    device = torch.device(found.type, torch.accelerator.current_device_index())
    train.make_repeatable()
    note(f"device: {torch.get_device_module(device).get_device_name(device)}")
    failures: list[str] = []
    with swap_folder(bench.arguments.folder or Path.cwd().parent) as folder:
        for title, part in (
            ("exactness", lambda: check_exactness(bench, device, folder)),
            ("copies", lambda: measure_copies(bench, device)),
            ("overlap", lambda: measure_overlap(bench, device)),
            ("leaks", lambda: check_leaks(bench, device, folder)),
            ("steps", lambda: measure_steps(bench, folder)),
        ):
            start = time.perf_counter()
            try:
                part()
            except TieredError as error:  # the other parts still say something
                failures.append(f"{title}: {error}")
            note(f"{title}: {time.perf_counter() - start:.0f} s")
    if failures:
        raise TieredError("; ".join(failures))


if __name__ == "__main__":
    sys.exit(run("gpu", "Exactness and speed on an accelerator.", main, add_arguments=add_arguments))
