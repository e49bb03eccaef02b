# SPDX-License-Identifier: Apache-2.0
"""The journal: rows get to the file by themselves, old ones go, nothing waits for it; `tandem journal` finds them."""

import csv
import io
import json
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tandem_client.cli import main
from tandem_client.gateway.journal import Journal
from tandem_client.gateway.journal_file import COLUMNS, JournalFileError, JournalRow, read

ROW = JournalRow(
    time=1_700_000_000.25,
    request_id="r0",
    key="alice",
    endpoint="chat",
    model="tandem",
    is_streaming=True,
    status=200,
    finish_reason="stop",
    sampling_mode="regenerate",
    seed=2**64 - 1,
    sampling='{"temperature": 0.7}',
    num_prompt_tokens=20,
    num_cached_tokens=12,
    num_output_tokens=5,
    first_token_s=0.0125,
    request_s=0.5,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "journal.sqlite"


def fill(path: Path, *rows: JournalRow, **limits: Any) -> Journal:
    journal = Journal(path, **{"max_age_s": 1e9, "max_rows": 1000, "clock": lambda: ROW.time, **limits})
    for row in rows:
        journal.write(row)
    journal.close()
    return journal


def ids(path: Path, conditions: dict[str, Any] | None = None, limit: int | None = None) -> list[str]:
    return [row["request_id"] for row in read(path, conditions or {}, limit)]


def numbered(number: int, **values: Any) -> list[JournalRow]:
    return [replace(ROW, request_id=f"r{n}", time=ROW.time + n, **values) for n in range(number)]


def test_a_row_comes_back_as_it_was_written(path: Path) -> None:
    plain = JournalRow(
        time=ROW.time, request_id="r1", endpoint="completions", model="m", status=400, sampling_mode="greedy"
    )
    assert fill(path, ROW, plain).num_written == 2
    assert list(read(path, {}, None)) == [asdict(ROW), asdict(plain)]


def test_only_its_owner_may_read_the_file(path: Path) -> None:
    fill(path, ROW)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_rows_are_added_to_those_of_earlier_runs_and_of_other_gateways(path: Path) -> None:
    fill(path, *numbered(2))
    first, second = (Journal(path, max_age_s=1e9, max_rows=1000) for _ in range(2))
    for number in range(200):
        (first, second)[number % 2].write(replace(ROW, request_id=f"s{number}", time=time.time()))
    first.close()
    second.close()
    assert (first.num_dropped, second.num_dropped) == (0, 0)
    assert len(ids(path)) == 202


def test_old_rows_go(path: Path) -> None:
    fill(path, *numbered(10))
    fill(path, replace(ROW, request_id="new", time=ROW.time + 12), max_age_s=5, clock=lambda: ROW.time + 12)
    assert ids(path) == ["r7", "r8", "r9", "new"]


def test_there_are_never_many_more_rows_than_allowed(path: Path) -> None:
    fill(path, *numbered(500), max_rows=20)
    fill(path, replace(ROW, request_id="last"), max_rows=20)
    assert ids(path) == [*(f"r{n}" for n in range(481, 500)), "last"]


def test_a_file_that_is_locked_costs_rows_and_no_time_of_who_writes(path: Path) -> None:
    """The event loop calls `write`: it must come back while the disk does not."""
    journal = Journal(path, max_age_s=1e9, max_rows=1000, max_pending=5)
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    for row in numbered(600):  # a batch of those that the thread takes, and five that wait
        journal.write(row)
    assert journal.num_written == 0
    assert journal.num_dropped >= 600 - 500 - 5
    blocker.execute("ROLLBACK")
    blocker.close()
    journal.close()
    assert journal.num_written + journal.num_dropped == 600
    assert len(ids(path)) == journal.num_written > 0


def test_a_row_that_cannot_be_written_is_counted_and_the_next_one_is_written(path: Path) -> None:
    journal = Journal(path, max_age_s=1e9, max_rows=1000)
    journal.write(replace(ROW, num_rounds=2**70))
    while not journal.num_dropped:
        time.sleep(0.001)
    journal.write(ROW)
    journal.close()
    assert (journal.num_written, journal.num_dropped) == (1, 1)


@pytest.mark.parametrize("content", [b"no database, but long enough to be taken for one" * 9, None])
def test_a_file_of_others_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "other"
    if content is None:
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE theirs (x)")
        connection.close()
    else:
        path.write_bytes(content)
    before = path.read_bytes()
    with pytest.raises(JournalFileError, match=f"^{path}: "):
        Journal(path, max_age_s=1, max_rows=1)
    with pytest.raises(JournalFileError, match=f"^{path}: "):
        ids(path)
    assert path.read_bytes() == before


# The command.


@pytest.fixture
def journal(path: Path) -> Path:
    rows = [
        replace(ROW, request_id="old"),
        replace(
            ROW, request_id="bob", key="bob", time=ROW.time + 100, sampling_mode="greedy", seed=None, sampling=None
        ),
        replace(ROW, request_id="bad", time=ROW.time + 200, status=400, error="ApiError", finish_reason=None),
        replace(
            ROW, request_id="new", time=time.time() - 60, endpoint="responses", model="other", finish_reason="length"
        ),
    ]
    fill(path, *rows)
    return path


def command(path: Path, *arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(main, ["journal", str(path), *arguments])
    assert result.exit_code == status, result.output
    return result.output


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ((), ["old", "bob", "bad", "new"]),
        (("--since", "2m"), ["new"]),
        (("--until", "2023-11-14T22:13:25+00:00"), ["old"]),
        (("--since", "2023-11-14T22:13:25+00:00", "--until", "1h"), ["bob", "bad"]),
        (("--key", "bob"), ["bob"]),
        (("--mode", "greedy"), ["bob"]),
        (("--status", "200", "--model", "tandem"), ["old", "bob"]),
        (("--failed",), ["bad"]),
        (("--finish", "length"), ["new"]),
        (("--endpoint", "responses"), ["new"]),
        (("--request-id", "bad"), ["bad"]),
        (("--seed", str(2**64 - 1), "--limit", "2"), ["bad", "new"]),
        (("--key", "nobody"), []),
    ],
)
def test_the_command_finds_requests(journal: Path, arguments: tuple[str, ...], found: list[str]) -> None:
    lines = command(journal, "--format", "jsonl", *arguments).splitlines()
    assert [json.loads(line)["request_id"] for line in lines] == found


