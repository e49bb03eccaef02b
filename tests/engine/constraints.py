# SPDX-License-Identifier: Apache-2.0
"""A constraint that is easy to check, for the hook's tests."""

import torch
from torch import Tensor


class Steps:
    """Output token n must leave the remainder that n leaves by `modulus`; any use after a wrong step fails the test."""

    def __init__(self, vocab_size: int, modulus: int = 3, num_taken: int = 0) -> None:
        self.vocab_size, self.modulus, self.num_taken = vocab_size, modulus, num_taken
        self.is_void = False

    def fork(self) -> "Steps":
        assert not self.is_void
        return Steps(self.vocab_size, self.modulus, self.num_taken)

    def advance(self, token_id: int) -> bool:
        assert not self.is_void
        self.is_void = token_id % self.modulus != self.num_taken % self.modulus
        self.num_taken += 1
        return not self.is_void

    def fill_mask(self, mask: Tensor) -> None:
        assert not self.is_void
        assert mask.shape == (-(-self.vocab_size // 32),)
        assert mask.dtype == torch.int32
        bits = torch.zeros(len(mask) * 32, dtype=torch.int64)
        bits[self.num_taken % self.modulus : self.vocab_size : self.modulus] = 1
        words = (bits.view(-1, 32) << torch.arange(32)).sum(1)
        mask.copy_(torch.where(words >= 1 << 31, words - (1 << 32), words).int())

    def settle(self, token_id: int) -> int | None:
        """What every second position leaves to the mask."""
        assert not self.is_void
        fits = token_id % self.modulus == self.num_taken % self.modulus
        return token_id if fits and self.num_taken % 2 else None

    def forced(self) -> list[int]:
        return []

    def is_finished(self) -> bool:
        return False
