# SPDX-License-Identifier: Apache-2.0
"""The exactness self-test at load: random trees, chunkings and batches against one-token decoding, bit for bit.

It runs on the real weights and the real state memory, before any request.
"""

import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_backend.engine.linear_test import compare_linears
from tandem_backend.errors import SelfTestError
from tandem_backend.model.batch import SequenceRows, build_batch
from tandem_backend.model.decoder import Decoder
from tandem_backend.model.passes import Passes
from tandem_backend.model.state import ModelState

logger = logging.getLogger(__name__)

PLAIN, JOINT, MATE = 0, 1, 2  # slots of the three sequences; each owns two blocks
NUM_SLOTS, NUM_BLOCKS = 3, 6
MAX_NODES = 12


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    num_rows: int  # rows whose logits were compared
    seconds: float
    num_linear_rows: int = 0  # rows of single linear layers that were compared


def self_test_at_load(model: Decoder, state: ModelState, passes: Passes, num_rows: int) -> SelfTestResult | None:
    """None where num_rows is 0. Fails closed: a model that is not exact does not load."""
    if num_rows == 0:
        logger.warning("exactness self-test: skipped (self_test_rows is 0)")
        return None
    begun = time.perf_counter()
    try:
        num_linear_rows = compare_linears(model.packed_weights(), model.device)
        num_rows = run_self_test(model, state, passes, num_rows).num_rows
    except SelfTestError as error:
        logger.critical("exactness self-test: FAILED: %s", error)
        raise
    result = SelfTestResult(num_rows, time.perf_counter() - begun, num_linear_rows)
    logger.info(
        "exactness self-test: %d rows bit-equal in %.2f s, %d of linear layers alone",
        result.num_rows,
        result.seconds,
        result.num_linear_rows,
    )
    return result


def run_self_test(model: Decoder, state: ModelState, passes: Passes, num_rows: int, seed: int = 0) -> SelfTestResult:
    """Compare about num_rows rows that `passes` computes with those of launched one-token passes.

    Raises SelfTestError at the first logits row that differs in a bit."""
    begun = time.perf_counter()
    test = _SelfTest(model, state, passes, random.Random(seed))
    # The prefix ends shortly before a block does, so that trees cross the border.
    prefix_len = max(1, min(num_rows // 2, state.block - 4, model.config.max_position - MAX_NODES - 1))
    prefix = test.tokens(prefix_len)
    mate = test.tokens(prefix_len)
    plain = test.decode(PLAIN, prefix, start=0)
    test.prefill_joint(prefix, mate, plain)
    while test.num_rows < num_rows:
        test.verify_tree(prefix, mate)
    return SelfTestResult(test.num_rows, time.perf_counter() - begun)


class _SelfTest:
    def __init__(self, model: Decoder, state: ModelState, passes: Passes, rng: random.Random) -> None:
        self.model, self.state, self.passes, self.rng = model, state, passes, rng
        self.num_rows = 0
        for slot in (PLAIN, JOINT, MATE):
            state.clear_slot(slot)

    def tokens(self, n: int) -> list[int]:
        return [self.rng.randrange(self.model.config.vocab_size) for _ in range(n)]

    def rows(
        self, slot: int, token_ids: Sequence[int], start: int, parents: Sequence[int] | None = None
    ) -> SequenceRows:
        return SequenceRows(token_ids, start, slot, [2 * slot, 2 * slot + 1], parents)

    def decode(self, slot: int, token_ids: Sequence[int], start: int) -> list[Tensor]:
        """One token a pass, alone: the reference. Returns a logits row a token."""
        logits = []
        for i, token_id in enumerate(token_ids):
            batch = build_batch([self.rows(slot, [token_id], start + i)])
            result = self.model.forward(batch, self.state)
            self.model.commit(result, batch, [[0]], self.state)
            logits.append(result.logits[0])
        return logits

    def prefill_joint(self, prefix: Sequence[int], mate: Sequence[int], plain: Sequence[Tensor]) -> None:
        """The prefix in random chunks, beside another sequence in others; both end up committed."""
        done = mate_done = 0
        while done < len(prefix):
            chunk = prefix[done : done + self.rng.randint(1, 13)]
            mate_chunk = mate[mate_done : mate_done + self.rng.randint(1, 13)]
            sequences = [self.rows(JOINT, chunk, done)]
            if mate_chunk:
                sequences.insert(0, self.rows(MATE, mate_chunk, mate_done))
            batch = build_batch(sequences)
            result = self.passes.forward(batch)
            self.passes.commit(result, batch, [range(len(rows.token_ids)) for rows in sequences])
            self.compare(result.logits[len(mate_chunk) :], plain[done : done + len(chunk)], "a prompt chunk")
            done, mate_done = done + len(chunk), mate_done + len(mate_chunk)

    def verify_tree(self, prefix: Sequence[int], mate: Sequence[int]) -> None:
        """A random tree beside another sequence's row, one of its paths token by token, and the row after that path."""
        num_nodes = self.rng.randint(2, MAX_NODES)
        parents = [-1]
        # Pre-order: a new node's parent lies on the path to the node before it.
        path = [0]
        for node in range(1, num_nodes):
            del path[self.rng.randint(1, len(path)) :]
            parents.append(path[-1])
            path.append(node)
        token_ids = self.tokens(num_nodes)
        batch = build_batch(
            [self.rows(MATE, mate[-1:], len(mate) - 1), self.rows(JOINT, token_ids, len(prefix), parents)]
        )
        result = self.passes.forward(batch)
        logits = result.logits[1:].clone()  # the next pass may reuse their memory
        leaves = set(range(num_nodes)) - set(parents)
        leaf = self.rng.choice(sorted(leaves))
        branch = [leaf]
        while parents[branch[0]] >= 0:
            branch.insert(0, parents[branch[0]])
        # What is kept of the tree must be what the path alone leaves behind.
        self.passes.commit(result, batch, [[], branch])
        self.reset(PLAIN, prefix)
        plain = self.decode(PLAIN, [token_ids[node] for node in branch], start=len(prefix))
        self.compare(logits[branch], plain, "a draft tree's path")
        after, end = self.tokens(1), len(prefix) + len(branch)
        row = self.passes.forward(build_batch([self.rows(JOINT, after, end)])).logits.clone()
        self.compare(row, self.decode(PLAIN, after, end), "an accepted path's end")
        self.reset(JOINT, prefix)

    def reset(self, slot: int, prefix: Sequence[int]) -> None:
        """Bring a sequence back to the prefix, in one chunk."""
        self.state.clear_slot(slot)
        batch = build_batch([self.rows(slot, prefix, 0)])
        self.passes.commit(self.passes.forward(batch), batch, [range(len(prefix))])

    def compare(self, rows: Tensor, plain: Sequence[Tensor], what: str) -> None:
        for i, (row, reference) in enumerate(zip(rows, plain, strict=True)):
            self.num_rows += 1
            if not torch.equal(row, reference):
                column = int((row != reference).nonzero()[0])
                raise SelfTestError(
                    f"row {i} of {what} differs from one-token decoding: logit {column} is {float(row[column])!r}, "
                    f"alone {float(reference[column])!r}; this machine or build breaks the promise of exact rows"
                )
