# SPDX-License-Identifier: Apache-2.0
"""The prefix cache's index and its eviction, on blocks of four tokens and states of a number each."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from tandem_backend.engine.cache.prefix_cache import PrefixCache
from tandem_backend.engine.pools import IndexPool
from tandem_backend.engine.sequence import Sequence as EngineSequence
from tandem_backend.model.state import KVLayer, ModelState, RecurrentLayer, SlotState

BLOCK = 4
NUM_BLOCKS = 64
ANCHOR_BYTES = 8  # conv and delta of one float32 each
BLOCK_BYTES = 2 * BLOCK * 4


class Memory:
    """A model of one attention and, if it is a hybrid, one delta layer. A token's KV row and state are its prefix."""

    def __init__(self, *, hybrid: bool = True, max_bytes: int = 1 << 20, **options: object) -> None:
        kv = KVLayer(torch.full((NUM_BLOCKS, 1, BLOCK, 1), -1.0), torch.full((NUM_BLOCKS, 1, BLOCK, 1), -1.0))
        recurrent = RecurrentLayer(torch.zeros(2, 1), torch.zeros(2, 1))
        self.state = ModelState((kv, recurrent) if hybrid else (kv,), BLOCK)
        self.kv = kv
        self.blocks = IndexPool(NUM_BLOCKS)
        self.drafter_kv = KVLayer(torch.full_like(kv.keys, -1.0), torch.full_like(kv.keys, -1.0))
        self.cache = PrefixCache(
            self.state,
            self.blocks,
            drafter_kv=[self.drafter_kv],
            block_bytes=BLOCK_BYTES,
            max_bytes=max_bytes,
            grid=0,
            **options,  # type: ignore[arg-type]
        )
        self.numbers: dict[tuple[int, ...], float] = {}

    def number(self, prefix: Sequence[int]) -> float:
        """Stands for the state after a prefix; every prefix has another."""
        return self.numbers.setdefault(tuple(prefix), float(len(self.numbers)))

    def write(self, sequence: EngineSequence) -> None:
        """Compute all tokens of a sequence that are not computed yet."""
        for position in range(sequence.num_computed, len(sequence.token_ids)):
            if position // BLOCK == len(sequence.block_table):
                sequence.block_table.append(self.blocks.allocate())
            block = sequence.block_table[position // BLOCK]
            self.kv.keys[block, 0, position % BLOCK] = self.number(sequence.token_ids[: position + 1])
        sequence.num_computed = len(sequence.token_ids)
        if self.state.has_recurrent_layers:
            self.state.layers[1].conv[sequence.slot] = self.number(sequence.token_ids)  # type: ignore[union-attr]

    def free(self, sequence: EngineSequence) -> None:
        while sequence.block_table:
            self.blocks.release(sequence.block_table.pop())

    def add(
        self, token_ids: Sequence[int], tenant: str = "", num_drafter_rows: int = 0, at: int | None = None
    ) -> EngineSequence:
        """A sequence from nothing, kept after `at` tokens; the caller frees it."""
        sequence = EngineSequence(slot=0, tenant=tenant, token_ids=list(token_ids))
        self.write(sequence)
        prefix = tuple(token_ids[:at])
        state = SlotState((torch.tensor([self.number(prefix)]), torch.tensor([0.0])))
        if not self.state.has_recurrent_layers:
            state = SlotState(())
        hidden = torch.tensor([[self.number(prefix)]]) if num_drafter_rows else None
        self.cache.add(tenant, prefix, sequence.block_table, state, hidden, num_drafter_rows)
        return sequence

    def keep(self, token_ids: Sequence[int], tenant: str = "", num_drafter_rows: int = 0) -> None:
        self.free(self.add(token_ids, tenant, num_drafter_rows))

    def resume(self, token_ids: Sequence[int], tenant: str = "", *, with_drafter: bool = False) -> int:
        """Resume, check every restored row and state, free; returns the position."""
        match = self.cache.find(tenant, token_ids, with_drafter=with_drafter)
        if match is None:
            return 0
        sequence = EngineSequence(slot=1, token_ids=list(token_ids))
        self.cache.resume(match, sequence)
        self.check(sequence)
        self.free(sequence)
        return match.position

    def check(self, sequence: EngineSequence) -> None:
        for position in range(sequence.num_computed):
            row = self.kv.keys[sequence.block_table[position // BLOCK], 0, position % BLOCK, 0]
            assert row == self.number(sequence.token_ids[: position + 1])
        if self.state.has_recurrent_layers:
            conv = self.state.layers[1].conv  # type: ignore[union-attr]
            assert conv[sequence.slot, 0] == self.number(sequence.token_ids[: sequence.num_computed])

    def check_integrity(self, *sequences: EngineSequence) -> None:
        self.cache.check_integrity()
        cached = [node.block for node in self.cache.index.nodes()]
        self.blocks.check_integrity([*cached, *(block for s in sequences for block in s.block_table)])


def test_the_longest_anchor_is_found_and_blocks_are_shared_up_to_it() -> None:
    memory = Memory()
    memory.keep(range(10))
    memory.keep(range(6))
    assert memory.resume([*range(10), 99]) == 10
    assert memory.resume([*range(9), 99, 99, 99]) == 6
    assert memory.resume([0, 1, 99]) == 0
    assert memory.resume(range(10)) == 6  # its own last token must be computed
    assert memory.cache.index.num_nodes == 3
    memory.check_integrity()


def test_without_recurrent_state_every_token_boundary_is_usable() -> None:
    memory = Memory(hybrid=False)
    memory.keep(range(10))
    assert [memory.resume([*range(n), 99, 99]) for n in range(1, 11)] == list(range(1, 11))
    assert memory.resume(range(10)) == 9


def test_who_resumes_in_the_middle_of_a_block_does_not_disturb_who_fills_it() -> None:
    memory = Memory()
    owner = memory.add(range(6))
    match = memory.cache.find("", [*range(6), 50, 51], with_drafter=False)
    assert match is not None
    branch = EngineSequence(slot=1, token_ids=[*range(6), 50, 51])
    memory.cache.resume(match, branch)
    owner.token_ids += [6, 7]
    memory.write(owner)
    memory.write(branch)
    memory.check(branch)
    assert memory.resume([*range(6), 99]) == 6
    assert owner.block_table[0] == branch.block_table[0]
    assert owner.block_table[1] != branch.block_table[1]
    memory.check_integrity(owner, branch)


def test_a_longer_prefix_takes_the_place_of_the_one_that_it_begins_with() -> None:
    memory = Memory()
    memory.keep(range(5))
    memory.keep(range(7))
    memory.keep(range(6))
    assert memory.cache.index.num_nodes == 2
    assert [memory.resume([*range(n), 99]) for n in (5, 6, 7)] == [5, 6, 7]
    memory.check_integrity()


def test_tenants_do_not_see_each_other() -> None:
    memory = Memory()
    memory.keep(range(8), tenant="a")
    assert memory.resume([*range(8), 9], tenant="b") == 0
    assert memory.resume([*range(8), 9], tenant="a") == 8
    memory.check_integrity()


@pytest.mark.parametrize("hybrid", [True, False])
def test_a_hash_collision_restores_nothing_wrong(hybrid: bool) -> None:
    """All blocks hash alike: tokens are compared one by one."""
    memory = Memory(hybrid=hybrid, hash_tokens=lambda token_ids: 7)
    prompts = [[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 2, 3, 9, 5, 6, 7, 8], [9, 1, 2, 3, 4, 5, 6, 7, 8]]
    for prompt in prompts:
        memory.keep(prompt)
    assert [memory.resume([*prompt, 1]) for prompt in prompts] == [9, 9, 9]
    assert memory.resume([9, 9, 2, 3, 4, 5, 6, 7, 8]) == (0 if hybrid else 1)
    memory.check_integrity()


def test_a_collision_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails where the comparison of tokens is left out."""
    from tandem_backend.engine.cache.radix import RadixIndex

    def trusting(self: RadixIndex, node: object, token_ids: tuple[int, ...]) -> object:
        return next(iter(node.children.get(self._hash(token_ids), ())), None)  # type: ignore[attr-defined]

    monkeypatch.setattr(RadixIndex, "_child", trusting)
    memory = Memory(hash_tokens=lambda token_ids: 7)
    memory.keep([0, 1, 2, 3, 4, 5, 6, 7])
    with pytest.raises(AssertionError):
        memory.resume([9, 1, 2, 3, 4, 5, 6, 7, 8])


def test_a_block_drafter_resumes_only_where_its_rows_are() -> None:
    memory = Memory()
    memory.keep(range(6))
    memory.keep([*range(8), 8, 9], num_drafter_rows=9)
    assert memory.resume([*range(8), 8, 9, 99], with_drafter=True) == 10
    assert memory.resume([*range(7), 99], with_drafter=True) == 0  # position 6 was kept without them
    assert memory.resume([*range(7), 99]) == 6
    memory.check_integrity()


def test_rows_of_a_block_drafter_replace_blocks_without_them() -> None:
    memory = Memory()
    memory.keep(range(10))
    assert memory.resume([*range(10), 99], with_drafter=True) == 0
    memory.keep(range(10), num_drafter_rows=9)
    assert memory.resume([*range(10), 99], with_drafter=True) == 10
    assert memory.cache.num_anchors == 1
    memory.check_integrity()


def positions(memory: Memory) -> list[tuple[int, int]]:
    """First token and length of each kept prefix."""
    return sorted((anchor.token_ids()[0], anchor.position) for anchor in memory.cache.anchors())


def conversation(memory: Memory, first: int, ends: Sequence[int]) -> None:
    tokens = [first, *range(1, 100)]
    for end in ends:
        memory.keep(tokens[:end])


def test_the_budget_holds_and_the_least_recently_used_conversation_goes_first() -> None:
    each = 2 * BLOCK_BYTES + ANCHOR_BYTES
    memory = Memory(max_bytes=3 * each)
    for first in (10, 20, 30):
        conversation(memory, first, [8])
    assert memory.resume([10, *range(1, 9)]) == 8
    conversation(memory, 40, [8])
    assert positions(memory) == [(10, 8), (30, 8), (40, 8)]
    assert memory.cache.counters.num_evictions == 1
    memory.check_integrity()


def test_older_anchors_of_a_conversation_go_before_its_newest() -> None:
    """Also where the newest is the one that is the cheapest to compute again."""
    memory = Memory(max_bytes=4 * BLOCK_BYTES + 3 * ANCHOR_BYTES)
    conversation(memory, 10, [4, 8, 12, 13, 14])
    assert positions(memory)[1:] == [(10, 13), (10, 14)]
    assert memory.cache.num_anchors == 3
    memory.check_integrity()


def test_what_saves_fewer_tokens_by_byte_goes_before_what_is_older() -> None:
    memory = Memory(max_bytes=4 * BLOCK_BYTES + 2 * ANCHOR_BYTES)
    conversation(memory, 10, [12])
    conversation(memory, 20, [3])
    conversation(memory, 30, [4])
    assert positions(memory) == [(10, 12), (30, 4)]
    memory.check_integrity()


def test_room_is_made_from_what_nobody_runs_on() -> None:
    memory = Memory()
    running = memory.add(range(8))
    for first in (10, 20):
        conversation(memory, first, [4, 8])
    match = memory.cache.find("", [20, *range(1, 9)], with_drafter=False)
    assert memory.cache.make_room(NUM_BLOCKS - 4, match)
    assert positions(memory) == [(0, 8), (20, 4), (20, 8)]
    assert not memory.cache.make_room(NUM_BLOCKS - 3, match)
    assert memory.cache.make_room(NUM_BLOCKS - 2, None)
    assert positions(memory) == [(0, 8)]
    memory.check_integrity(running)


def test_evicted_anchors_are_shown_while_their_bytes_are_there() -> None:
    seen: list[tuple[list[int], list[float]]] = []

    def look(anchor) -> None:  # type: ignore[no-untyped-def]
        rows = [memory.kv.keys[block, 0, :, 0].tolist() for block in anchor.block_ids()]
        seen.append((anchor.token_ids(), [row for part in rows for row in part][: anchor.position]))

    memory = Memory(on_evict=look)
    memory.keep([5, 6, 7, 8, 9])
    assert memory.cache.make_room(NUM_BLOCKS, None)
    assert seen == [([5, 6, 7, 8, 9], [memory.number([5, 6, 7, 8, 9][:n]) for n in range(1, 6)])]


def test_clearing_forgets_all() -> None:
    memory = Memory()
    running = memory.add(range(8))
    memory.keep([5, 6], tenant="a")
    assert memory.cache.clear() == 2
    assert (memory.cache.num_bytes, memory.cache.num_anchors) == (0, 0)
    assert memory.resume([*range(8), 9]) == 0
    memory.check_integrity(running)


@given(
    prompt=st.integers(1, 40),
    chunks=st.lists(st.integers(1, 9), min_size=30, max_size=30),
    grid=st.sampled_from([0, 7]),
)
@settings(max_examples=50, deadline=None)
def test_anchor_positions_do_not_depend_on_chunks(prompt: int, chunks: list[int], grid: int) -> None:
    memory = Memory()
    memory.cache.grid = grid
    found, start = [], 0
    for chunk in chunks:
        found += memory.cache.anchor_positions(start, start + chunk, prompt)
        start += chunk
    expected = {p for p in range(1, start + 1) if (grid and p % grid == 0) or p == prompt - 1}
    assert found == sorted(expected)


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class IndexWalk(RuleBasedStateMachine):
    """Any mix of keeping, resuming and evicting against a list of what was kept."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(max_bytes=10 * BLOCK_BYTES + 5 * ANCHOR_BYTES)
        self.live: list[EngineSequence] = []

    def kept(self, tenant: str) -> list[list[int]]:
        return [anchor.token_ids() for anchor in self.memory.cache.anchors() if anchor.tenant == tenant]

    @rule(token_ids=TOKENS, tenant=st.sampled_from(["", "a"]), rows=st.sampled_from([0, 20]), lives=st.booleans())
    def keep(self, token_ids: list[int], tenant: str, rows: int, lives: bool) -> None:
        if self.memory.blocks.num_free >= 4:
            sequence = self.memory.add(token_ids, tenant, rows)
            if lives:
                self.live.append(sequence)
            else:
                self.memory.free(sequence)
        self.check()

    @rule(token_ids=TOKENS, tenant=st.sampled_from(["", "a"]))
    def resume(self, token_ids: list[int], tenant: str) -> None:
        usable = [len(k) for k in self.kept(tenant) if len(k) < len(token_ids) and token_ids[: len(k)] == k]
        assert self.memory.resume(token_ids, tenant) == max(usable, default=0)
        self.check()

    @rule(data=st.data(), added=TOKENS)
    def extend(self, data: st.DataObject, added: list[int]) -> None:
        if self.live and self.memory.blocks.num_free >= 4:
            sequence = data.draw(st.sampled_from(self.live))
            if len(sequence.token_ids) < 28:
                sequence.token_ids += added
                self.memory.write(sequence)
                state = SlotState((torch.tensor([self.memory.number(sequence.token_ids)]), torch.tensor([0.0])))
                self.memory.cache.add(sequence.tenant, sequence.token_ids, sequence.block_table, state, None, 0)
        self.check()

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.live:
            sequence = data.draw(st.sampled_from(self.live))
            self.live.remove(sequence)
            self.memory.free(sequence)
        self.check()

    @rule(num_blocks=st.integers(1, 6))
    def make_room(self, num_blocks: int) -> None:
        wanted = min(self.memory.blocks.num_free + num_blocks, NUM_BLOCKS)
        if self.memory.cache.make_room(wanted, None):
            assert self.memory.blocks.num_free >= wanted
        else:
            owned = {block for sequence in self.live for block in sequence.block_table}
            assert self.memory.blocks.num_free == NUM_BLOCKS - len(owned | self.cached_blocks())
        self.check()

    def cached_blocks(self) -> set[int]:
        return {node.block for node in self.memory.cache.index.nodes()}

    def check(self) -> None:
        self.memory.check_integrity(*self.live)


def test_any_mix_of_calls_finds_exactly_what_is_kept() -> None:
    run_state_machine_as_test(IndexWalk, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))
