# SPDX-License-Identifier: Apache-2.0
"""Weights of any shape without a file: for measuring a model's size when its weights are not at hand."""

from pathlib import Path

import torch
from torch import Tensor


class RandomWeights:
    """Stands in for a Checkpoint: every tensor asked for is drawn on the device, in the same order the same values."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.directory = Path("random weights")
        self._generator = torch.Generator(device).manual_seed(seed)
        self._device = device

    def names(self) -> list[str]:
        return []

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """bfloat16, scaled so that activations stay of the order of 1; small offsets for vectors."""
        scale = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
        return torch.randn(shape, generator=self._generator, device=self._device, dtype=torch.bfloat16) * scale

    def refuse_unused(self) -> None:
        """There is nothing that was not asked for."""
