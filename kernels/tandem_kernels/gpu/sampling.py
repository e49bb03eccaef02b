# SPDX-License-Identifier: Apache-2.0
"""Seeded draws and filters with the bits of their twins in `tandem_kernels.sampling`, which say what each step is.

The draw is a kernel: its twin passes over the vocabulary some eighty times. Masks and filters are the twins themselves,
which torch rounds as they ask; a filter waits for the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem_kernels import sampling
from tandem_kernels.gpu.language import launch, next_power_of_2

CHUNK = 1024

LN2_HIGH, LN2_LOW, SQRT2 = (tl.constexpr(value) for value in (sampling.LN2_HIGH, sampling.LN2_LOW, sampling.SQRT2))


@triton.jit
def _log(z):
    """Of positive normal float64."""
    bits = z.to(tl.int64, bitcast=True)
    m = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    is_high = m > SQRT2
    m = tl.where(is_high, m * 0.5, m)
    e = ((bits >> 52) - 1023 + is_high.to(tl.int64)).to(tl.float64)
    f = m - 1.0
    s = f / (f + 2.0)
    t = s * s
    p = t * (1.0 / 21.0) + 1.0 / 19.0
    for i in tl.static_range(9):
        p = p * t + 1.0 / (17 - 2 * i)
    return e * LN2_HIGH + ((s + s) * p + e * LN2_LOW)


@triton.jit
def _uniform(seed, position, stream, n):
    """Of tokens n: multiples of 2^-52 plus 2^-53, by Philox4x32-10."""
    counter = (n // 2).to(tl.uint32)
    zeros = counter * 0
    a, b, c, d = tl.philox(seed, counter, zeros + position.to(tl.uint32), zeros + stream, zeros)
    is_even = n % 2 == 0
    high = tl.where(is_even, a, c).to(tl.int64)
    low = tl.where(is_even, b, d).to(tl.int64)
    return ((high << 20) | (low >> 12)).to(tl.float64) * 2.0**-52 + 2.0**-53


@triton.jit
def draw_kernel(logits, seeds, positions, scores, ids, stream, vocab, num_chunks, CHUNK: tl.constexpr):
    """Of one chunk of a row: the largest logit + noise and the lowest id that has it."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * vocab + n, mask=n < vocab, other=-float("inf"))
    u = _uniform(tl.load(seeds + row), tl.load(positions + row), stream, n)
    noisy = values.to(tl.float64) + -_log(-_log(u))
    largest = tl.max(noisy)
    place = row * num_chunks + chunk
    tl.store(scores + place, largest)
    tl.store(ids + place, tl.min(tl.where((noisy == largest) & (n < vocab), n, 2147483647)))


@triton.jit
def pick_kernel(scores, ids, chosen, num_chunks, CHUNKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    score = tl.load(scores + row * num_chunks + c, mask=c < num_chunks, other=-float("inf"))
    token = tl.load(ids + row * num_chunks + c, mask=c < num_chunks, other=2147483647)
    largest = tl.max(score)
    tl.store(
        chosen + row, tl.where(largest == -float("inf"), -1, tl.min(tl.where(score == largest, token, 2147483647)))
    )


def gumbel_argmax(logits: Tensor, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    rows, vocab = logits.shape
    num_chunks, device = triton.cdiv(vocab, CHUNK), logits.device
    scores = torch.empty(rows, num_chunks, dtype=torch.float64, device=device)
    ids = torch.empty(rows, num_chunks, dtype=torch.int32, device=device)
    chosen = torch.empty(rows, dtype=torch.int32, device=device)
    args = (logits.contiguous(), seeds, positions, scores, ids, stream, vocab, num_chunks)
    launch(draw_kernel, (rows, num_chunks), *args, CHUNK=CHUNK)
    launch(pick_kernel, (rows,), scores, ids, chosen, num_chunks, CHUNKS=next_power_of_2(num_chunks), num_warps=1)
    return chosen


def apply_mask(logits: Tensor, masks: Tensor) -> None:
    sampling.apply_mask_reference(logits, masks)


def filter_logits(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, typical_p: Tensor
) -> None:
    sampling.filter_logits_reference(logits, temperature, top_k, top_p, min_p, typical_p)
