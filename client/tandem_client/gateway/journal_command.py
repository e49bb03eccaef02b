# SPDX-License-Identifier: Apache-2.0
"""`tandem journal`: looks requests up in a gateway's journal and exports them."""

import csv
import json
import re
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import click

from tandem_client.gateway.journal_file import COLUMNS, JournalFileError, read

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SHOWN = ("time", "key", "endpoint", "status", "finish_reason", "sampling_mode", "seed")
_COUNTS = ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "first_token_s", "request_s")
_DEFAULT_LIMIT = 50


def parse_moment(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """A point in time as seconds since 1970: an age such as 90s, 15m, 2h, 7d, or a date and time of ISO 8601."""
    if value is None:
        return None
    age = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", value)
    if age:
        return time.time() - float(age[1]) * _UNITS_S[age[2]]
    try:
        return datetime.fromisoformat(value).timestamp()
    except ValueError as error:
        message = f"{value!r} is neither an age such as 90s, 15m, 2h, 7d nor a date such as 2026-01-31T08:00"
        raise click.BadParameter(message) from error


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option(
    "--since", callback=parse_moment, metavar="TIME", help="Only later requests: an age (90s, 15m, 2h, 7d) or ISO 8601."
)
@click.option("--until", callback=parse_moment, metavar="TIME", help="Only earlier requests.")
@click.option("--key", help="Only requests with the API key of this name.")
@click.option("--endpoint", type=click.Choice(["chat", "completions", "responses"]), help="Only requests of this kind.")
@click.option("--model", help="Only requests to this model.")
@click.option("--status", type=int, help="Only requests with this HTTP status; 499: the client left.")
@click.option("--failed", is_flag=True, help="Only requests with a status of 400 or more.")
@click.option("--finish", "finish_reason", help="Only answers that ended so: stop, length, tool_calls ...")
@click.option(
    "--mode",
    "sampling_mode",
    type=click.Choice(["greedy", "as_sent", "regenerate", "loop_escape"]),
    help="Only requests that were sampled so.",
)
@click.option("--seed", help="Only the request with this seed.")
@click.option("--request-id", help="Only the request with this id.")
@click.option("--limit", type=click.IntRange(min=1), help=f"The newest so many; {_DEFAULT_LIMIT} in a table, else all.")
@click.option("--format", "form", type=click.Choice(["table", "jsonl", "csv"]), default="table", show_default=True)
@click.option("--output", type=click.File("w", encoding="utf-8", lazy=False), default="-", help="A file to write to.")
def journal(
    file: Path,
    since: float | None,
    until: float | None,
    failed: bool,
    limit: int | None,
    form: str,
    output: TextIO,
    **equal: object,
) -> None:
    """List requests in the journal FILE of a gateway, or export them as JSON lines or CSV."""
    conditions: dict[str, Any] = {f"{name} = ?": value for name, value in equal.items() if value is not None}
    conditions |= {} if since is None else {"time >= ?": since}
    conditions |= {} if until is None else {"time < ?": until}
    conditions |= {"status >= ?": 400} if failed else {}
    if limit is None and form == "table":
        limit = _DEFAULT_LIMIT
    write = {"table": _write_table, "jsonl": _write_json_lines, "csv": _write_csv}[form]
    try:
        write((_readable(row) for row in read(file, conditions, limit)), output)
    except JournalFileError as error:
        raise click.ClickException(str(error)) from error


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its time as text and what is JSON in it as data."""
    moment = datetime.fromtimestamp(row["time"], UTC).isoformat(timespec="milliseconds")
    sampling = None if row["sampling"] is None else json.loads(row["sampling"])
    return {**row, "time": moment, "sampling": sampling}


def _write_json_lines(rows: Iterable[dict[str, Any]], output: TextIO) -> None:
    for row in rows:
        output.write(json.dumps(row, ensure_ascii=False) + "\n")


def _write_csv(rows: Iterable[dict[str, Any]], output: TextIO) -> None:
    writer = csv.DictWriter(output, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        sampling = None if row["sampling"] is None else json.dumps(row["sampling"])
        writer.writerow({**row, "sampling": sampling})


def _write_table(rows: Iterable[dict[str, Any]], output: TextIO) -> None:
    header = [*_SHOWN, "prompt", "cached", "output", "first_s", "total_s"]
    lines = [header, *([_cell(row[name]) for name in (*_SHOWN, *_COUNTS)] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        output.write("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n")


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
