# SPDX-License-Identifier: Apache-2.0
"""The mtp drafter's kept KV: its drafts are those of one that computes everything anew, to the bit.

A wrong row of it changes no text, only how often a draft is accepted: comparing with plain decoding shows nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import tandem_kernels as kernels
import torch
from engine_driver import DEVICE, VOCAB_SIZE, EngineDriver, engine_config
from fakes.replay import Rerun
from session_requests import start, turn
from tandem_backend.engine.account import NUM_LOOKED_BACK
from tandem_backend.engine.drafters.base import CommittedRows, DraftContext, Proposal
from tandem_backend.engine.drafters.mtp import MtpDrafter
from tandem_backend.model.checkpoint import Checkpoint
from tandem_backend.model.decoder import Decoder
from tandem_backend.model.graphs import GraphLimits
from tandem_backend.model.mtp import MtpHead, mtp_rows
from tandem_backend.model.mtp_passes import CapturedMtp, LaunchedMtp, MtpPasses
from tandem_backend.model.state import KV_BLOCK, KVLayer, allocate_kv_layer
from tandem_backend.types import Prompt, Request, SamplingParams
from tandem_kernels import find_device
from torch import Tensor

NUM_BLOCKS = 64


class Recomputed:
    """Guesses from nothing but the target's hidden states and the tokens."""

    def __init__(self, head: MtpHead) -> None:
        self.head = head
        self.kv = allocate_kv_layer(head.decoder.config, NUM_BLOCKS, device=head.decoder.device)
        for part in (self.kv.keys, self.kv.values):
            part.fill_(float("nan"))

    def guesses(
        self, hidden: Tensor, token_ids: Sequence[int], path: Sequence[int], top_k: int
    ) -> list[tuple[int, float]]:
        """The top_k tokens after token_ids (one more than rows of hidden) and the drafted `path`, with probabilities.

        Each row of the path is computed in a pass of its own over all rows, from the output of the row before it.
        """
        out = hidden[:0]
        for drafted in range(len(path) + 1):
            inputs = torch.cat([hidden, out[len(token_ids) - 2 :]])
            tokens = [*token_ids[1:], *path[:drafted]]
            count = len(tokens)
            rows = mtp_rows(tokens, range(count), range(-1, count - 1), [0] * count, [(0, range(NUM_BLOCKS))])
            out = self.head.forward(inputs, rows, self.kv, self.head.attention.new_rows(len(tokens)))
        ids, probs = self.head.top_tokens(out[-1:], top_k)
        return list(zip(ids[0], probs[0], strict=True))


class ComparedMtp:
    """An MtpDrafter of which every draft is compared with `Recomputed`."""

    name = "mtp"

    def __init__(self, inner: MtpDrafter, head: MtpHead) -> None:
        self.inner, self.reference = inner, Recomputed(head)
        self.hidden: dict[int, list[Tensor]] = {}
        self.ended: list[list[Tensor]] = []
        self.num_resumed = 0
        self.num_compared = self.num_looked_back = self.num_different = 0

    def begin(self, key: int) -> None:
        self.hidden[key] = []
        self.inner.begin(key)

    def end(self, key: int) -> None:
        self.ended.append(self.hidden.pop(key, []))
        self.inner.end(key)

    def kv_layers(self) -> list[KVLayer]:
        return self.inner.kv_layers()

    def kept(self, key: int) -> tuple[int, Tensor | None]:
        return self.inner.kept(key)

    def resume(self, key: int, position: int, hidden: Tensor, next_token_id: int, block_table: Sequence[int]) -> None:
        """The reference goes on from the hidden states of the sequence that left the prefix behind."""
        self.num_resumed += 1
        known = [rows for rows in (*self.hidden.values(), *self.ended) if len(rows) >= position]
        before = next(rows for rows in known if torch.equal(rows[position - 1], hidden[0]))
        self.inner.resume(key, position, hidden, next_token_id, block_table)
        self.hidden[key] = before[:position]

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        for item in rows:
            assert item.start == len(self.hidden[item.key]), "a gap in what was committed"
            self.hidden[item.key] += item.hidden.clone()
        self.inner.observe(rows)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Proposal]:
        for context in contexts:
            context.num_looked_back = min(NUM_LOOKED_BACK, len(context.token_ids) - context.num_prompt_tokens)
        proposals = self.inner.propose(contexts)
        for context, proposal in zip(contexts, proposals, strict=True):
            self.compare(context, proposal)
        return proposals

    def compare(self, context: DraftContext, proposal: Proposal) -> None:
        hidden = torch.stack(self.hidden[context.key])
        paths: list[list[int]] = []
        for token_id, parent in zip(proposal.token_ids, proposal.parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else []), token_id])
        for path, score in zip(paths, proposal.scores, strict=True):
            expected = self.reference.guesses(hidden, context.token_ids, path[:-1], self.inner.top_k)
            self.num_compared += 1
            self.num_different += (path[-1], score) not in expected
        for back, (score, is_right) in enumerate(reversed(proposal.looked_back), start=1):
            before, known = context.token_ids[:-back], context.token_ids[-back]
            token_id, expected_score = self.reference.guesses(hidden[:-back], before, [], self.inner.top_k)[0]
            self.num_looked_back += 1
            self.num_different += (score, is_right) != (expected_score, token_id == known)


