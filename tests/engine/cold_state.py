# SPDX-License-Identifier: Apache-2.0
"""States computed anew, to hold restored ones to."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from tandem_backend.engine import Engine
from tandem_backend.engine.sequence import Sequence as EngineSequence
from tandem_backend.model.batch import SequenceRows, build_batch
from tandem_backend.model.decoder import Decoder
from tandem_backend.model.state import KV_BLOCK, KVLayer, ModelState, allocate_state
from torch import Tensor


def state_of(state: ModelState, sequence: EngineSequence) -> list[Tensor]:
    """Copies of a sequence's KV rows, conv tails and recurrent states, layer by layer."""
    places = torch.arange(sequence.num_computed)
    blocks = torch.tensor(sequence.block_table, dtype=torch.int64)[places // state.block]
    parts: list[Tensor] = []
    for layer in state.layers:
        if isinstance(layer, KVLayer):
            parts += [part[blocks, :, places % state.block].clone() for part in (layer.keys, layer.values)]
        else:
            parts += [part[sequence.slot].clone() for part in (layer.conv, layer.delta)]
    return parts


class ColdStates:
    """Of one checkpoint; what was computed once is remembered. `num_rows` tokens a pass."""

    def __init__(self, checkpoint: Path, max_len: int, num_rows: int = 1) -> None:
        self.num_rows = num_rows
        self.decoder = Decoder(checkpoint)
        self.blocks = range(-(-max_len // KV_BLOCK))
        self.after = cache(self._after)

    def _after(self, token_ids: tuple[int, ...]) -> list[Tensor]:
        state = allocate_state(self.decoder.config, len(self.blocks), 1)
        for start in range(0, len(token_ids), self.num_rows):
            chunk = token_ids[start : start + self.num_rows]
            batch = build_batch([SequenceRows(chunk, start, 0, self.blocks, logit_rows=[])])
            self.decoder.commit(self.decoder.forward(batch, state), batch, [range(len(chunk))], state)
        sequence = EngineSequence(slot=0, num_computed=len(token_ids), block_table=list(self.blocks))
        return state_of(state, sequence)

    def num_different(self, state: ModelState, sequence: EngineSequence) -> int:
        """Tensors of a sequence's state that are not those of its tokens, bit for bit."""
        cold = self.after(tuple(sequence.token_ids[: sequence.num_computed]))
        return sum(not equal_bits(a, b) for a, b in zip(state_of(state, sequence), cold, strict=True))

    def num_wrong_anchors(self, engine: Engine) -> int:
        """Cached prefixes whose KV or recurrent state is not that of their tokens. Needs a free slot."""
        state, slots, num_wrong = engine.rounds.state, engine.scheduler.slots, 0
        slot = slots.allocate()
        for anchor in engine.scheduler.cache.anchors():
            state.restore_slot(slot, anchor.state)
            sequence = EngineSequence(
                slot=slot,
                token_ids=anchor.token_ids(),
                num_computed=anchor.position,
                block_table=anchor.block_ids(),
            )
            num_wrong += self.num_different(state, sequence) > 0
        slots.release(slot)
        return num_wrong


def equal_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def tokens(seed: int, count: int, vocab: int = 31) -> Sequence[int]:
    """Tokens that no other seed begins with alike for long."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (count,), generator=generator).tolist()  # type: ignore[no-any-return]
