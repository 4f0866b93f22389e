"""For all tests: one thread for torch, because the machines that run them share few cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