def drafter(
    checkpoint: Path,
    width: int,
    top_k: int,
    kind: type[MtpDrafter] = MtpDrafter,
    make_passes: Callable[[MtpHead, KVLayer], MtpPasses] = LaunchedMtp,
) -> ComparedMtp:
    decoder = Decoder(checkpoint, find_device(DEVICE))
    kv = allocate_kv_layer(decoder.config, 128, device=decoder.device)
    head = MtpHead(decoder, Checkpoint(checkpoint), VOCAB_SIZE)
    return ComparedMtp(kind(make_passes(head, kv), kv, KV_BLOCK, width=width, top_k=top_k), head)


def compare(hybrid: Path, mtp: ComparedMtp) -> None:
    """Decode three requests together and two turns of a sequence with it; other drafts are accepted too."""
    config = engine_config(
        hybrid, drafters=("lookup",), router="always", max_draft_tokens=6, max_prefill_rows=50, joint_prefill_rows=20
    )
    driver = EngineDriver(config, {"mtp": mtp})
    params = SamplingParams(max_tokens=12, ignore_eos=True, drafter="mtp+lookup")
    driver.run(start("first", (3, 4) * 5, params=params))
    for n, prompt in enumerate([(5,), (3, 4) * 30, tuple(range(3, 31)) * 3]):
        driver.add(Request(request_id=str(n), prompt=Prompt(token_ids=prompt), params=params))
    driver.add(turn("second", (9, 8), params=params))
    driver.finish()
    assert mtp.num_compared > 100
    assert mtp.num_looked_back > 3


@pytest.mark.parametrize(("width", "top_k"), [(1, 1), (1, 3), (3, 2)])
def test_a_kept_mtp_drafts_as_a_recomputed_one(hybrid: Path, width: int, top_k: int) -> None:
    mtp = drafter(hybrid, width, top_k)
    compare(hybrid, mtp)
    assert mtp.num_different == 0


@pytest.mark.parametrize("max_rows", [1, 4, 32])  # what is longer or wider is launched
@pytest.mark.parametrize(("width", "top_k"), [(1, 1), (3, 2)])
def test_a_captured_mtp_drafts_as_a_recomputed_one(hybrid: Path, width: int, top_k: int, max_rows: int) -> None:
    recorder = Rerun()

    def captured(head: MtpHead, kv: KVLayer) -> MtpPasses:
        return CapturedMtp(head, kv, GraphLimits(max_rows, 64, 60), recorder)

    mtp = drafter(hybrid, width, top_k, make_passes=captured)
    compare(hybrid, mtp)
    assert mtp.num_different == 0
    assert recorder.num_replays > (0 if max_rows < width else 20)


class TokensOffByOne(MtpDrafter):
    """A row is put together with its own token instead of the next one."""

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        shifted = [replace(item, next_token_ids=[0, *item.next_token_ids[:-1]]) for item in rows]
        super().observe(shifted)


class PositionsOffByOne(MtpDrafter):
    """The KV of position i is written at i + 1."""

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        for item in rows:
            track = self._tracks[item.key]
            if track.num_written == 0 and not track.pending:
                track.num_written = 1
        super().observe([replace(item, start=item.start + 1) for item in rows])

    def _is_in_step(self, context: DraftContext) -> bool:
        return self._tracks[context.key].num_rows == len(context.token_ids)


class HiddenOfAnotherRow(MtpDrafter):
    """All rows of a round get the hidden state of its first, as if nothing after the anchor had been accepted."""

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        super().observe([replace(item, hidden=item.hidden[:1].expand_as(item.hidden)) for item in rows])


@pytest.mark.parametrize("broken", [TokensOffByOne, PositionsOffByOne, HiddenOfAnotherRow])
def test_the_comparison_sees_the_bug(hybrid: Path, broken: type[MtpDrafter]) -> None:
    mtp = drafter(hybrid, 1, 1, broken)
    compare(hybrid, mtp)
    assert mtp.num_different > mtp.num_compared / 10


def test_a_round_that_keeps_no_row_leaves_the_drafts_as_they_are(hybrid: Path) -> None:
    """It once shifted the outputs of all sequences that were written with it, and the drafter was left out for good."""
    torch.manual_seed(0)
    tokens = [list(range(1, 9)), list(range(9, 14))]
    proposals = []
    for has_empty_rows in (False, True):
        compared = drafter(hybrid, 1, 1)
        mtp, decoder = compared.inner, compared.reference.head.decoder
        row = torch.ones(decoder.config.hidden_size, dtype=kernels.row_dtype(decoder.device), device=decoder.device)
        contexts = []
        for key, token_ids in enumerate(tokens):
            mtp.begin(key)
            hidden = (0.1 * (key + 1) * row).repeat(len(token_ids) - 1, 1)
            mtp.observe([CommittedRows(key, 0, hidden, token_ids[1:], [key])])
            if has_empty_rows:
                mtp.observe([CommittedRows(key, len(token_ids) - 1, hidden[:0], [], [key])])
                mtp.kept(key)
                mtp.observe([CommittedRows(key, len(token_ids) - 1, hidden[:0], [], [key])])
            contexts.append(DraftContext(key, token_ids, len(token_ids), [key], max_nodes=4, max_depth=4))
        proposals.append(mtp.propose(contexts))
    assert proposals[0] == proposals[1]
    assert all(proposal.token_ids for proposal in proposals[0])
