# SPDX-License-Identifier: Apache-2.0
"""A long context takes the memory that `tandem inspect --memory` predicts, and admission counts the same."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from cold_state import tokens
from engine_driver import EngineDriver, engine_config, limit_blocks
from fakes.tiny_model import tiny_checkpoint
from tandem_backend.commands.inspect import inspect
from tandem_backend.engine.drafters.mtp import MtpDrafter
from tandem_backend.errors import InvalidRequestError
from tandem_backend.types import Prompt, Request, SamplingParams

CONTEXT = 32_768
NUM_OUTPUT = 8
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
}


@pytest.fixture(scope="module")
def long_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("long")
    return tiny_checkpoint(directory, "qwen3_5_text", mtp=True, vocab_size=31, max_position_embeddings=CONTEXT, **SIZES)


def predicted(checkpoint: Path, context: int) -> dict[str, int]:
    result = CliRunner().invoke(inspect, [str(checkpoint), "--memory", "--context", str(context), "--json"])
    assert result.exit_code == 0, result.output
    memory: dict[str, int] = json.loads(result.stdout)["memory"]
    return memory


def request(request_id: str, num_tokens: int) -> Request:
    params = SamplingParams(max_tokens=NUM_OUTPUT, ignore_eos=True)
    return Request(request_id=request_id, prompt=Prompt(token_ids=tuple(tokens(1, num_tokens))), params=params)


@pytest.mark.parametrize("context", [4096, pytest.param(CONTEXT, marks=pytest.mark.slow)])
def test_memory_is_as_predicted(long_checkpoint: Path, context: int) -> None:
    memory = predicted(long_checkpoint, context)
    config = engine_config(
        long_checkpoint, drafters=("mtp",), anchor_grid=context // 4, max_prefill_rows=1024, kv_cache_bytes=256 << 20
    )
    driver = EngineDriver(config)
    engine, scheduler = driver.engine, driver.engine.scheduler
    result = driver.run(request("1", context - NUM_OUTPUT))
    assert result.error is None
    # What the allocated tensors really take, by block and by slot.
    state, drafter = engine.rounds.state, engine.rounds.drafting.drafters["mtp"]
    assert isinstance(drafter, MtpDrafter)
    kv = [part for layer in (*state.kv_layers(), drafter.kv) for part in (layer.keys, layer.values)]
    assert sum(part.nbytes for part in kv) == scheduler.blocks.size * memory["block_bytes"]
    assert memory["block_bytes"] == 64 * memory["bytes_per_token"]
    # What the sequence left in the cache: all its blocks, and an anchor on the grid, before the prompt's end and at its
    # own.
    anchors = scheduler.cache.anchors()
    grid = [context // 4, context // 2, 3 * context // 4]
    assert sorted(a.position for a in anchors) == [*grid, context - NUM_OUTPUT - 1, context - 1]
    assert {anchor.num_bytes for anchor in anchors} == {memory["bytes_per_anchor"]}
    assert {anchor.state.num_bytes for anchor in anchors} == {memory["state_bytes_per_sequence"]}
    assert scheduler.cache.index.num_nodes == memory["blocks_per_sequence"] == context // 64
    assert scheduler.cache.num_bytes == memory["kv_bytes_per_sequence"] + 5 * memory["bytes_per_anchor"]
    assert memory["bytes_per_sequence"] == memory["kv_bytes_per_sequence"] + memory["state_bytes_per_sequence"]
    # It goes on from there.
    again = driver.run(request("2", context - NUM_OUTPUT))
    assert again.stats is not None
    assert again.stats.num_cached_tokens == context - NUM_OUTPUT - 1
    assert again.token_ids == result.token_ids


def test_admission_uses_the_same_arithmetic(long_checkpoint: Path) -> None:
    needed = predicted(long_checkpoint, 1000)["blocks_per_sequence"]
    driver = EngineDriver(engine_config(long_checkpoint, prefix_cache_bytes=0))
    limit_blocks(driver.engine, needed)
    assert driver.run(request("fits", 1000 - NUM_OUTPUT)).error is None
    limit_blocks(driver.engine, needed - 1)
    with pytest.raises(InvalidRequestError, match=f"need {needed} KV blocks; kv_cache_bytes holds {needed - 1}"):
        driver.add(request("does not", 1000 - NUM_OUTPUT))


def test_the_context_has_its_limit_and_its_option(long_checkpoint: Path) -> None:
    arguments = [str(long_checkpoint), "--memory", "--context"]
    assert "memory at 4,096 tokens" in CliRunner().invoke(inspect, [*arguments, "4096"]).stdout
    too_long = CliRunner().invoke(inspect, [*arguments, str(CONTEXT + 1)])
    assert too_long.exit_code == 1
    assert f"context: at most {CONTEXT} (the checkpoint's), got {CONTEXT + 1}" in too_long.output
    alone = CliRunner().invoke(inspect, [str(long_checkpoint), "--context", "5"])
    assert alone.exit_code == 2
    assert "--context goes with --memory" in alone.output
