# SPDX-License-Identifier: Apache-2.0
"""Traces of decoded requests, and what differs between two of them."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from tandem_backend import types
from tandem_backend.errors import InternalError


@dataclass(slots=True)
class Trace:
    """What one request decoded. `row_bits[i]` stands for the bits of the row that chose `token_ids[i]`.

    `logprob_bits[i]` are those of the log-probabilities that came with the token, `ending` what else the answer has:
    its text, why it ended and the prompt's log-probabilities. Empty where they are not looked at.
    """

    token_ids: list[int] = field(default_factory=list)
    row_bits: list[bytes] = field(default_factory=list)
    logprob_bits: list[bytes] = field(default_factory=list)
    ending: bytes = b""
    round_sizes: list[int] = field(default_factory=list)  # tokens that each round committed; the prompt's is the first
    prompt_ids: tuple[int, ...] = ()  # empty where the target doesn't tell
    num_draft_tokens: int = 0  # draft rows that the target verified
    num_cached_tokens: int = 0  # prompt tokens that it did not compute again

    def add_round(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        self.round_sizes.append(len(token_ids))


@dataclass(frozen=True, slots=True)
class Differences:
    """Of one request against its reference; a token that only one side has differs, and so does its row.

    A row differs, too, by the log-probabilities that it gave; another ending counts as the last row's.
    """

    num_tokens: int
    num_rows: int
    first: int | None  # output index of the first one


def compare(expected: Trace, got: Trace) -> Differences:
    tokens = [i for i, (a, b) in enumerate(zip_longest(expected.token_ids, got.token_ids)) if a != b]
    rows = [i for i, (a, b) in enumerate(zip_longest(_rows(expected), _rows(got))) if a != b]
    if not rows and expected.ending != got.ending:
        rows = [max(len(got.row_bits) - 1, 0)]
    return Differences(len(tokens), len(rows), min([*tokens[:1], *rows[:1]], default=None))


def _rows(trace: Trace) -> list[tuple[bytes, bytes | None]]:
    return list(zip_longest(trace.row_bits, trace.logprob_bits))


def acceptance_len(traces: Sequence[Trace]) -> float:
    """`types.acceptance_len` over all rounds of the traces."""
    sizes = [size for trace in traces for size in trace.round_sizes[1:]]
    return types.acceptance_len(sum(sizes), len(sizes))


def require_rows(traces: Sequence[Trace]) -> None:
    """Raises InternalError unless every token came with its row: what was not recorded can't be called equal."""
    for trace in traces:
        if len(trace.row_bits) != len(trace.token_ids):
            raise InternalError(f"{len(trace.token_ids)} tokens were decoded and {len(trace.row_bits)} rows recorded")


def float_bits(value: float) -> bytes:
    """The four bytes of a float32, most significant first. Raises OverflowError for a value that float32 can't hold."""
    return struct.pack(">f", value)


def show_bits(bits: bytes) -> str:
    """A float32 as a number and as its bits."""
    return f"{struct.unpack('>f', bits)[0]:.9g} (0x{bits.hex()})"
