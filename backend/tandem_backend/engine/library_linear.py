# SPDX-License-Identifier: Apache-2.0
"""Which prompt passes may run their linear layers on the vendor's library: those whose bits it was shown to give."""

import logging
from collections import defaultdict

import tandem_kernels as kernels
import torch
from tandem_kernels import PackedWeight
from torch import Tensor

from tandem_backend.model.batch import SequenceRows, build_batch
from tandem_backend.model.decoder import Decoder
from tandem_backend.model.state import ModelState

FEWEST_ROWS = 128  # below it our kernels are the faster ones

logger = logging.getLogger(__name__)


def allow_library(model: Decoder, state: ModelState, max_rows: int) -> set[int]:
    """Try passes of 128, 256 ... max_rows rows; returns the row counts at which the library takes some layers over.

    Asked are the layers that add to the residual stream, which the library does too; what ends otherwise would need a
    kernel of its own after it. A layer qualifies by its shape: random rows must have the bits of our kernel. Then a
    whole pass of so many rows must, or none qualifies at that count. To be called before passes are captured, on a
    state that nobody uses yet.
    """
    counts = {max_rows, *(2**n for n in range(7, 14) if 2**n < max_rows)}
    most = model.config.max_position
    return {n for n in sorted(counts) if FEWEST_ROWS <= n <= most and _allow(model, state, n)}


def _allow(model: Decoder, state: ModelState, rows: int) -> bool:
    by_shape: dict[tuple[int, int], list[PackedWeight]] = defaultdict(list)
    for weight in model.residual_weights():
        by_shape[weight.num_outputs, weight.num_inputs].append(weight)
    exact = _pass(model, state, rows)
    equal = [weights for weights in by_shape.values() if _same_bits(weights[0], rows, model.device)]
    allowed = [weight for weights in equal for weight in weights]
    for weight in allowed:
        weight.library_rows.add(rows)
    if all(torch.equal(a, b) for a, b in zip(_pass(model, state, rows), exact, strict=True)):
        logger.info("prefill_linear: at %d rows the library takes %d of %d shapes", rows, len(equal), len(by_shape))
        return bool(allowed)
    for weight in allowed:
        weight.library_rows.discard(rows)
    logger.warning("prefill_linear: a pass of %d rows has other bits on the library, which is left out there", rows)
    return False


def _same_bits(weight: PackedWeight, rows: int, device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, weight.num_inputs, generator=generator).to(device, kernels.row_dtype(device))
    residual = torch.randn(rows, weight.num_outputs, generator=generator).to(device)
    exact = kernels.linear(x, weight, residual)
    weight.library_rows.add(rows)
    try:
        return torch.equal(kernels.linear(x, weight, residual), exact)
    finally:
        weight.library_rows.discard(rows)


def _pass(model: Decoder, state: ModelState, rows: int) -> tuple[Tensor, Tensor]:
    """Logits of the last row and hidden states of a pass from nothing."""
    state.clear_slot(0)
    token_ids = [7919 * i % model.config.vocab_size for i in range(rows)]
    result = model.forward(build_batch([SequenceRows(token_ids, 0, 0, [0], logit_rows=[rows - 1])]), state)
    return result.logits, result.hidden
