# SPDX-License-Identifier: Apache-2.0
"""Taking anchors: a round's commit, stopped wherever the prefix cache wants the recurrent state of a sequence.

Commit replays rows one by one, so it may stop after any of them: anchors depend neither on chunks nor on drafts.
"""

from collections.abc import Sequence as Rows
from dataclasses import dataclass

from torch import Tensor

from tandem_backend.engine.cache.prefix_cache import PrefixCache
from tandem_backend.engine.drafting import Drafting
from tandem_backend.engine.scheduler import ScheduledRows
from tandem_backend.engine.sequence import Sequence
from tandem_backend.model.batch import RowBatch
from tandem_backend.model.decoder import ForwardResult
from tandem_backend.model.passes import Passes
from tandem_backend.model.state import ModelState, SlotState


@dataclass(frozen=True, slots=True)
class Taken:
    """A sequence's state after `position` tokens, on its way into the cache."""

    sequence: Sequence
    position: int
    state: SlotState
    hidden: Tensor  # [1, hidden_size], the target's at the last of them


@dataclass(frozen=True, slots=True)
class AnchorTaker:
    passes: Passes
    state: ModelState
    drafting: Drafting
    cache: PrefixCache

    def commit(
        self, result: ForwardResult, batch: RowBatch, scheduled: Rows[ScheduledRows], paths: Rows[Rows[int]]
    ) -> list[Taken]:
        """Commit the paths, whose rows the sequences count as computed already."""
        cuts = [self._cuts(*item) for item in zip(scheduled, paths, strict=True)]
        if not any(cuts):
            self.passes.commit(result, batch, paths)
            return []
        taken: list[Taken] = []
        done = [0] * len(paths)
        while done != [len(path) for path in paths]:
            # Everyone up to the next place where its state is wanted, or to its end.
            ends = [
                next((cut for cut in wanted if cut > first), len(path))
                for wanted, first, path in zip(cuts, done, paths, strict=True)
            ]
            parts = [path[first:end] for path, first, end in zip(paths, done, ends, strict=True)]
            self.passes.commit(result, batch, parts, done)
            for i, (first, end) in enumerate(zip(done, ends, strict=True)):
                if end > first and end in cuts[i]:
                    row = batch.starts[i] + paths[i][end - 1]
                    taken.append(self._take(scheduled[i], len(paths[i]) - end, result.hidden[row : row + 1]))
            done = ends
        return taken

    def keep(self, taken: Rows[Taken]) -> None:
        """Give them to the cache, once the drafters have seen the round."""
        for item in taken:
            sequence = item.sequence
            num_rows, _ = self.drafting.kept(sequence.slot)
            prefix = sequence.token_ids[: item.position]
            self.cache.add(sequence.tenant, prefix, sequence.block_table, item.state, item.hidden, num_rows)

    def keep_end(self, sequence: Sequence) -> None:
        """Give a sequence's state as it is to the cache."""
        if self.cache.is_on and sequence.num_computed:
            num_rows, hidden = self.drafting.kept(sequence.slot)
            self.cache.add(
                sequence.tenant,
                sequence.token_ids[: sequence.num_computed],
                sequence.block_table,
                lambda: self.state.copy_slot(sequence.slot),
                hidden if num_rows == sequence.num_computed else None,
                num_rows,
            )

    def _cuts(self, rows: ScheduledRows, path: Rows[int]) -> list[int]:
        """After how many of the path's rows an anchor is taken."""
        end = rows.generation.sequence.num_computed
        start = end - len(path)
        wanted = self.cache.anchor_positions(start, end, rows.generation.stats.num_prompt_tokens)
        return [position - start for position in wanted]

    def _take(self, rows: ScheduledRows, num_left: int, hidden: Tensor) -> Taken:
        sequence = rows.generation.sequence
        state = self.state.copy_slot(sequence.slot)
        return Taken(sequence, sequence.num_computed - num_left, state, hidden.clone())
