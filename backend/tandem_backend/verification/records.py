# SPDX-License-Identifier: Apache-2.0
"""Release identity: what a build answered to a fixed set of requests, kept to hold later builds to it."""

import json
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tandem_backend.engine.fingerprint import Fingerprint
from tandem_backend.errors import TandemError
from tandem_backend.verification.comparison import show_bits
from tandem_backend.verification.release_requests import REQUESTS

# Fields of a fingerprint whose difference makes answers incomparable, and what to say of the others.
INCOMPARABLE = {"weights": "the checkpoint has other weights", "tokenizer": "the checkpoint has another tokenizer"}
_NOTES = {
    "kernels": "the kernels differ from the record's: the comparison says whether their bits do",
    "libraries": "the kernels were compiled again since the record was made",
    "arithmetic": "the arithmetic settings differ from the record's",
    "device": "the device differs from the record's, for which the promise does not hold",
    "versions": "the versions of packages differ from the record's",
}


class RecordError(TandemError):
    """The record can't be read, or can't be compared with."""

    code = "INVALID_ARG"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RecordedRequest(_Model):
    """A request as `tandem_client` takes it."""

    name: str
    stream: bool = True
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    enable_thinking: bool | None = None
    max_tokens: int
    min_tokens: int = 0
    stop: list[str] = []
    ignore_eos: bool = False


class Answer(_Model):
    """What came back; a log-probability is its float32's four bytes in hex, most significant first."""

    finish_reason: str
    text: str
    token_ids: list[int]
    logprobs: list[str]
    tool_calls: list[tuple[str, str]] = []  # name and arguments of each call; they are no part of the text


class Entry(_Model):
    request: RecordedRequest
    answer: Answer


class Record(_Model):
    format: Literal[1] = 1
    fingerprint: Fingerprint
    entries: list[Entry] = Field(min_length=1)


def release_requests() -> list[RecordedRequest]:
    return [RecordedRequest.model_validate(request) for request in REQUESTS]


def write_record(path: Path, record: Record) -> None:
    """Write as JSON. Raises RecordError."""
    try:
        path.write_text(_pretty(record.model_dump(exclude_defaults=True) | {"format": record.format}) + "\n", "utf-8")
    except OSError as error:
        raise RecordError(f"{path}: can't be written: {error}") from error


def read_record(path: Path) -> Record:
    """Raises RecordError naming what is wrong."""
    try:
        return Record.model_validate_json(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: can't be read: {error}") from error
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise RecordError(f"{path}: not a record: {f'{where}: ' if where else ''}{problem['msg']}") from error


def judge_fingerprint(recorded: Fingerprint, present: Fingerprint) -> list[str]:
    """What to know when reading the comparison. Raises RecordError where there is nothing to compare."""
    differing = recorded.differing(present)
    for name, problem in INCOMPARABLE.items():
        if name in differing:
            raise RecordError(
                f"{problem} than the record's (SHA-256 {getattr(present, name)[:12]}, recorded "
                f"{getattr(recorded, name)[:12]}): answers can't be compared"
            )
    return [f"{note} ({getattr(recorded, n)} -> {getattr(present, n)})" for n, note in _NOTES.items() if n in differing]


def first_difference(entries: Sequence[Entry], answers: Sequence[Answer]) -> str | None:
    """The first request and position where an answer is not the recorded one, byte for byte."""
    for entry, answer in zip(entries, answers, strict=True):
        problem = _compare(entry.answer, answer)
        if problem is not None:
            return f"request {entry.request.name!r}: {problem}"
    return None


def _compare(recorded: Answer, present: Answer) -> str | None:
    def pairs(answer: Answer) -> list[tuple[int, str]]:
        return list(zip_longest(answer.token_ids, answer.logprobs))

    for i, (expected, got) in enumerate(zip_longest(pairs(recorded), pairs(present))):
        if expected != got:
            return f"output token {i}: recorded {_show(expected)}, now {_show(got)}"
    for name in ("finish_reason", "text", "tool_calls"):
        expected, got = getattr(recorded, name), getattr(present, name)
        if expected != got:
            return f"{name}: recorded {expected!r}, now {got!r}"
    return None


def _show(pair: tuple[int | None, str | None] | None) -> str:
    if pair is None:
        return "the end"
    token_id, logprob = pair
    try:
        shown = "nothing" if logprob is None else show_bits(bytes.fromhex(logprob))
    except Exception:
        shown = repr(logprob)
    return f"token {token_id} with log-probability {shown}"


def _pretty(value: Any, indent: str = "") -> str:
    """JSON with a line for every member, lists of plain values on one line."""
    inner = indent + " "
    if isinstance(value, dict) and value:
        members = [f"{inner}{json.dumps(key)}: {_pretty(item, inner)}" for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        members = [f"{inner}{_pretty(item, inner)}" for item in value]
    else:
        return json.dumps(value, ensure_ascii=False)
    start, end = "{}" if isinstance(value, dict) else "[]"
    return f"{start}\n" + ",\n".join(members) + f"\n{indent}{end}"
