# SPDX-License-Identifier: Apache-2.0
"""The likeliest token of a row of logits, and log-probabilities."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels.gpu.language import launch, next_power_of_2

CHUNK = 8192


@triton.jit
def chunk_kernel(logits, maxima, ids, totals, vocab, num_chunks, CHUNK: tl.constexpr):
    """Of one chunk of a row: the largest logit, the lowest id that has it, the sum of exp(logit - largest)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * vocab + n, mask=n < vocab, other=-float("inf"))
    largest = tl.max(values)
    base = tl.where(largest == -float("inf"), 0.0, largest)
    place = row * num_chunks + chunk
    tl.store(maxima + place, largest)
    tl.store(ids + place, tl.min(tl.where((values == largest) & (n < vocab), n, vocab)))
    tl.store(totals + place, tl.sum(tl.exp(values - base)))


@triton.jit
def choose_kernel(maxima, ids, totals, chosen, largest_logits, log_totals, num_chunks, CHUNKS: tl.constexpr):
    """A row's chunks together. -1 and NaN where every logit is -inf."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    place = row * num_chunks + c
    maximum = tl.load(maxima + place, mask=c < num_chunks, other=-float("inf"))
    total = tl.load(totals + place, mask=c < num_chunks, other=0.0)
    token = tl.load(ids + place, mask=c < num_chunks, other=2147483647)
    largest = tl.max(maximum)
    is_empty = largest == -float("inf")
    tl.store(chosen + row, tl.where(is_empty, -1, tl.min(tl.where(maximum == largest, token, 2147483647))))
    base = tl.where(is_empty, 0.0, largest)
    tl.store(largest_logits + row, largest)
    tl.store(log_totals + row, tl.where(is_empty, float("nan"), tl.log(tl.sum(total * tl.exp(maximum - base)))))


def summarize(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: the lowest id of the largest logit, that logit, the log of the sum of exp(logit - largest)."""
    rows, vocab = logits.shape
    logits, device = logits.contiguous(), logits.device
    num_chunks = triton.cdiv(vocab, CHUNK)
    maxima, totals = torch.empty(2, rows, num_chunks, dtype=torch.float32, device=device)
    ids = torch.empty(rows, num_chunks, dtype=torch.int32, device=device)
    launch(chunk_kernel, (rows, num_chunks), logits, maxima, ids, totals, vocab, num_chunks, CHUNK=CHUNK, num_warps=8)
    chosen = torch.empty(rows, dtype=torch.int32, device=device)
    largest, log_totals = torch.empty(2, rows, dtype=torch.float32, device=device)
    args = (maxima, ids, totals, chosen, largest, log_totals, num_chunks)
    launch(choose_kernel, (rows,), *args, CHUNKS=next_power_of_2(num_chunks), num_warps=1)
    return chosen, largest, log_totals


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    chosen, _, log_totals = summarize(logits)
    return chosen, 0.0 - log_totals


def log_probs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    _, largest, log_totals = summarize(logits)
    top_ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :num_top]
    ids = torch.cat([token_ids.long()[:, None], top_ids], dim=1)
    values = (logits.gather(1, ids) - largest[:, None]) - log_totals[:, None]
    return values[:, 0].contiguous(), top_ids.int(), values[:, 1:].contiguous()
