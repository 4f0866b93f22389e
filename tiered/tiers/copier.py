"""Copies between staged host bytes and the device, on streams of their own, each with a fence.

Knows bytes and streams, not shards. A copier enqueues and never synchronizes the host by itself: whoever owns the
staged bytes leaves them alone until the copy's fence is done. Copies of one direction end in the order in which they
were enqueued, so the last fence stands for all before it. On a CPU device a copy is a memcpy and its fence is done.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Fence(Protocol):
    """The end of one copy."""

    def done(self) -> bool:
        """Whether the bytes have arrived; never blocks."""
        ...

    def wait(self) -> None:
        """Blocks the host until the bytes have arrived."""
        ...


class Copier(Protocol):
    """Enqueues copies of equally many elements, of either dtype. A fence of None: already done."""

    def copy_out(self, target: torch.Tensor, staged: torch.Tensor) -> Fence | None:
        """Staged bytes to where they are used; later work on the device's current stream sees them in `target`."""
        ...

    def copy_in(self, staged: torch.Tensor, source: torch.Tensor) -> Fence | None:
        """What the device's current stream has computed, to staged bytes; there once the fence is done."""
        ...


class HostCopier:
    """For a CPU device: the copy happens at once."""

    def copy_out(self, target: torch.Tensor, staged: torch.Tensor) -> Fence | None:
        target.copy_(staged)
        return None

    def copy_in(self, staged: torch.Tensor, source: torch.Tensor) -> Fence | None:
        staged.copy_(source)
        return None


class _EventFence:
    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class StreamCopier:
    """For an accelerator: one stream per direction, ordered with the current stream by events.

    [Note: order of copies] A copy waits for what the current stream has enqueued so far: its target or source may
    have been allocated or computed there. After a copy out the current stream waits for it, so to the device it is as
    if it had run there: the caching allocator need not know. A copy in runs beside the current stream, so the
    allocator is told, and nobody may change the source before the fence is done. The host never waits; the staged
    bytes are ours and are left alone until the fence is done. What starts and ends on the host moves at once, and so
    does what the host is about to read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_device = torch.Stream(device=device)
        self._to_host = torch.Stream(device=device)

    def copy_out(self, target: torch.Tensor, staged: torch.Tensor) -> Fence | None:
        if target.device.type == "cpu":  # read from the host, which no stream makes wait
            target.copy_(staged)
            return None
        event = self._copy(target, staged, self._to_device)
        torch.accelerator.current_stream(self._device).wait_event(event)
        return _EventFence(event)

    def copy_in(self, staged: torch.Tensor, source: torch.Tensor) -> Fence | None:
        if staged.device.type == source.device.type == "cpu":
            staged.copy_(source)
            return None
        event = self._copy(staged, source, self._to_host)
        if source.device == self._device:
            source.record_stream(self._to_host)
        return _EventFence(event)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream) -> torch.Event:
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            target.copy_(source.detach(), non_blocking=True)
            event = torch.Event(device=self._device)
            event.record(stream)
        return event


def open_copier(device: torch.device) -> Copier:
    """The copier for `device`."""
    return HostCopier() if device.type == "cpu" else StreamCopier(device)
