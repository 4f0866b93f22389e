"""The data: fixed order, seeded batches, ranks that share nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiered.models.text import TextBatches, decode, encode, standard_library_text

TEXT = torch.arange(1000).remainder(251).to(torch.uint8)


def test_the_text_is_python_and_always_the_same() -> None:
    text = standard_library_text()
    assert text.dtype == torch.uint8
    assert text.numel() > 1_000_000
    assert b"import " in bytes(text[:100_000].tolist())
    assert torch.equal(text, standard_library_text())


def test_targets_are_the_next_bytes() -> None:
    tokens, targets = TextBatches(TEXT, 16, batch=3, seed=0).batch(0)
    assert tokens.shape == targets.shape == (3, 16)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal((tokens + 1) % 251, targets)


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    one, two = TextBatches(TEXT, 16, batch=3, seed=5), TextBatches(TEXT, 16, batch=3, seed=5)
    later = one.windows(30)
    assert [two.windows(step) for step in range(31)][30] == later
    assert one.windows(0) == TextBatches(TEXT, 16, batch=3, seed=5).windows(0)
    assert one.windows(0) != TextBatches(TEXT, 16, batch=3, seed=6).windows(0)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 40), st.integers(0, 9))
def test_ranks_share_nothing_and_an_epoch_sees_all(ranks: int, batch: int, sequence: int, seed: int) -> None:
    readers = [TextBatches(TEXT, sequence, batch=batch, seed=seed, rank=rank, ranks=ranks) for rank in range(ranks)]
    whole = TextBatches(TEXT, sequence, batch=batch * ranks, seed=seed)
    windows_in_text = (TEXT.numel() - 1) // sequence
    seen: list[int] = []
    for step in range(windows_in_text // (batch * ranks)):
        parts = [window for reader in readers for window in reader.windows(step)]
        assert parts == whole.windows(step)
        seen += parts
    assert len(seen) == len(set(seen))
    assert all(0 <= window < windows_in_text for window in seen)


@pytest.mark.parametrize("values", [(0, 1, 0, 1), (16, 0, 0, 1), (16, 1, 1, 1), (16, 1, 0, 0), (1000, 1, 0, 1)])
def test_impossible_batches_are_refused(values: tuple[int, int, int, int]) -> None:
    sequence, batch, rank, ranks = values
    with pytest.raises(ValueError):
        TextBatches(TEXT, sequence, batch=batch, seed=0, rank=rank, ranks=ranks)


@given(st.text())
def test_decode_reads_encode_back_or_escapes(text: str) -> None:
    shown = decode(encode(text)) if text else decode([])
    assert all(character.isprintable() or character in "\n\t" for character in shown)
    if text.isprintable():
        assert shown == text


@given(st.lists(st.integers(0, 255)))
def test_any_bytes_can_be_shown(tokens: list[int]) -> None:
    decode(tokens).encode()
