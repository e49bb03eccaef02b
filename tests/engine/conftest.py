# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and references that the engine's tests share."""

from pathlib import Path

import pytest
from engine_driver import VOCAB_SIZE, Plain
from fakes.tiny_model import tiny_checkpoint
from fakes.tiny_text_model import tiny_text_checkpoint

ROOT = Path(__file__).parents[2]
LONG = {"max_position_embeddings": 1280}


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Delta and attention layers, with an mtp head. Of so few token ids, its text repeats now and then."""
    directory = tmp_path_factory.mktemp("hybrid")
    return tiny_checkpoint(directory, "qwen3_5_text", mtp=True, vocab_size=VOCAB_SIZE, **LONG)


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid with a tokenizer and a chat template."""
    return tiny_text_checkpoint(tmp_path_factory.mktemp("text_model"))


@pytest.fixture(scope="session")
def small_draft_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another checkpoint of the tiny ones' vocabulary."""
    directory = tmp_path_factory.mktemp("draft_model")
    return tiny_checkpoint(directory, "llama", seed=7, num_hidden_layers=1, vocab_size=VOCAB_SIZE, **LONG)


@pytest.fixture(scope="session")
def bundled() -> Path:
    return ROOT / "model_repository" / "tandem" / "1" / "tandem-pydoc"


@pytest.fixture(scope="session")
def plain(hybrid: Path) -> Plain:
    return Plain(hybrid)


@pytest.fixture(scope="session")
def plain_text(text_model: Path) -> Plain:
    return Plain(text_model)
