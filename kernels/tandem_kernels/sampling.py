# SPDX-License-Identifier: Apache-2.0
"""From logits to a sampled token: filters, the seeded draw, log-probabilities, masks.

The twins are the definition and run on any device: float32 and float64 operations that are each rounded on their own
(no fused multiply-add, no division by multiplying with a reciprocal), and integer weights whose sums depend on no
order. An implementation must give their bits. Philox4x32-10: Salmon et al. 2011; the Gumbel-max trick: Maddison 2014.
"""

import math

import torch
from torch import Tensor

from tandem_kernels.device import implementation

WEIGHT_BITS = 40  # the most likely token weighs 2^40
LN2_HIGH, LN2_LOW = float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33")
LOG2E = float.fromhex("0x1.71547652b82fep+0")
SQRT2 = float.fromhex("0x1.6a09e667f3bcdp+0")
LOW = 0xFFFFFFFF


def apply_mask(logits: Tensor, masks: Tensor) -> None:
    """In place, -inf where bit i % 32 of word i // 32 is 0.

    logits: [rows, vocab] float32 contiguous; masks: [rows, ceil(vocab / 32)] int32 contiguous.
    """
    implementation(logits).apply_mask(logits, masks)


def apply_mask_reference(logits: Tensor, masks: Tensor) -> None:
    """Executable spec of `apply_mask`."""
    bits = (masks[:, :, None] >> torch.arange(32, device=masks.device)) & 1
    logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, float("-inf"))


def filter_logits(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, typical_p: Tensor
) -> None:
    """In place: divide by the temperature, then -inf for the tokens that a filter removes; one value a row of each.

    logits: [rows, vocab] float32 contiguous; temperature (above 0), top_p, min_p, typical_p: [rows] float32; top_k:
    [rows] int32, 0 for all. In this order: top_k keeps the k largest; top_p (Holtzman et al. 2020) the shortest run of
    the most likely tokens that has top_p of what is left; min_p (Nguyen et al. 2024) those with at least min_p times
    the largest probability; typical_p (Meister et al. 2023) the shortest run with typical_p of what is left, by how
    near a token's surprise is to the mean surprise. Equals are taken by id, lower first; at least one token is kept.
    """
    implementation(logits).filter_logits(logits, temperature, top_k, top_p, min_p, typical_p)


def filter_logits_reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, typical_p: Tensor
) -> None:
    """Executable spec of `filter_logits`, row by row."""
    logits.copy_(logits / temperature[:, None] + 0.0)
    for row, k, p, floor, typical in zip(
        logits, top_k.tolist(), top_p.tolist(), min_p.tolist(), typical_p.tolist(), strict=True
    ):
        kept = row > float("-inf")
        if not kept.any():
            continue
        surprise = row.amax().double() - row.double()  # above the most likely token's
        if k > 0:
            kept = _prefix(-row.double(), kept, torch.ones_like(row, dtype=torch.int64), k)
        weights = _weight(-surprise)
        if p < 1:
            kept = _prefix(-row.double(), kept, weights, _share(weights, kept, p))
        if floor > 0:
            kept = kept & (weights.double() >= floor * 2.0**WEIGHT_BITS)
        if typical < 1:
            total = weights[kept].sum()
            mean = (weights[kept].double() * surprise[kept]).long().sum().double() / total.double()
            distance = (surprise - mean).abs().float().double()
            kept = _prefix(distance, kept, weights, _share(weights, kept, typical))
        row.masked_fill_(~kept, float("-inf"))


def _prefix(order: Tensor, kept: Tensor, weights: Tensor, limit: int) -> Tensor:
    """Of the kept tokens, by ascending `order` and then id, the shortest run whose weight reaches the limit."""
    ids = kept.nonzero()[:, 0]
    ids = ids[torch.sort(order[ids], stable=True).indices]
    before = weights[ids].cumsum(0) - weights[ids]
    result = torch.zeros_like(kept)
    result[ids[before < max(limit, 1)]] = True
    return result


def _share(weights: Tensor, kept: Tensor, share: float) -> int:
    return math.ceil(float(weights[kept].sum().double()) * share)


def _weight(y: Tensor) -> Tensor:
    """floor(exp(y) * 2^40) for y <= 0, as int64. y: float64, -inf allowed."""
    is_zero = ~(y >= -28.0)
    y = y.masked_fill(is_zero, 0.0)
    n = (y * LOG2E).round()
    r = (y - n * LN2_HIGH) - n * LN2_LOW
    p = torch.full_like(r, 1.0 / 479001600.0)
    for factorial in (39916800, 3628800, 362880, 40320, 5040, 720, 120, 24, 6, 2, 1, 1):
        p = p * r + 1.0 / factorial
    scale = ((n.long() + 1023 + WEIGHT_BITS) << 52).view(torch.float64)
    return (p * scale).long().masked_fill(is_zero, 0)


