# SPDX-License-Identifier: Apache-2.0
"""What an engine says of its requests and of itself."""

from pathlib import Path

import pytest
from engine_driver import VOCAB_SIZE, EngineDriver, Plain, Result, engine_config, num_different
from tandem_backend.engine.drafters.scripted import ScriptedDrafter
from tandem_backend.errors import InvalidRequestError
from tandem_backend.types import Prompt, Request, RequestStats, SamplingParams, acceptance_len

PROMPT = (3, 1, 4, 1, 5)
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)


def stats_of(result: Result) -> RequestStats:
    assert result.stats is not None
    return result.stats


def test_rounds_and_acceptance_length_of_a_chunked_prompt(hybrid: Path, plain: Plain) -> None:
    oracle = ScriptedDrafter("oracle", plain.continuation, plain.vocab_size)
    config = engine_config(hybrid, router="always", max_prefill_rows=2, max_draft_tokens=2, prefix_cache_bytes=0)
    driver = EngineDriver(config, {"oracle": oracle})
    drafted = stats_of(
        driver.run(
            Request(
                request_id="1",
                prompt=Prompt(token_ids=PROMPT),
                params=SamplingParams(max_tokens=10, ignore_eos=True, drafter="oracle"),
            )
        )
    )
    # The prompt's three chunks, the last of which gives a token, then three rounds of three.
    assert (drafted.num_rounds, drafted.num_decode_rounds, drafted.acceptance_len) == (6, 3, 3.0)
    assert drafted.drafter_tokens == {"oracle": (6, 6)}
    plainly = stats_of(driver.run(Request(request_id="2", prompt=Prompt(token_ids=PROMPT), params=PARAMS)))
    assert (plainly.num_rounds, plainly.num_decode_rounds, plainly.acceptance_len) == (12, 9, 1.0)
    counters = driver.engine.counters()
    assert (counters.num_rounds, counters.num_output_tokens) == (18, 20)
    assert counters.drafter_tokens == {"oracle": (6, 6), "forced": (0, 0)}
    # Twelve decoding rounds: three of three tokens, nine of one. No gap before a first token.
    assert (counters.acceptance_len.counts[:4], counters.acceptance_len.total) == ([9, 0, 3, 0], 18)
    assert sum(counters.inter_token_s.counts) == 18
    assert sum(counters.round_s.counts) == sum(counters.round_sequences.counts) == 18
    assert (counters.round_sequences.total, counters.round_rows.total) == (18, 2 * 5 + 3 * 3 + 9)
    assert sum(counters.part_s.values()) == pytest.approx(counters.round_s.total)


def test_no_decoding_round_has_no_acceptance_length(hybrid: Path) -> None:
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    driver = EngineDriver(engine_config(hybrid))
    result = driver.run(Request(request_id="1", prompt=Prompt(token_ids=PROMPT), params=params))
    assert stats_of(result).acceptance_len == acceptance_len(0, 0) == 0.0


def test_counters_are_a_copy_and_begin_at_zero_for_every_drafter(hybrid: Path) -> None:
    driver = EngineDriver(engine_config(hybrid, drafters=("lookup", "mtp")))
    before = driver.engine.counters()
    assert before.drafter_tokens == {"lookup": (0, 0), "mtp": (0, 0), "forced": (0, 0)}
    driver.run(Request(request_id="1", prompt=Prompt(token_ids=PROMPT), params=PARAMS))
    assert (before.num_rounds, before.num_output_tokens) == (0, 0)
    assert sum(before.round_s.counts) == sum(before.inter_token_s.counts) == 0


def test_the_memory_of_kv_blocks_is_in_the_statistics(hybrid: Path) -> None:
    driver = EngineDriver(engine_config(hybrid))
    idle = driver.engine.statistics()
    assert idle["kv_cache_used_bytes"] == 0 < idle["kv_cache_bytes"] <= driver.engine.config.kv_cache_bytes
    driver.add(Request(request_id="1", prompt=Prompt(token_ids=PROMPT), params=PARAMS))
    driver.step()
    busy = driver.engine.statistics()
    used = busy["num_blocks"] - busy["num_free_blocks"]
    assert busy["kv_cache_used_bytes"] * busy["num_blocks"] == busy["kv_cache_bytes"] * used > 0


@pytest.mark.parametrize(("self_test_rows", "passed"), [(0, 0), (8, 1)])
def test_the_self_test_is_in_the_statistics(hybrid: Path, self_test_rows: int, passed: int) -> None:
    statistics = EngineDriver(engine_config(hybrid, self_test_rows=self_test_rows)).engine.statistics()
    assert statistics["self_test_passed"] == passed
    assert (statistics["self_test_rows"] >= 8) == bool(passed)


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**40])
def test_a_stop_token_outside_the_vocabulary_is_refused_and_spares_the_neighbours(
    hybrid: Path, plain: Plain, token_id: int
) -> None:
    driver = EngineDriver(engine_config(hybrid))
    driver.add(Request(request_id="neighbour", prompt=Prompt(token_ids=PROMPT), params=PARAMS))
    driver.step()
    bad = SamplingParams(max_tokens=10, min_tokens=5, stop_token_ids=(3, token_id))
    with pytest.raises(InvalidRequestError, match=rf"stop_token_ids: .*0 to {VOCAB_SIZE - 1}, got {token_id}"):
        driver.add(Request(request_id="bad", prompt=Prompt(token_ids=PROMPT), params=bad))
    good = SamplingParams(max_tokens=10, min_tokens=5, ignore_eos=True, stop_token_ids=(0, VOCAB_SIZE - 1))
    driver.add(Request(request_id="good", prompt=Prompt(token_ids=PROMPT), params=good))
    driver.finish()
    assert num_different(driver.results["neighbour"], plain.run(PROMPT, PARAMS)) == 0
    assert num_different(driver.results["good"], plain.run(PROMPT, good)) == 0
