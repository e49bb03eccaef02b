# SPDX-License-Identifier: Apache-2.0
"""The request log: one JSON line a request, and nothing of its text unless asked."""

import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tandem_backend.errors import ConfigError, InvalidRequestError
from tandem_backend.serving.request_log import RequestLog
from tandem_backend.serving.response import FAILED, Ended
from tandem_backend.types import FinishReason, Prompt, RequestStats

SECRET = "my secret"
PROMPT = Prompt(text=SECRET)
REFUSED = Ended(FAILED, False, None, InvalidRequestError(f"messages: must be a JSON list, got {SECRET}"))


def stats() -> RequestStats:
    now = time.time_ns()
    return RequestStats(
        num_prompt_tokens=5,
        num_output_tokens=9,
        num_rounds=4,
        num_decode_rounds=3,
        drafter_tokens={"mtp": (8, 5)},
        arrival_time_ns=now - 3_000_000_000,
        first_scheduled_time_ns=now - 2_000_000_000,
        first_token_time_ns=now - 1_000_000_000,
    )


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_tells_what_a_request_cost_and_not_what_it_said(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    log = RequestLog(path, with_prompts=False)
    log.write("mine", "chat-1", PROMPT, Ended(FinishReason.LENGTH, True, stats()))
    log.write("", None, None, REFUSED)
    ran, refused = entries(path)
    assert SECRET not in path.read_text()
    measured = {name: ran.pop(name) for name in ("time", "request_s")}
    assert 3.0 <= measured["request_s"] < 10
    assert ran == {
        "request_id": "mine",
        "sequence_id": "chat-1",
        "stream": True,
        "outcome": "length",
        "num_input_tokens": 5,
        "num_cached_tokens": 0,
        "num_output_tokens": 9,
        "num_rounds": 4,
        "acceptance_length": 2.667,
        "drafters": {"mtp": {"drafted": 8, "accepted": 5}},
        "queue_s": 1.0,
        "time_to_first_token_s": 2.0,
    }
    assert refused.pop("time") >= measured["time"]
    assert refused == {
        "request_id": "",
        "sequence_id": None,
        "stream": False,
        "outcome": "error",
        "error_code": "INVALID_ARG",
        "error_field": "messages",
    }


def test_prompts_are_told_where_asked(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    log = RequestLog(path, with_prompts=True)
    log.write("1", None, PROMPT, Ended(FinishReason.STOP, True, stats()))
    log.write("2", None, Prompt(messages=({"role": "user", "content": SECRET},)), REFUSED)
    first, second = entries(path)
    assert first["prompt"] == SECRET
    assert second["prompt"] == [{"role": "user", "content": SECRET}]
    assert SECRET in second["error"]


def test_lines_are_appended_and_a_rotated_file_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"request_id": "of the run before"}\n')
    log = RequestLog(path, with_prompts=False)
    log.write("1", None, None, REFUSED)
    path.rename(tmp_path / "requests.jsonl.1")
    log.write("2", None, None, REFUSED)
    assert [entry["request_id"] for entry in entries(tmp_path / "requests.jsonl.1")] == ["of the run before", "1"]
    assert [entry["request_id"] for entry in entries(path)] == ["2"]


def test_standard_output_is_the_other_place(capsys: pytest.CaptureFixture[str]) -> None:
    RequestLog("stdout", with_prompts=False).write("1", 7, PROMPT, REFUSED)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["sequence_id"] == 7


def test_standard_output_without_a_locale_takes_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    RequestLog("stdout", with_prompts=False).write("\N{SNOWMAN}", 7, PROMPT, REFUSED)
    assert json.loads(written.getvalue())["request_id"] == "\N{SNOWMAN}"


def test_a_file_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"request_log: .*absent.*can't be written: No such file"):
        RequestLog(tmp_path / "absent" / "requests.jsonl", with_prompts=False)
