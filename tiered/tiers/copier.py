"""Copies between host buffers and the device, on streams of their own, each with a fence.

Knows bytes and streams, not shards. A copier enqueues and never synchronizes the host by itself: whoever owns
a buffer keeps it until the copy's fence is done. On a CPU device a copy is a memcpy and its fence is done.
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
    """Enqueues copies; later work on the current stream of the device sees their result."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Fence | None:
        """Copies `source` into `target` (same numel, either dtype). None: already done."""
        ...


class HostCopier:
    """For a CPU device: the copy happens at once."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Fence | None:
        target.copy_(source)
        return None


class _EventFence:
    def __init__(self, event: torch.Event, *keep: torch.Tensor) -> None:
        self._event = event
        self._keep = keep  # the tensors live until the fence does

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class StreamCopier:
    """For an accelerator: one stream per direction, ordered with the current stream by events.

    [Note: order of copies] A copy waits for what the current stream has enqueued so far (its target or source
    may have been allocated or computed there), and the current stream then waits for the copy. The host never
    waits. The caching allocator is told of the foreign stream, so that device memory is not reused too early;
    pinned host memory is ours, and its lease is held until the fence is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._to_device = torch.Stream(device=device)
        self._to_host = torch.Stream(device=device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Fence | None:
        stream = self._to_device if target.device == self._device else self._to_host
        current = torch.accelerator.current_stream(self._device)
        stream.wait_stream(current)
        with stream:
            target.copy_(source, non_blocking=True)
            event = torch.Event(device=self._device)
            event.record(stream)
        for tensor in (target, source):
            if tensor.device == self._device:
                tensor.record_stream(stream)
        current.wait_event(event)
        return _EventFence(event, target, source)


def open_copier(device: torch.device) -> Copier:
    """The copier for `device`."""
    return HostCopier() if device.type == "cpu" else StreamCopier(device)
