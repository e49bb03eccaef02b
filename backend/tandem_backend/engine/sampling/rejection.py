# SPDX-License-Identifier: Apache-2.0
"""The rejection rule, for drafters that draw their own proposal (Leviathan et al. 2023; trees: Miao et al. 2024).

Only requests that ask for it: it is exact in distribution, but the tokens depend on what was drafted. Seeded draws, the
default, are exact token for token. All chance comes from (seed, position): the target's draws, what decides about
drafts, and the drafter's draws are streams of their own.
"""

from dataclasses import dataclass

import tandem_kernels as kernels
import torch
from torch import Tensor

from tandem_backend.engine.sampling.distribution import filter_rows
from tandem_backend.engine.sampling.request import RequestSampling

ACCEPT_STREAM = 1
DRAFT_STREAM = 2


@dataclass(frozen=True, slots=True)
class DraftSampler:
    """Draws a drafter's tokens for one request, with its temperature and filters."""

    sampling: RequestSampling
    position: int  # of the token after the anchor

    def draw(self, logits: Tensor, depth: int) -> tuple[int, Tensor]:
        """logits: [1, vocab] float32, the drafter's; depth: 0 after the anchor.

        Returns the token and the distribution it was drawn from, [vocab] float64.
        """
        filtered = logits.clone()
        filter_rows(filtered, [self.sampling])
        seed, position = keys_of(self.sampling.seed, self.position + depth, filtered)
        return int(kernels.gumbel_argmax(filtered, seed, position, DRAFT_STREAM)), kernels.probabilities(filtered)[0]


def reject_or_accept(filtered: Tensor, token_ids: Tensor, q: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The target's token at nodes with drafted children: theirs, or one from what they leave. [rows] int64.

    filtered: [rows, vocab] float32, the nodes' distributions; token_ids: [rows, children] int64; q: what each was drawn
    from, [rows, children, vocab] float64, all on the token for one that was not drawn; seeds: [rows] int64; positions:
    [rows] int32.
    """
    p = kernels.probabilities(filtered)
    chances = kernels.uniforms(seeds, positions, token_ids.shape[1], ACCEPT_STREAM)
    chosen = torch.full_like(seeds, -1)
    for child in range(token_ids.shape[1]):
        token, child_q = token_ids[:, child, None], q[:, child]
        is_taken = chances[:, child] * child_q.gather(1, token)[:, 0] < p.gather(1, token)[:, 0]
        chosen = torch.where((chosen < 0) & is_taken, token[:, 0], chosen)
        p = _residual(p, child_q)
    # The logarithm's rounding is the device's: here only the distribution is promised.
    rest = kernels.gumbel_argmax(p.log().float(), seeds, positions)
    return torch.where(chosen < 0, rest.long(), chosen)


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """What a rejected draw from q leaves of p, as a distribution; p itself where q covers it all."""
    left = (p - q).clamp(min=0.0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, p)


def keys_of(seed: int, position: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Seeds and positions of one row, on the device of `like`."""
    return (
        torch.tensor([seed], device=like.device),
        torch.tensor([position], dtype=torch.int32, device=like.device),
    )
