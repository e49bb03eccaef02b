# SPDX-License-Identifier: Apache-2.0
"""`tandem corpus build` and `tandem bench suffix-store`."""

import json
from pathlib import Path

from click.testing import CliRunner
from tandem_backend.commands.bench import bench
from tandem_backend.commands.corpus import corpus
from tandem_backend.config import EngineConfig
from tandem_backend.engine.suffix_store import StoredTexts
from tandem_backend.engine.tokenizer import Tokenizer
from tandem_backend.model.config import load_model_config

CHECKPOINT = Path(__file__).parents[2] / "model_repository/tandem/1/tandem-pydoc"


def build(out: Path, *files: Path) -> tuple[int, str]:
    result = CliRunner().invoke(corpus, ["build", "--checkpoint", str(CHECKPOINT), "--out", str(out), *map(str, files)])
    return result.exit_code, result.output


def test_a_built_corpus_is_looked_up(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("def bisect_left(a, x, lo=0, hi=None):\n    return lo\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "import json, os and sys together"}) + "\n\n")
    code, output = build(tmp_path / "corpus", tmp_path / "a.txt", tmp_path / "b.jsonl")
    assert code == 0, output
    tokenizer, vocab_size = Tokenizer(CHECKPOINT), load_model_config(CHECKPOINT).vocab_size
    config = EngineConfig(checkpoint=CHECKPOINT, lookup_corpora=(tmp_path / "corpus",))
    texts = StoredTexts.open(config, tokenizer, vocab_size)
    ids = tokenizer.encode("import json, os and sys together", add_special_tokens=False)
    assert texts.stores[0].matches(ids[:5], 3, 1) == [(5, tuple(ids[5:8]))]
    assert texts.statistics()["suffix_store_tokens"] == int(output.split(": ")[1].split()[0])


def test_bad_input_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": 3}\n')
    code, output = build(tmp_path / "corpus", tmp_path / "bad.jsonl")
    assert code == 1
    assert "bad.jsonl, line 1: text: must be a string" in output
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    code, output = build(tmp_path / "other", tmp_path / "binary.txt")
    assert code == 1
    assert "binary.txt" in output


def test_bench_suffix_store_reports(tmp_path: Path) -> None:
    result = CliRunner().invoke(bench, ["suffix-store", "--tokens", "20000", "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "out.json").read_text())
    assert 20_000 <= figures["num_tokens"] <= 21_000
    assert figures["found_share"] > 0.1
    assert figures == json.loads(result.output.splitlines()[-1])
