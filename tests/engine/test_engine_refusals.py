# SPDX-License-Identifier: Apache-2.0
"""Drafters that can't work with the target, and sizes that can't work at all, are refused at load by name."""

from pathlib import Path
from typing import Any

import pytest
import tandem_kernels as kernels
from engine_driver import VOCAB_SIZE, EngineDriver, Plain, engine_config, num_different
from fakes.tiny_model import tiny_checkpoint
from fakes.tiny_text_model import tiny_text_checkpoint
from tandem_backend.engine import Engine
from tandem_backend.engine.memory import RESERVED_BYTES
from tandem_backend.errors import CheckpointError, ConfigError
from tandem_backend.types import Prompt, Request, SamplingParams


def refused(checkpoint: Path, message: str, **config: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(engine_config(checkpoint, **config))


def test_an_unknown_drafter(hybrid: Path) -> None:
    refused(hybrid, r"^drafters: unknown drafter 'best'; known: auto, lookup, mtp, draft_model", drafters=("best",))


def test_mtp_without_a_head(small_draft_model: Path) -> None:
    refused(
        small_draft_model, r"^drafters: 'mtp' reads the checkpoint's mtp\.\* head; .* carries none", drafters=("mtp",)
    )


def test_auto_takes_what_the_checkpoint_has(hybrid: Path, small_draft_model: Path) -> None:
    def names(checkpoint: Path) -> list[str]:
        return list(Engine(engine_config(checkpoint, drafters=("auto",))).rounds.drafting.drafters)

    assert names(hybrid) == ["lookup", "mtp"]
    assert names(small_draft_model) == ["lookup"]


def test_draft_model_and_its_directory_belong_together(hybrid: Path, small_draft_model: Path) -> None:
    message = r"^draft_model: the directory and 'draft_model' in drafters belong together"
    refused(hybrid, message, drafters=("draft_model",))
    refused(hybrid, message, drafters=("lookup",), draft_model=small_draft_model)


def test_draft_model_of_another_vocabulary(hybrid: Path, tmp_path: Path) -> None:
    other = tiny_checkpoint(tmp_path, "llama", vocab_size=VOCAB_SIZE + 1, max_position_embeddings=1280)
    message = rf"^draft_model: its vocabulary has {VOCAB_SIZE + 1} tokens, the target's {VOCAB_SIZE}"
    refused(hybrid, message, drafters=("draft_model",), draft_model=other)


def test_draft_model_of_a_shorter_context(hybrid: Path, tmp_path: Path) -> None:
    other = tiny_checkpoint(tmp_path, "llama", vocab_size=VOCAB_SIZE, max_position_embeddings=256)
    config = {"drafters": ("draft_model",), "draft_model": other}
    refused(hybrid, r"^draft_model: its context of 256 is shorter than the target's 1280", **config)
    Engine(engine_config(hybrid, max_context_len=256, **config))


def test_draft_model_of_another_tokenizer(text_model: Path, tmp_path: Path) -> None:
    other = tiny_text_checkpoint(tmp_path)
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text(encoding="utf-8").replace("<start>", "<begin>"), encoding="utf-8")
    message = r"^draft_model: .* has another tokenizer than the target"
    refused(text_model, message, drafters=("draft_model",), draft_model=other)


def test_draft_model_that_is_no_checkpoint(hybrid: Path, tmp_path: Path) -> None:
    refused(hybrid, r"^draft_model: .*config\.json", drafters=("draft_model",), draft_model=tmp_path)


def test_draft_model_of_the_same_tokenizer_drafts(text_model: Path, plain_text: Plain, tmp_path: Path) -> None:
    other = tiny_text_checkpoint(tmp_path, seed=5)
    config = engine_config(text_model, drafters=("draft_model",), draft_model=other, router="always")
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    result = EngineDriver(config).run(Request(request_id="1", prompt=Prompt(text="Hello"), params=params))
    assert num_different(result, plain_text.run(plain_text.encode("Hello"), params)) == 0
    assert result.stats is not None
    assert result.stats.num_draft_tokens > 0


def test_a_context_longer_than_the_checkpoints(hybrid: Path) -> None:
    refused(hybrid, r"^max_context_len: at most 1280 \(the checkpoint's\), got 1281", max_context_len=1281)


def test_memory_too_small_for_the_self_test(tmp_path: Path) -> None:
    wide = tiny_checkpoint(tmp_path, "llama", head_dim=640)
    message = r"^kv_cache_bytes: holds 0 KV blocks; the self-test needs 6"
    refused(wide, message, kv_cache_bytes=1 << 20, self_test_rows=10)


def test_passes_that_do_not_fit_beside_the_state(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Engine(engine_config(hybrid, max_prefill_rows=512)).memory
    free = plan.kv + plan.states + plan.anchors + plan.rows + RESERVED_BYTES
    monkeypatch.setattr(kernels, "free_bytes", lambda device: free)
    Engine(engine_config(hybrid, max_prefill_rows=512))
    refused(hybrid, r"max_prefill_rows: .* do not fit", max_prefill_rows=513)


def test_a_checkpoint_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Engine(engine_config(tmp_path))
