# SPDX-License-Identifier: Apache-2.0
"""Calls into the compiled library for what happens to logits. See argmax.py and sampling.py for the meaning."""

import torch
from torch import Tensor

from tandem_kernels.cpu.library import load_library

_library = load_library()


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    rows, vocab = logits.shape
    ids = torch.empty(rows, dtype=torch.int32)
    logprobs = torch.empty(rows)
    _library.tandem_argmax(logits.data_ptr(), ids.data_ptr(), logprobs.data_ptr(), rows, vocab)
    return ids, logprobs


def log_probs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, vocab = logits.shape
    values, top_ids, top_values = (
        torch.empty(rows),
        torch.empty(rows, num_top, dtype=torch.int32),
        torch.empty(rows, num_top),
    )
    _library.tandem_log_probs(
        logits.data_ptr(),
        token_ids.data_ptr(),
        values.data_ptr(),
        top_ids.data_ptr(),
        top_values.data_ptr(),
        rows,
        vocab,
        num_top,
    )
    return values, top_ids, top_values


def apply_mask(logits: Tensor, masks: Tensor) -> None:
    _library.tandem_apply_mask(logits.data_ptr(), masks.data_ptr(), *logits.shape)


def filter_logits(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, typical_p: Tensor
) -> None:
    parameters = (temperature, top_k, top_p, min_p, typical_p)
    _library.tandem_filter_logits(logits.data_ptr(), *(p.data_ptr() for p in parameters), *logits.shape)


def gumbel_argmax(logits: Tensor, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    rows, vocab = logits.shape
    ids = torch.empty(rows, dtype=torch.int32)
    _library.tandem_gumbel_argmax(
        logits.data_ptr(), seeds.data_ptr(), positions.data_ptr(), ids.data_ptr(), rows, vocab, stream
    )
    return ids