def probabilities(filtered: Tensor) -> Tensor:
    """The distribution that filtered logits stand for, as float64, to a resolution of 2^-40 of its largest; any device.

    filtered: [rows, vocab] float32, at least one above -inf in each row. Plain torch: this is its own twin.
    """
    weights = _weight(filtered.double() - filtered.amax(-1, keepdim=True).double())
    return weights.double() / weights.sum(-1, keepdim=True).double()


def gumbel_argmax(logits: Tensor, seeds: Tensor, positions: Tensor, stream: int = 0) -> Tensor:
    """Draw a token of each row's softmax: the index of the largest logit + noise, [rows] int32; -1 for a row of -inf.

    logits: [rows, vocab] float32 contiguous; seeds: [rows] int64, all 64 bits count; positions: [rows] int32. The noise
    depends on (seed, position, stream, token id) alone.
    """
    return implementation(logits).gumbel_argmax(logits, seeds, positions, stream)


def gumbel_argmax_reference(logits: Tensor, seeds: Tensor, positions: Tensor, stream: int = 0) -> Tensor:
    """Executable spec of `gumbel_argmax`."""
    scores = logits.double() + gumbel_noise(seeds, positions, logits.shape[1], stream)
    ids = (scores == scores.amax(-1, keepdim=True)).int().argmax(-1)
    return torch.where(logits.amax(-1) == float("-inf"), -1, ids).int()


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab: int, stream: int = 0) -> Tensor:
    """[rows, vocab] float64: -log(-log u) for `uniforms` u."""
    return -_log(-_log(uniforms(seeds, positions, vocab, stream)))


def uniforms(seeds: Tensor, positions: Tensor, n: int, stream: int) -> Tensor:
    """[rows, n] float64 in (0, 1), multiples of 2^-52 plus 2^-53; u[i] is half i % 2 of Philox counter
    (i // 2, position, stream, 0) under the seed as its key."""
    blocks = torch.arange((n + 1) // 2, device=seeds.device)
    shape = (len(seeds), len(blocks))
    counter = (blocks.expand(shape), positions.long()[:, None].expand(shape), blocks.new_full(shape, stream))
    a, b, c, d = philox(seeds[:, None].expand(shape), *counter, torch.zeros_like(counter[0]))
    draws = torch.stack([(a << 20) | (b >> 12), (c << 20) | (d >> 12)], -1).flatten(1)[:, :n]
    return draws.double() * 2.0**-52 + 2.0**-53


def philox(key: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four words from four; all int64, the words below 2^32, the key of 64 bits."""
    k0, k1 = key & LOW, (key >> 32) & LOW
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # modulo 2^64
        c0, c1, c2, c3 = ((b >> 32) & LOW) ^ c1 ^ k0, b & LOW, ((a >> 32) & LOW) ^ c3 ^ k1, a & LOW
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return c0, c1, c2, c3


def _log(z: Tensor) -> Tensor:
    """Natural logarithm of positive normal float64: log(m 2^e) by the series of atanh((m - 1) / (m + 1))."""
    bits = z.view(torch.int64)
    exponent = (bits >> 52) - 1023
    m = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).view(torch.float64)
    is_high = m > SQRT2
    m = torch.where(is_high, m * 0.5, m)
    e, f = (exponent + is_high).double(), m - 1.0
    s = f / (f + 2.0)
    t = s * s
    p = t * (1.0 / 21.0) + 1.0 / 19.0
    for odd in (17, 15, 13, 11, 9, 7, 5, 3, 1):
        p = p * t + 1.0 / odd
    return e * LN2_HIGH + ((s + s) * p + e * LN2_LOW)


def log_probs(logits: Tensor, token_ids: Tensor, num_top: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Natural log-probabilities under the softmax of each row: of token_ids [rows] int32, and the most likely tokens.

    logits: [rows, vocab] float32 contiguous. Returns [rows] float32, ids [rows, num_top] int32, the likeliest first and
    lower ids first among equals, and theirs [rows, num_top] float32; num_top is at most vocab. For a row's argmax the
    bits are those of `argmax`.
    """
    return implementation(logits).log_probs(logits, token_ids, num_top)


def log_probs_reference(logits: Tensor, token_ids: Tensor, num_top: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Executable spec of `log_probs`, in the logits' dtype."""
    values = torch.log_softmax(logits, dim=-1)
    ids = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :num_top]
    return values.gather(1, token_ids.long()[:, None])[:, 0], ids.int(), values.gather(1, ids)