def test_the_command_writes_json_lines_and_csv_of_all_there_is(journal: Path, tmp_path: Path) -> None:
    first = json.loads(command(journal, "--format", "jsonl").splitlines()[0])
    expected = {**asdict(ROW), "request_id": "old", "time": "2023-11-14T22:13:20.250+00:00"}
    assert first == expected | {"sampling": {"temperature": 0.7}}
    file = tmp_path / "out.csv"
    command(journal, "--format", "csv", "--output", str(file))
    (row, *others) = csv.DictReader(io.StringIO(file.read_text()))
    assert (tuple(row), len(others)) == (COLUMNS, 3)
    assert (row["seed"], row["sampling"], row["error"]) == (str(2**64 - 1), '{"temperature": 0.7}', "")


def test_the_table_is_the_newest_fifty(path: Path) -> None:
    fill(path, *numbered(60))
    header, *lines = command(path).splitlines()
    assert header.split() == [
        *("time", "key", "endpoint", "status", "finish_reason", "sampling_mode", "seed"),
        *("prompt", "cached", "output", "first_s", "total_s"),
    ]
    assert len(lines) == 50
    assert lines[-1].split() == [
        *("2023-11-14T22:14:19.250+00:00", "alice", "chat", "200", "stop", "regenerate", str(2**64 - 1)),
        *("20", "12", "5", "0.013", "0.500"),
    ]


@pytest.mark.parametrize("moment", ["yesterday", "5x", "-1h"])
def test_a_wrong_time_is_named(journal: Path, moment: str) -> None:
    assert "neither an age such as 90s" in command(journal, "--since", moment, status=2)


def test_a_file_that_is_no_journal_is_named(tmp_path: Path) -> None:
    file = tmp_path / "empty"
    file.write_bytes(b"x" * 4096)
    assert f"Error: {file}: " in command(file, status=1)
    assert "does not exist" in command(tmp_path / "missing", status=2)


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "journal"]
