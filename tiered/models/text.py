"""The data of `tiered train`: the source text of the running Python's standard library, byte by byte.

Every machine with Python has it, nothing is downloaded, and its order is fixed.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

# Parts that distributions leave out, or that others write into: without them most machines see the same text.
LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})


def standard_library_text() -> Tensor:
    """All of it as one uint8 tensor, files in the order of their paths."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = (path for path in root.rglob("*.py") if LEFT_OUT.isdisjoint(path.relative_to(root).parts))
    text = bytearray()
    for path in sorted(sources, key=lambda path: path.relative_to(root).as_posix()):
        text += path.read_bytes()
    return torch.frombuffer(text, dtype=torch.uint8)


class TextBatches:
    """Random windows of a text, a pure function of seed and step.

    The text is cut into windows; each epoch visits all of them once, in an order of its own. A step takes
    the next `ranks * batch` windows and each rank its share of these: no two ranks ever see the same window,
    and two ranks of batch 4 see together what one rank of batch 8 sees.
    """

    def __init__(self, text: Tensor, sequence: int, *, batch: int, seed: int, rank: int = 0, ranks: int = 1) -> None:
        if min(sequence, batch, ranks) < 1 or not 0 <= rank < ranks:
            raise ValueError(f"impossible batches: {sequence=} {batch=} {rank=} {ranks=}")
        self._window_count = (text.numel() - 1) // sequence
        if self._window_count < 1:
            raise ValueError(f"a text of {text.numel()} bytes is too short for windows of {sequence + 1}")
        self._text = text
        self._sequence = sequence
        self._batch = batch
        self._seed = seed
        self._rank = rank
        self._ranks = ranks
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def windows(self, step: int) -> list[int]:
        """The numbers of this rank's windows at `step`."""
        first = (step * self._ranks + self._rank) * self._batch
        return [self._window(index) for index in range(first, first + self._batch)]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, each int64 (batch, sequence); a target is the byte after its token."""
        starts = [window * self._sequence for window in self.windows(step)]
        rows = torch.stack([self._text[start : start + self._sequence + 1] for start in starts]).long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def _window(self, index: int) -> int:
        epoch, place = divmod(index, self._window_count)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(self._window_count, generator=generator)
        return int(self._order[place])


def encode(text: str) -> Tensor:
    """The tokens of a text, int64 (1, length)."""
    return torch.tensor([list(text.encode())], dtype=torch.int64)


def decode(tokens: Sequence[int] | Tensor) -> str:
    """Tokens as text that is safe to print: bytes that are not text show as escapes."""
    values = tokens.flatten().tolist() if isinstance(tokens, Tensor) else tokens
    text = bytes(values).decode("utf-8", errors="backslashreplace")
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
