# SPDX-License-Identifier: Apache-2.0
"""Greedy choice of a row: the lowest token id among the largest logits, with its log-probability."""

import torch
from torch import Tensor

from tandem_kernels.device import implementation


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits: [rows, vocab] float32 contiguous. Returns token ids [rows] int32 and natural log-probabilities [rows].

    -1 and NaN for a row without a logit above -inf.
    """
    return implementation(logits).argmax(logits)


def argmax_reference(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Executable spec of `argmax`, in the logits' dtype."""
    ids = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, ids[:, None])[:, 0]
    return torch.where(logits.amax(-1) > float("-inf"), ids, -1).int(), logprobs
