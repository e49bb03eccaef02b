# SPDX-License-Identifier: Apache-2.0
"""`tandem verify` against a real Triton server."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from tandem_backend.commands.verify import verify
from tandem_backend.serving.launcher import TritonServer

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "model_repository" / "tandem" / "1" / "tandem-pydoc"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Two prompts of each kind."""
    lines = (ROOT / "tests" / "prompts.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(lines[i] for i in (0, 1, 10, 11, 20, 22)), encoding="utf-8")
    return path


def test_parallel_requests_of_a_server_get_the_bits_of_plain_ones(server: TritonServer, prompts: Path) -> None:
    options = ["--drafters", "default,lookup,mtp+lookup", "--parallel", "1,6", "--max-tokens", "32"]
    result = CliRunner().invoke(verify, ["--server", server.grpc_url, "--prompts", str(prompts), *options])
    assert result.exit_code == 0, result.output
    assert "6 combinations, 0 different, 0 without drafts" in result.stdout


def test_a_server_answers_as_the_engine_of_another_process(server: TritonServer, tmp_path: Path) -> None:
    """Streamed and not, at once and with other drafts: the record was made without a server."""
    record = str(tmp_path / "record.json")
    result = CliRunner().invoke(verify, ["--checkpoint", str(CHECKPOINT), "--record", record])
    assert result.exit_code == 0, result.output
    options = ["--checkpoint", str(CHECKPOINT), "--server", server.grpc_url]
    result = CliRunner().invoke(verify, [*options, "--against", record])
    assert result.exit_code == 0, result.output
    assert "13 requests answered as in" in result.stdout
