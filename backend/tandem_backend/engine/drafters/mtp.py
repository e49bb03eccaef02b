# SPDX-License-Identifier: Apache-2.0
"""The `mtp` drafter: chains or trees from the checkpoint's own head, with its own KV beside the target's blocks.

Its KV at position i belongs to (target's hidden state i, token i + 1). Rows that the target committed are kept until
the next draft and then written in one pass; a draft's own rows are dropped with it, so nothing is ever taken back.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem_backend.engine.account import NUM_LOOKED_BACK
from tandem_backend.engine.drafters.base import CommittedRows, DraftContext, Proposal
from tandem_backend.model.mtp import mtp_rows
from tandem_backend.model.mtp_passes import MtpPasses
from tandem_backend.model.state import KVLayer

PROMPT_ROWS = 32  # a round that commits so many holds prompt rows, which are written at once
MAX_PENDING_ROWS = 256


@dataclass(slots=True)
class _Track:
    """What is known of one sequence: KV for `num_written` positions, then rows that wait."""

    num_written: int = 0
    num_pending: int = 0
    pending: list[CommittedRows] = field(default_factory=list)
    outputs: Tensor | None = None  # [rows, hidden_size], at the last positions, those of the last write
    hidden: Tensor | None = None  # [1, hidden_size], the target's at the same position

    @property
    def num_rows(self) -> int:
        return self.num_written + self.num_pending

    def wait(self, rows: CommittedRows) -> None:
        self.pending.append(rows)
        self.num_pending += len(rows.next_token_ids)

    def written(self, outputs: Tensor) -> None:
        """All waiting rows are; outputs: [rows, hidden_size] at the last of them."""
        self.num_written += self.num_pending
        # Its own: beside the rows that others of the pass kept it would hold them all.
        self.num_pending, self.outputs, self.hidden = 0, outputs, self.pending[-1].hidden[-1:].clone()
        self.pending.clear()


@dataclass(slots=True)
class _Draft:
    """A proposal while it grows."""

    context: DraftContext
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    paths: list[float] = field(default_factory=list)  # product of the scores down to each node
    depths: list[int] = field(default_factory=list)
    looked_back: list[tuple[float, bool]] = field(default_factory=list)

    def add_children(self, parent: int, token_ids: Sequence[int], scores: Sequence[float]) -> None:
        for token_id, score in zip(token_ids, scores, strict=True):
            if len(self.token_ids) < self.context.max_nodes:
                self.add(parent, token_id, score)

    def look_back(self, token_ids: Sequence[int], scores: Sequence[float]) -> None:
        """Compare guesses at the latest known tokens with these."""
        known = self.context.token_ids[len(self.context.token_ids) - len(token_ids) :]
        self.looked_back = [(score, a == b) for a, b, score in zip(token_ids, known, scores, strict=True)]

    def add(self, parent: int, token_id: int, score: float) -> None:
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.scores.append(score)
        self.paths.append(score * (self.paths[parent] if parent >= 0 else 1.0))
        self.depths.append(self.depths[parent] + 1 if parent >= 0 else 1)

    def expandable(self, first: int, width: int, step_ms: float) -> list[int]:
        """The best of the nodes from `first` on whose next token is likely enough to pay for another step."""
        context = self.context
        if len(self.token_ids) >= context.max_nodes:
            return []
        paths, drafted_ms = sum(self.paths), len(self.paths) * context.row_ms + self.depths[-1] * step_ms
        nodes = [
            node
            for node in range(first, len(self.token_ids))
            if self.depths[node] < context.max_depth
            and context.pays(self.paths[node], paths, drafted_ms, context.row_ms + step_ms)
        ]
        return sorted(nodes, key=lambda node: -self.paths[node])[:width]


class MtpDrafter:
    """`top_k` children a node, the best `width` nodes of a depth expanded; width 1 and top_k 1 make a chain."""

    name = "mtp"

    def __init__(self, passes: MtpPasses, kv: KVLayer, block: int, *, width: int, top_k: int) -> None:
        """kv: what the passes read and write."""
        self.passes, self.kv, self.block = passes, kv, block
        self.width, self.top_k = width, top_k
        self._tracks: dict[int, _Track] = {}
        self._step_ms = 0.0  # running time of one depth, for all sequences together

    def begin(self, key: int) -> None:
        self._tracks[key] = _Track()

    def end(self, key: int) -> None:
        self._tracks.pop(key, None)

    def kv_layers(self) -> list[KVLayer]:
        return [self.kv]

    def kept(self, key: int) -> tuple[int, Tensor | None]:
        track = self._tracks.get(key)
        if track is None:
            return 0, None
        if track.pending:
            self._write_pending([track])
        return track.num_written, track.hidden

    def resume(self, key: int, position: int, hidden: Tensor, next_token_id: int, block_table: Sequence[int]) -> None:
        last = CommittedRows(key, position - 1, hidden, [next_token_id], block_table)
        self._tracks[key] = _Track(num_written=position - 1)
        self._tracks[key].wait(last)

    def observe(self, rows: Sequence[CommittedRows]) -> None:
        full = []
        for item in rows:
            track = self._tracks.get(item.key)
            if track is None or track.num_rows != item.start:
                continue  # rows before these were never seen: this sequence can't be drafted for
            if not item.next_token_ids:
                continue  # a round may keep no row of a request that it ends
            track.wait(item)
            if len(item.next_token_ids) >= PROMPT_ROWS or track.num_pending >= MAX_PENDING_ROWS:
                full.append(track)
        self._write_pending(full)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Proposal]:
        drafts = [_Draft(context) for context in contexts]
        ready = [draft for draft in drafts if self._is_in_step(draft.context)]
        if ready:
            tracks = [self._tracks[draft.context.key] for draft in ready]
            self._write_pending([track for track in tracks if track.pending])
            self._grow(ready, self._begin_drafts(ready, tracks))
        return [
            Proposal(draft.token_ids, draft.parents, draft.scores, looked_back=draft.looked_back) for draft in drafts
        ]

    def _is_in_step(self, context: DraftContext) -> bool:
        track = self._tracks.get(context.key)
        return track is not None and track.num_rows == len(context.token_ids) - 1

    def _write_pending(self, tracks: Sequence[_Track]) -> None:
        """Write the waiting rows' KV and keep the outputs at each sequence's last rows."""
        if not tracks:
            return
        chunks = [rows for track in tracks for rows in track.pending]
        hidden = _joined([rows.hidden for rows in chunks])
        token_ids: list[int] = []
        positions: list[int] = []
        parents: list[int] = []
        row_seqs: list[int] = []
        places: list[int] = []
        ends: list[int] = []
        for seq, track in enumerate(tracks):
            first, count, table = len(parents), track.num_pending, track.pending[-1].block_table
            token_ids.extend(token_id for rows in track.pending for token_id in rows.next_token_ids)
            span = range(track.num_written, track.num_written + count)
            positions.extend(span)
            parents.append(-1)
            parents.extend(range(first, first + count - 1))
            row_seqs.extend([seq] * count)
            places.extend([table[position // self.block] * self.block + position % self.block for position in span])
            ends.append(first + count)
        prefixes = [(track.num_written, track.pending[-1].block_table) for track in tracks]
        self.passes.begin(len(parents), len(parents), max(num_written for num_written, _ in prefixes))
        out = self.passes.run(hidden, mtp_rows(token_ids, positions, parents, row_seqs, prefixes), places)
        for track, end in zip(tracks, ends, strict=True):
            track.written(out[end - min(track.num_pending, NUM_LOOKED_BACK + 1) : end].clone())

    def _begin_drafts(self, drafts: Sequence[_Draft], tracks: Sequence[_Track]) -> Tensor:
        """Add each draft's first nodes, and what it looks back for. Returns the outputs at the anchors."""
        parts: list[Tensor] = []
        for draft, track in zip(drafts, tracks, strict=True):
            assert track.outputs is not None
            parts.append(track.outputs[-1 - draft.context.num_looked_back :])
            track.outputs = track.outputs[-1:]
        ids, scores = self.passes.guess(_joined(parts), self.top_k)
        first = 0
        for draft, part in zip(drafts, parts, strict=True):
            last = first + len(part) - 1
            draft.look_back([row[0] for row in ids[first:last]], [row[0] for row in scores[first:last]])
            draft.add_children(-1, ids[last], scores[last])
            first = last + 1
        return _joined([part[-1:] for part in parts])

    def _grow(self, drafts: Sequence[_Draft], hidden: Tensor) -> None:
        """Expand the drafts depth by depth, all sequences in one pass; hidden is the outputs at the anchors."""
        frontier = [(seq, -1) for seq in range(len(drafts))]
        first = [0] * len(drafts)
        rows_of: dict[tuple[int, int], int] = {}  # (sequence, node) -> its row among the draft's
        seq_of: list[int] = []
        parents: list[int] = []
        prefixes = [(len(draft.context.token_ids) - 1, draft.context.block_table) for draft in drafts]
        while True:
            begun = time.perf_counter()
            parent_rows = {node: row for row, node in enumerate(frontier)}
            step_ms = self._step_ms / len(drafts)
            frontier = [
                (s, n) for s, draft in enumerate(drafts) for n in draft.expandable(first[s], self.width, step_ms)
            ]
            if not frontier:
                return
            if not parents:
                self._begin_passes(drafts, prefixes)
            for seq, node in frontier:
                parent = drafts[seq].parents[node]
                rows_of[seq, node] = len(seq_of)
                parents.append(rows_of[seq, parent] if parent >= 0 else -1)
                seq_of.append(seq)
            sources = [parent_rows[seq, drafts[seq].parents[node]] for seq, node in frontier]
            if sources != list(range(len(hidden))):
                hidden = hidden[sources]
            token_ids = [drafts[seq].token_ids[node] for seq, node in frontier]
            positions = [len(drafts[seq].context.token_ids) + drafts[seq].depths[node] - 2 for seq, node in frontier]
            hidden = self.passes.run(hidden, mtp_rows(token_ids, positions, parents, seq_of, prefixes))
            first = [len(draft.token_ids) for draft in drafts]
            ids, scores = self.passes.guess(hidden, self.top_k)
            for (seq, node), row_ids, row_scores in zip(frontier, ids, scores, strict=True):
                drafts[seq].add_children(node, row_ids, row_scores)
            self._step_ms += 0.1 * (1e3 * (time.perf_counter() - begun) - self._step_ms)

    def _begin_passes(self, drafts: Sequence[_Draft], prefixes: Sequence[tuple[int, Sequence[int]]]) -> None:
        max_rows = sum(draft.context.max_nodes for draft in drafts)
        self.passes.begin(max_rows, len(drafts) * self.width, max(length for length, _ in prefixes))


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]
