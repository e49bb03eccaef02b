# SPDX-License-Identifier: Apache-2.0
"""Random walks of conversations that share, extend, branch, end and come back, while memory is short.

Sometimes the engine is shut down, or dies, and begins anew over what is on disk. After every step each live sequence's
KV rows, recurrent states and conv tails are held to a cold computation, bit for bit, and at the end every cached prefix
and every logits row.
"""

import tempfile
from itertools import count
from pathlib import Path

from cold_state import ColdStates
from engine_driver import EngineDriver, Plain, Result, beginning, engine_config, limit_blocks, live_sequences
from engine_driver import num_different as num_different_rows
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from tandem_backend.config import MIB
from tandem_backend.engine.drafters.scripted import ScriptedDrafter
from tandem_backend.types import FinishReason, Prompt, Request, SamplingParams

NUM_BLOCKS, MAX_CONTEXT = 8, 256
MAX_BYTES = 250_000  # about ten anchors with their blocks
SHARED = (tuple(range(3, 31)) * 3, (7,) * 66, (3, 4, 5))
ADDED = st.lists(st.integers(3, 8), min_size=1, max_size=20).map(tuple)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 12),
    ignore_eos=st.just(True),
    drafter=st.sampled_from([None, "none", "half", "half+mtp"]),
)


class CacheWalk(RuleBasedStateMachine):
    hybrid: Path
    plain: Plain
    cold: ColdStates

    def __init__(self) -> None:
        super().__init__()
        self.ids = (str(n) for n in count())
        self.texts: list[tuple[int, ...]] = list(SHARED)  # prompts, and prompts with their answers
        self.folder = tempfile.TemporaryDirectory()
        self.restart()

    @rule(is_killed=st.booleans())
    def restart(self, is_killed: bool = False) -> None:
        """What ran is forgotten; what was on disk is found again, and what was in memory unless it was killed."""
        if hasattr(self, "driver"):
            self.check_results()
            if is_killed:
                self.tier.close()
            else:
                self.engine.close()
        config = engine_config(
            self.hybrid,
            drafters=("lookup", "mtp"),
            router="always",
            max_active=3,
            max_sessions=1,
            max_context_len=MAX_CONTEXT,
            max_prefill_rows=40,
            joint_prefill_rows=9,
            prefix_cache_bytes=MAX_BYTES,
            anchor_grid=16,
            disk_cache=Path(self.folder.name),
            disk_cache_bytes=2 * MIB,
        )
        extra = {"half": ScriptedDrafter("half", self.plain.continuation, self.plain.vocab_size)}
        self.driver = EngineDriver(config, extra, poison=True)
        self.engine = self.driver.engine
        limit_blocks(self.engine, NUM_BLOCKS)
        assert self.engine.spill is not None
        self.tier = self.engine.spill.tier
        assert self.tier.files.is_owner
        self.prompts: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}

    def submit(self, text: tuple[int, ...], params: SamplingParams, salt: str = "") -> None:
        request_id = next(self.ids)
        text = text[: MAX_CONTEXT - 20]
        self.prompts[request_id] = (text, params)
        prompt = Prompt(token_ids=text)
        self.driver.add(Request(request_id=request_id, prompt=prompt, params=params, cache_salt=salt))

    @rule(data=st.data(), params=PARAMS, salt=st.sampled_from(["", "", "", "other"]))
    def submit_again(self, data: st.DataObject, params: SamplingParams, salt: str) -> None:
        self.submit(data.draw(st.sampled_from(self.texts)), params, salt)

    @rule(data=st.data(), params=PARAMS, added=ADDED)
    def extend(self, data: st.DataObject, params: SamplingParams, added: tuple[int, ...]) -> None:
        self.submit((*data.draw(st.sampled_from(self.texts)), *added), params)

    @rule(data=st.data(), params=PARAMS, added=ADDED)
    def branch(self, data: st.DataObject, params: SamplingParams, added: tuple[int, ...]) -> None:
        text = data.draw(st.sampled_from(self.texts))
        self.submit((*text[: data.draw(st.integers(0, len(text)))], *added), params)

    @precondition(lambda self: self.engine.has_work())
    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        for _ in range(times):
            outputs = self.driver.step()
            assert self.tier.settle(60)  # a walk is repeated step by step: what is on disk is no matter of time
            for output in outputs:
                if output.is_last:
                    prompt, _ = self.prompts[output.request_id]
                    self.texts.append((*prompt, *self.driver.results[output.request_id].token_ids))
            for sequence in live_sequences(self.engine):
                assert self.cold.num_different(self.engine.rounds.state, sequence) == 0

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.engine.cancel(data.draw(st.sampled_from(list(self.prompts)[-4:])))
        assert self.tier.settle(60)
        self.engine.scheduler.check_integrity()

    @rule(num_blocks=st.integers(1, 3))
    def evict(self, num_blocks: int) -> None:
        self.engine.scheduler.cache.make_room(self.engine.scheduler.blocks.num_free + num_blocks, None)
        assert self.tier.settle(60)
        self.engine.scheduler.check_integrity()

    @rule()
    def forget(self) -> None:
        """Memory is cleared, and what is asked next may be on disk."""
        self.engine.scheduler.cache.clear()
        self.engine.scheduler.check_integrity()

    @rule()
    def flush(self) -> None:
        """All of memory goes to disk, and stays in memory."""
        assert self.engine.spill is not None
        for anchor in self.engine.scheduler.cache.anchors():
            self.engine.spill.keep(anchor)
        assert self.tier.settle(60)
        self.engine.scheduler.check_integrity()

    def teardown(self) -> None:
        self.driver.finish()
        assert self.cold.num_wrong_anchors(self.engine) == 0
        self.check_results()
        self.engine.scheduler.cache.clear()
        assert self.engine.scheduler.blocks.num_free == NUM_BLOCKS
        assert self.tier.statistics()["disk_cache_write_errors_total"] == 0
        assert self.tier.statistics()["disk_cache_bad_files_total"] == 0
        self.tier.close()
        self.folder.cleanup()

    def check_results(self) -> None:
        for request_id, (prompt, params) in self.prompts.items():
            result: Result = self.driver.results[request_id]
            assert result.error is None
            reference = self.plain.run(prompt, params)
            if result.finish_reason in (None, FinishReason.CANCELLED):
                reference = beginning(reference, len(result.token_ids))
            assert num_different_rows(result, reference) == 0


def test_whatever_is_restored_is_the_cold_state(hybrid: Path, plain: Plain) -> None:
    cold = ColdStates(hybrid, MAX_CONTEXT, num_rows=MAX_CONTEXT)
    walk = type("CacheWalk", (CacheWalk,), {"hybrid": hybrid, "plain": plain, "cold": cold})
    run_state_machine_as_test(walk, settings=settings(max_examples=12, stateful_step_count=30, deadline=None))
