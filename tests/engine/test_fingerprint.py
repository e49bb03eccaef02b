# SPDX-License-Identifier: Apache-2.0
"""A fingerprint tells what bits depend on apart, and nothing else."""

import shutil
from pathlib import Path
from types import ModuleType

import pytest
import tandem_backend.model
import tandem_kernels
from fakes.tiny_model import edit_config, tiny_checkpoint
from tandem_backend.engine.fingerprint import Fingerprint, take_fingerprint
from tandem_backend.errors import CheckpointError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "model", "qwen3")


def test_a_copy_elsewhere_is_the_same(checkpoint: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    (copy / "README.md").write_text("no part of it")
    found = take_fingerprint(copy)
    assert found == take_fingerprint(checkpoint)
    assert Fingerprint.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_one_byte_of_the_weights_counts(tmp_path: Path, max_shard_size: str) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", "qwen3", max_shard_size=max_shard_size)
    before = take_fingerprint(checkpoint)
    last = sorted(checkpoint.glob("*.safetensors"))[-1]
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    assert before.differing(take_fingerprint(checkpoint)) == ["weights"]


def test_config_and_tokenizer_count(checkpoint: Path) -> None:
    before = take_fingerprint(checkpoint)
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}")
    assert before.differing(take_fingerprint(checkpoint)) == ["tokenizer"]
    edit_config(checkpoint, rms_norm_eps=1e-3)
    assert before.differing(take_fingerprint(checkpoint)) == ["weights", "tokenizer"]


@pytest.mark.parametrize(
    ("package", "file", "field"),
    [
        (tandem_kernels, "cpu/linear.c", "kernels"),
        (tandem_kernels, "cpu/tandem_cpu_v3.so", "libraries"),
        (tandem_backend.model, "decoder.py", "kernels"),
    ],
)
def test_kernels_and_model_count(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: ModuleType, file: str, field: str
) -> None:
    before = take_fingerprint(checkpoint)
    assert package.__file__ is not None
    copy = shutil.copytree(Path(package.__file__).parent, tmp_path / "package")
    monkeypatch.setattr(package, "__file__", str(copy / "__init__.py"))
    assert take_fingerprint(checkpoint) == before
    with (copy / file).open("ab") as source:
        source.write(b"\n")
    assert before.differing(take_fingerprint(checkpoint)) == [field]


def test_an_unreadable_file_is_named(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        take_fingerprint(checkpoint)
