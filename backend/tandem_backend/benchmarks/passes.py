# SPDX-License-Identifier: Apache-2.0
"""What one pass of the target costs by rows: the forward alone, nothing is committed between passes."""

import statistics
import time
from collections.abc import Mapping, Sequence

from tandem_backend.model.batch import SequenceRows, build_batch
from tandem_backend.model.decoder import Decoder
from tandem_backend.model.state import KV_BLOCK, allocate_state

CONTEXT_LEN = 256
NUM_WARM_UPS, NUM_TIMED = 3, 5  # passes of a burst


def chain(num_rows: int) -> list[int]:
    """Parents of a draft that never branches."""
    return list(range(-1, num_rows - 1))


def bushy_tree(num_rows: int) -> list[int]:
    """Parents, in pre-order, of a balanced binary tree."""
    parents: list[int] = []

    def grow(parent: int, size: int) -> None:
        if size == 0:
            return
        node = len(parents)
        parents.append(parent)
        grow(node, size // 2)
        grow(node, size - 1 - size // 2)

    grow(-1, num_rows)
    return parents


class PassTimer:
    """One sequence with `context_len` committed tokens, or fewer where the checkpoint's context ends before."""

    def __init__(self, decoder: Decoder, max_rows: int, context_len: int = CONTEXT_LEN) -> None:
        self.decoder = decoder
        self.context_len = min(context_len, decoder.config.max_position - max_rows)
        self.blocks = range(-(-(self.context_len + max_rows) // KV_BLOCK))
        self.state = allocate_state(decoder.config, len(self.blocks), num_slots=1)
        batch = build_batch([SequenceRows(self._token_ids(self.context_len), 0, 0, self.blocks, logit_rows=[])])
        result = decoder.forward(batch, self.state)
        decoder.commit(result, batch, [range(self.context_len)], self.state)

    def median_ms(self, trees: Mapping[int, Sequence[int]], repeats: int) -> dict[int, float]:
        """Milliseconds by rows; `trees` are parents by rows.

        The sizes take turns, so that a slow spell hits all; a turn is a burst whose first passes only warm the caches:
        in decoding too a pass follows passes of about its own size.
        """
        batches = {
            n: build_batch([SequenceRows(self._token_ids(n), self.context_len, 0, self.blocks, parents=parents)])
            for n, parents in trees.items()
        }
        measured: dict[int, list[float]] = {n: [] for n in trees}
        for _ in range(repeats):
            for n, batch in batches.items():
                for number in range(NUM_WARM_UPS + NUM_TIMED):
                    begun = time.perf_counter()
                    self.decoder.forward(batch, self.state)
                    if number >= NUM_WARM_UPS:
                        measured[n].append(1e3 * (time.perf_counter() - begun))
        return {n: statistics.median(times) for n, times in measured.items()}

    def _token_ids(self, count: int) -> list[int]:
        return [7919 * i % self.decoder.config.vocab_size for i in range(count)]
