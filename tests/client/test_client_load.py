# SPDX-License-Identifier: Apache-2.0
"""The load generator: how requests come, and what is made of when their tokens came."""

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_transport import AsyncFakeTransport, answer
from tandem_client import AsyncTandemClient, ConnectionFailedError, ServerError
from tandem_client.load import command as load_command
from tandem_client.load.command import load
from tandem_client.load.figures import figures, inter_token_ms, percentiles, render
from tandem_client.load.runner import Level, LoadRun, LoadRunner, Record
from tandem_client.types import Chunk

REQUESTS: list[Any] = [("a", {}), ("b", {})]


class SlowClient:
    """Answers with two chunks after some turns of the event loop, and remembers how many it had at a time."""

    def __init__(self) -> None:
        self.num_running = self.most_running = 0
        self.prompts: list[str | None] = []

    async def generate(self, prompt: str | None = None, **options: Any) -> AsyncIterator[Chunk]:
        self.prompts.append(prompt)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        for _ in range(3):
            await asyncio.sleep(0)
        yield Chunk(text="x", token_ids=(1,))
        yield Chunk(text="y z", token_ids=(2, 3), finish_reason="length")
        self.num_running -= 1


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_concurrency_is_kept_and_never_passed(concurrency: int) -> None:
    client = SlowClient()
    run = asyncio.run(LoadRunner(client, REQUESTS).run(Level(concurrency=concurrency), 9, 2))
    assert client.most_running == concurrency
    assert client.prompts == ["a", "b"] * 5 + ["a"]
    assert [record.num_tokens for record in run.records] == [3] * 9


def test_a_rate_does_not_wait_for_answers() -> None:
    client = SlowClient()
    run = asyncio.run(LoadRunner(client, REQUESTS).run(Level(rate_per_s=50_000.0), 20, 0))
    assert client.most_running > 1
    assert len(run.records) == 20
    sent = [record.sent_s for record in run.records]
    assert sent == sorted(sent)
    again = asyncio.run(LoadRunner(SlowClient(), REQUESTS).run(Level(rate_per_s=50_000.0), 20, 0)).records
    gaps = [[round(b.sent_s - a.sent_s, 9) for a, b in pairwise(r)] for r in (run.records, again)]
    assert gaps[0] == gaps[1]


def test_errors_are_counted_by_kind_and_spoil_no_other_request() -> None:
    scripts = [answer("a", "b"), [ServerError("UNAVAILABLE", "full")], [ConnectionFailedError("gone")], answer("c")]
    client = AsyncTandemClient(transport=AsyncFakeTransport(*scripts))
    run = asyncio.run(LoadRunner(client, REQUESTS).run(Level(concurrency=1), 4, 0))
    level = figures(run)
    assert (level["num_requests"], level["num_errors"], level["num_tokens"]) == (4, 2, 3)
    assert level["errors"] == {"CONNECTION": 1, "UNAVAILABLE": 1}


def test_figures_of_known_times() -> None:
    first = Record(10.0, 11.0, [(10.2, 1), (10.5, 3), (11.0, 1)])
    second = Record(10.0, 12.0, [(10.4, 2)])
    failed = Record(10.0, 10.1, [(10.05, 50)], error="INTERNAL")
    level = figures(LoadRun(Level(concurrency=2), [first, second, failed], 2.0))
    assert (level["tokens_per_s"], level["requests_per_s"]) == (3.5, 1.0)
    assert level["ttft_ms"]["p50"] == pytest.approx(300)
    assert level["ttft_ms"]["p99"] == pytest.approx(398)
    assert inter_token_ms(first) == pytest.approx([100, 100, 100, 500])
    assert level["inter_token_ms"]["p50"] == pytest.approx(100)
    assert level["inter_token_ms"]["mean"] == pytest.approx(200)
    assert level["request_ms"]["p90"] == pytest.approx(1900)
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None, "mean": None}


def test_the_table_has_a_line_a_level_and_tells_errors() -> None:
    levels = [figures(LoadRun(Level(rate_per_s=2.5), [Record(0.0, 1.0, error="TIMEOUT")], 1.0))]
    lines = render(levels).splitlines()
    assert lines[0].split()[:3] == ["load", "requests", "errors"]
    assert lines[1].split()[:4] == ["2.5/s", "1", "1", "0.00"]
    assert lines[2:] == ["load 2.5/s: 1 x TIMEOUT"]


def run_load(monkeypatch: pytest.MonkeyPatch, *arguments: object, fails: bool = False) -> Result:
    def client(url: str, model: str) -> AsyncTandemClient:
        script = [ServerError("UNAVAILABLE", "full")] if fails else answer("a", "b", "c")
        return AsyncTandemClient(transport=AsyncFakeTransport(*([script] * 100)))

    monkeypatch.setattr(load_command, "AsyncTandemClient", client)
    return CliRunner().invoke(load, [str(argument) for argument in arguments])


def test_a_sweep_gives_a_table_a_picture_and_a_json_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra tandem-client[plot] is not installed")
    picture, lines = tmp_path / "sweep.png", tmp_path / "results.jsonl"
    options = ("--concurrency", "1,2", "--requests", 5, "--warmup", 1, "--plot", picture, "--json", lines)
    for _ in range(2):
        result = run_load(monkeypatch, *options)
        assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    written = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    assert len(written) == 2
    assert written[-1] == json.loads(result.stdout.splitlines()[-1])
    assert [(level["level"], level["num_tokens"]) for level in written[-1]["levels"]] == [("1", 15), ("2", 15)]


def test_a_level_without_any_answer_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_load(monkeypatch, "--rate", "1000", "--requests", 3, "--warmup", 0, fails=True)
    assert result.exit_code == 1
    assert "3 x UNAVAILABLE" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--concurrency", "2", "--rate", "3"), "give one of them"),
        (("--concurrency", "0"), "each must be above 0"),
        (("--concurrency", "1.5"), "must be numbers joined by commas"),
        (("--rate", "nan"), "each must be above 0"),
        (("--sampling", '{"max_tokens": 3}'), "max_tokens: given both"),
        (("--plot", "/absent/folder/x.png"), "does not exist"),
        (("--prompts", __file__), "not valid JSON"),
    ],
)
def test_wrong_usage_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    pytest.importorskip("matplotlib", reason="the extra tandem-client[plot] is not installed")
    result = run_load(monkeypatch, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_prompts_come_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"id": 1, "prompt": "a"}\n\n{"messages": [{"role": "user", "content": "b"}]}\n{"input_ids": [1]}\n'
    )
    options = ("--prompts", path, "--requests", 3, "--warmup", 0, "--concurrency", 1)
    assert run_load(monkeypatch, *options).exit_code == 0
    path.write_text('{"prompt": "a", "input_ids": [1]}\n')
    result = run_load(monkeypatch, "--prompts", path)
    assert f"{path}:1: must be an object with one of prompt, messages, input_ids" in result.stderr.replace("\n", " ")
    assert result.exit_code == 2
