# SPDX-License-Identifier: Apache-2.0
"""The journal's file: an SQLite database with one row a request, which several gateways may write."""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
_BUSY_S = 5.0  # how long to wait for another process that writes

_SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
    id INTEGER PRIMARY KEY,
    time REAL NOT NULL, request_id TEXT NOT NULL, key TEXT NOT NULL, endpoint TEXT NOT NULL, model TEXT NOT NULL,
    is_streaming INTEGER NOT NULL, status INTEGER NOT NULL, error TEXT, finish_reason TEXT,
    sampling_mode TEXT, seed TEXT, sampling TEXT, num_choices INTEGER NOT NULL,
    num_prompt_tokens INTEGER NOT NULL, num_cached_tokens INTEGER NOT NULL, num_output_tokens INTEGER NOT NULL,
    num_draft_tokens INTEGER NOT NULL, num_accepted_tokens INTEGER NOT NULL, num_rounds INTEGER NOT NULL,
    queue_s REAL, first_token_s REAL, request_s REAL NOT NULL, prompt_text TEXT, answer_text TEXT
);
CREATE INDEX IF NOT EXISTS requests_by_time ON requests (time);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalRow:
    """One request. Times are seconds; None: there is nothing to tell."""

    time: float  # of its arrival, since 1970
    request_id: str = ""  # "" like all that follows from it where the request was refused before it was read
    key: str = ""  # name of the caller's API key
    endpoint: str  # "chat", "completions" or "responses"
    model: str = ""
    is_streaming: bool = False
    status: int  # of HTTP; 499: the client left before the end
    error: str | None = None
    finish_reason: str | None = None  # of the first choice
    sampling_mode: str | None = None  # "greedy", "as_sent", "regenerate" or "loop_escape"
    seed: int | None = None  # of a sampled answer
    sampling: str | None = None  # JSON of the sampling values that the backend got
    num_choices: int = 1
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rounds: int = 0
    queue_s: float | None = None  # in the backend
    first_token_s: float | None = None  # from arrival to the first text, in the gateway
    request_s: float = 0.0  # from arrival to the end, in the gateway
    prompt_text: str | None = None  # JSON of the messages, or the prompt; only where the gateway keeps texts
    answer_text: str | None = None


COLUMNS = tuple(item.name for item in fields(JournalRow))
_SEED = COLUMNS.index("seed")
_INSERT = f"INSERT INTO requests ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"


class JournalFileError(ValueError):
    """The file is none of ours, of another version, or can't be read."""


def open_for_writing(path: Path) -> sqlite3.Connection:
    """The file at `path`, made where there is none, readable by its owner alone. Raises JournalFileError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        connection = sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False)
        _check_version(connection, path)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.executescript(f"{_SCHEMA} PRAGMA user_version={SCHEMA_VERSION};")
    except (OSError, sqlite3.Error) as error:
        raise JournalFileError(f"{path}: {error}") from error
    return connection


def insert(connection: sqlite3.Connection, rows: Iterable[JournalRow]) -> None:
    """Write rows in one transaction. Raises sqlite3.Error; then none is written."""
    with connection:
        connection.executemany(_INSERT, [_values(row) for row in rows])


def prune(connection: sqlite3.Connection, *, older_than: float, max_rows: int) -> int:
    """Delete rows from before `older_than` (seconds since 1970) and the oldest beyond `max_rows`; returns how many."""
    with connection:
        num_old = connection.execute("DELETE FROM requests WHERE time < ?", (older_than,)).rowcount
        newest = "SELECT id FROM requests ORDER BY id DESC LIMIT 1 OFFSET ?"
        num_over = connection.execute(f"DELETE FROM requests WHERE id <= ({newest})", (max_rows,)).rowcount
    return num_old + num_over


def read(path: Path, conditions: Mapping[str, Any], limit: int | None) -> Iterator[dict[str, Any]]:
    """The newest `limit` rows, oldest first, that meet all conditions, such as {"time >= ?": 1.7e9}.

    Raises JournalFileError.
    """
    where = " AND ".join(conditions) or "1"
    newest = f"SELECT id FROM requests WHERE {where} ORDER BY id DESC LIMIT ?"
    statement = f"SELECT {', '.join(COLUMNS)} FROM requests WHERE id IN ({newest}) ORDER BY id"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=_BUSY_S)) as connection:
            _check_version(connection, path)
            cursor = connection.execute(statement, (*conditions.values(), -1 if limit is None else limit))
            for values in cursor:
                yield _row(values)
    except sqlite3.Error as error:
        raise JournalFileError(f"{path}: {error}") from error


def _check_version(connection: sqlite3.Connection, path: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if version != SCHEMA_VERSION and (version or num_tables):
        raise JournalFileError(f"{path}: is no journal of version {SCHEMA_VERSION}, name another file")


def _values(row: JournalRow) -> tuple[Any, ...]:
    """A seed is written as text: it has 64 bits, SQLite's integers have 63."""
    values = astuple(row)
    return tuple(str(value) if n == _SEED and value is not None else value for n, value in enumerate(values))


def _row(values: Sequence[Any]) -> dict[str, Any]:
    row = dict(zip(COLUMNS, values, strict=True))
    row["seed"] = None if row["seed"] is None else int(row["seed"])
    row["is_streaming"] = bool(row["is_streaming"])
    return row
