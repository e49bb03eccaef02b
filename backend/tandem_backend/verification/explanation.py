# SPDX-License-Identifier: Apache-2.0
"""A difference in words: both tokens and both rows of logits."""

import torch
from torch import Tensor

from tandem_backend.verification.comparison import Trace, float_bits, show_bits

NUM_TOP = 5


def explain_rows(output: int, expected: Trace, got: Trace, expected_row: Tensor | None, row: Tensor | None) -> str:
    """Several lines; rows are [vocab] float32, None where that side ended before `output`."""
    lines = [_side("plain", output, expected, expected_row), _side("here", output, got, row)]
    if expected_row is not None and row is not None:
        lines.append(_first_bits(expected_row, row))
    return "\n".join(f"  {line}" for line in lines)


def _side(name: str, output: int, trace: Trace, row: Tensor | None) -> str:
    if row is None:
        return f"{name + ':':<6} ended after {len(trace.token_ids)} tokens"
    top = torch.topk(row, min(NUM_TOP, len(row)))
    logits = ", ".join(f"{i}: {_show(v)}" for i, v in zip(top.indices.tolist(), top.values.tolist(), strict=True))
    return f"{name + ':':<6} token {trace.token_ids[output]}, top logits {logits}"


def _first_bits(expected: Tensor, got: Tensor) -> str:
    where = (expected.view(torch.int32) != got.contiguous().view(torch.int32)).nonzero().flatten().tolist()
    if not where:
        return "the logits are equal bit for bit; the choice differs"
    first = where[0]
    return (
        f"{len(where)} of {len(expected)} logits differ, the first at token id {first}: "
        f"plain {_show(float(expected[first]))}, here {_show(float(got[first]))}"
    )


def _show(value: float) -> str:
    return show_bits(float_bits(value))
