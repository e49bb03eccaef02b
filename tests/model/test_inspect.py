# SPDX-License-Identifier: Apache-2.0
"""`tandem inspect`, on tiny checkpoints and on the bundled one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from fakes.tiny_model import LLAMA3_ROPE, tiny_checkpoint
from safetensors.torch import load_file
from tandem_backend.commands.compare_transformers import Comparator, Comparison, Totals, bf16_ulp
from tandem_backend.commands.inspect import inspect

ROOT = Path(__file__).parents[2]
BUNDLED = ROOT / "model_repository" / "tandem" / "1" / "tandem-pydoc"
PROMPTS = ROOT / "tests" / "prompts.jsonl"
VOCAB = 8192


def _inspect(*args: object) -> Result:
    return CliRunner().invoke(inspect, [str(arg) for arg in args])


def _compare(checkpoint: Path, prompts: Path, *args: object) -> Result:
    return _inspect(checkpoint, "--compare-transformers", "--prompts", prompts, "--max-tokens", 16, *args)


@pytest.fixture
def with_tokenizer(tmp_path: Path) -> Path:
    """A tiny hybrid with the bundled checkpoint's tokenizer."""
    checkpoint = tiny_checkpoint(tmp_path / "tiny", "qwen3_5_text", vocab_size=VOCAB)
    for file in BUNDLED.glob("tokenizer*"):
        shutil.copy(file, checkpoint)
    shutil.copy(BUNDLED / "chat_template.jinja", checkpoint)
    return checkpoint


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    cases = [{"id": "text", "prompt": "import os"}, {"id": "chat", "messages": [{"role": "user", "content": "Hi"}]}]
    path.write_text("\n\n".join(map(json.dumps, cases)), encoding="utf-8")
    return path


def test_the_bundled_checkpoint() -> None:
    report = json.loads(_inspect(BUNDLED, "--json").output)
    tensors = load_file(BUNDLED / "model.safetensors")
    counts = {name: tensor.numel() for name, tensor in tensors.items()}
    assert report["family"] == "qwen3_5_text"
    assert report["layers"] == {"delta": 6, "attention": 2}
    assert report["parameters"]["mtp"] == sum(n for name, n in counts.items() if name.startswith("mtp."))
    assert sum(report["parameters"].values()) == sum(counts.values())
    assert report["bytes"] == {"BF16": 2 * sum(counts.values())}
    assert report["drafters"] == {"mtp": 1}
    assert report["tied"] is True
    assert report["kv_bytes_per_token"] == 2 * 2 * 2 * 64 * 4  # keys and values, layers, heads, width, float32
    assert report["slot_bytes"] == 6 * 4 * (6 * 64 * 64 + 3 * 768)
    assert report["cuda"] == {  # rows in bfloat16, recurrent state in float32
        "weight_bytes": 2 * report["parameters"]["target"],
        "kv_bytes_per_token": 2 * 2 * 2 * 64 * 2,
        "slot_bytes": 6 * (4 * 6 * 64 * 64 + 2 * 3 * 768),
    }


def test_the_text_names_what_matters(tmp_path: Path) -> None:
    rope = {**LLAMA3_ROPE, "factor": 7.0}
    result = _inspect(tiny_checkpoint(tmp_path, "llama", rope_parameters=rope, dtype=torch.float16))
    assert result.exit_code == 0
    for words in ("llama", "3: 3 attention", "F16", "llama3 scaling by 7", "512 tokens", "151, embeddings untied"):
        assert words in result.output
    assert "delta" not in result.output
    assert "none" in result.output.split("drafters")[1].splitlines()[0]


def test_parts_of_a_nested_checkpoint_are_counted_apart(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, "qwen3_5", mtp=True, max_shard_size="20KB")
    parameters = json.loads(_inspect(checkpoint, "--json").output)["parameters"]
    plain = tiny_checkpoint(tmp_path / "plain", "qwen3_5_text", mtp=True)
    assert parameters == {**json.loads(_inspect(plain, "--json").output)["parameters"], "other": 8}


