"""Two ways to train the same model: through tiered, and with plain torch in memory, to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

import tiered
from tiered.config import Config
from tiered.report import Report

BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1


class Learner(Protocol):
    """A model with its optimizer. `update` clips, steps and zeroes; `finish` waits until the last is done."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def update(self, clip: float) -> None: ...

    def finish(self) -> None: ...

    def report(self) -> Report | None: ...

    def reset_report(self) -> None: ...

    def close(self) -> None: ...


class TieredLearner:
    """State in tiers."""

    def __init__(self, build: Callable[[], nn.Module], config: Config, *, learning_rate: float) -> None:
        self.model = tiered.shard(build, config)
        self._engine = tiered.engine(self.model)
        self._adamw = tiered.AdamW(
            self.model.parameters(), lr=learning_rate, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY
        )
        self.optimizer: torch.optim.Optimizer = self._adamw

    def update(self, clip: float) -> None:
        if clip:
            self._adamw.clip_grad_norm_(clip)
        self._adamw.step()
        self._adamw.zero_grad()

    def finish(self) -> None:
        self._engine.synchronize()

    def report(self) -> Report:
        return self._engine.report()

    def reset_report(self) -> None:
        self._engine.reset_report()

    def close(self) -> None:
        self._engine.close()


class PlainLearner:
    """State in memory: torch's fused AdamW, on fp32 masters where the weights are of lower precision."""

    def __init__(self, build: Callable[[], nn.Module], *, weight_dtype: torch.dtype, learning_rate: float) -> None:
        self.model = build()
        self._masters = self._parameters = list(self.model.parameters())
        if weight_dtype != torch.float32:
            self._masters = [nn.Parameter(parameter.detach().float()) for parameter in self._parameters]
            self.model.to(weight_dtype)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self._masters, lr=learning_rate, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
        )

    @torch.no_grad()
    def update(self, clip: float) -> None:
        if self._masters is not self._parameters:
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                if parameter.grad is not None:
                    master.grad = parameter.grad.float()
                    parameter.grad = None
        if clip:
            nn.utils.clip_grad_norm_(self._masters, clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self._masters is not self._parameters:
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                parameter.copy_(master)

    def finish(self) -> None:
        return

    def report(self) -> None:
        return None

    def reset_report(self) -> None:
        return

    def close(self) -> None:
        return