def test_a_tiny_checkpoint_agrees(with_tokenizer: Path, prompts: Path) -> None:
    result = _compare(with_tokenizer, prompts)
    assert result.exit_code == 0, result.output
    total = result.output.splitlines()[-1].split()
    assert total[:4] == ["total", "32", "32", "0"]


def test_the_bundled_checkpoint_agrees() -> None:
    result = _compare(BUNDLED, PROMPTS, "--limit", 1, "--json")
    assert result.exit_code == 0, result.output
    comparison = json.loads(result.output)["comparison"]
    assert comparison["num_positions"] == comparison["num_equal"] == 16
    assert comparison["max_difference"] < 2e-3
    assert comparison["agrees"] is True
    assert [case["id"] for case in comparison["prompts"]] == ["prose-a00"]


def test_another_model_is_told_from_ours(with_tokenizer: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One weight of our side is changed after loading."""
    load = Comparator.__init__

    def load_and_spoil(self: Comparator, checkpoint: Path) -> None:
        load(self, checkpoint)
        self.decoder.final_norm[:18] *= 0.5

    monkeypatch.setattr(Comparator, "__init__", load_and_spoil)
    result = _compare(with_tokenizer, prompts)
    assert result.exit_code == 1
    assert "differs: ours " in result.output
    assert "bf16 ulps" in result.output


def test_totals_disagree_on_a_clear_argmax_or_a_large_difference() -> None:
    def agrees(num_clear_differences: int, max_difference: float) -> bool:
        return Totals.of([Comparison("a", 9, 8, num_clear_differences, max_difference, None)]).agrees

    assert agrees(0, 1.9e-3)
    assert not agrees(1, 1e-5)
    assert not agrees(0, 2e-3)


@pytest.mark.parametrize(("value", "ulp"), [(1.0, 2**-7), (1.99, 2**-7), (2.0, 2**-6), (-20.0, 0.125)])
def test_bf16_ulp(value: float, ulp: float) -> None:
    assert bf16_ulp(value) == ulp
    number = torch.tensor(value).bfloat16()
    assert abs(torch.nextafter(number, torch.tensor(torch.inf, dtype=torch.bfloat16)) - number) == ulp


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nowhere"], "does not exist"),
        ([BUNDLED, "--compare-transformers"], "--prompts go together"),
        ([BUNDLED, "--prompts", PROMPTS], "--prompts go together"),
        ([BUNDLED, "--limit", 0], "--limit"),
    ],
)
def test_wrong_usage_exits_2(args: list[object], words: str) -> None:
    result = _inspect(*args)
    assert result.exit_code == 2
    assert words in result.output


def test_a_broken_checkpoint_exits_1(tmp_path: Path) -> None:
    result = _inspect(tmp_path)
    assert result.exit_code == 1
    assert "config.json: can't be read" in result.output


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no prompts"),
        ('{"id": 1, "prompt": "a"}\n{', "line 2: not a JSON object"),
        ("[]", "line 1: not a JSON object"),
        ('{"id": 1}', "line 1: needs either prompt or messages"),
        ('{"prompt": "a", "messages": []}', "line 1: needs either prompt or messages"),
    ],
)
def test_wrong_prompts_exit_1_naming_the_line(content: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content, encoding="utf-8")
    result = _compare(BUNDLED, path)
    assert result.exit_code == 1
    assert words in result.output


def test_a_checkpoint_without_a_tokenizer_exits_1(tmp_path: Path, prompts: Path) -> None:
    result = _compare(tiny_checkpoint(tmp_path, "llama"), prompts)
    assert result.exit_code == 1
    assert "tokenizer" in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_the_command_imports_nothing_heavy() -> None:
    program = "import sys, tandem_backend.commands.inspect; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"
