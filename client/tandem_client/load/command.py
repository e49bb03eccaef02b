# SPDX-License-Identifier: Apache-2.0
"""The command `tandem load`."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tandem_client.aio import AsyncTandemClient
from tandem_client.commands import exit_status, parse_sampling, parse_url
from tandem_client.load.figures import figures, render
from tandem_client.load.plot import check_matplotlib, plot
from tandem_client.load.runner import Level, LoadRequest, LoadRunner
from tandem_client.payload import GenerateOptions, build_payload
from tandem_client.transport import DEFAULT_MODEL, DEFAULT_URL

PROMPTS = (
    "def read_lines(path):\n",
    "import json\n\ndef load(path):\n",
    "The module `os` provides",
    "class Stack:\n    def __init__(self):\n",
)
SOURCES = ("prompt", "messages", "input_ids")


def _numbers(kind: Callable[[str], float]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    def parse(ctx: click.Context, param: click.Parameter, value: str | None) -> list[float] | None:
        if value is None:
            return None
        try:
            numbers = [kind(part) for part in value.split(",")]
        except ValueError as error:
            raise click.BadParameter(f"must be numbers joined by commas, got {value!r}") from error
        if any(not 0 < number < 100_000 for number in numbers):
            raise click.BadParameter(f"each must be above 0 and below 100000, got {value!r}")
        return numbers

    return parse


def _read_prompts(ctx: click.Context, param: click.Parameter, path: Path | None) -> list[LoadRequest]:
    if path is None:
        return [(text, {}) for text in PROMPTS]
    prompts = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if text.strip():
            prompts.append(_read_prompt(f"{path}:{number}", text))
    if not prompts:
        raise click.BadParameter(f"{path}: holds no prompt")
    return prompts


def _read_prompt(place: str, text: str) -> LoadRequest:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"{place}: not valid JSON: {error}") from error
    found = [name for name in SOURCES if name in line] if isinstance(line, dict) else []
    if len(found) != 1:
        raise click.BadParameter(f"{place}: must be an object with one of {', '.join(SOURCES)}")
    if "messages" in line:
        return None, {"messages": line["messages"]}
    return (line["prompt"], {}) if "prompt" in line else (None, {"input_ids": line["input_ids"]})


def _can_plot(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """What can't be drawn is better known before the work than after it."""
    if path is not None:
        try:
            check_matplotlib()
        except ImportError as error:
            raise click.UsageError(str(error)) from error
    return _in_a_folder(ctx, param, path)


def _in_a_folder(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and not path.absolute().parent.is_dir():
        raise click.BadParameter(f"the folder {path.parent} does not exist")
    return path


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_NEW_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command()
@click.option(
    "--url",
    default=DEFAULT_URL,
    envvar="TANDEM_URL",
    show_envvar=True,
    show_default=True,
    callback=parse_url,
    metavar="HOST:PORT",
    help="gRPC service of the server.",
)
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="Model on the server.")
@click.option(
    "--concurrency", callback=_numbers(int), metavar="N,N,...", help="Requests at a time.  [default: 1,2,4,8]"
)
@click.option(
    "--rate", callback=_numbers(float), metavar="R,R,...", help="Requests a second instead, at random moments."
)
@click.option(
    "--requests", "num_requests", type=click.IntRange(min=1), default=32, show_default=True, help="At every level."
)
@click.option(
    "--warmup", type=click.IntRange(min=0), default=4, show_default=True, help="Requests before that don't count."
)
@click.option("--prompts", callback=_read_prompts, type=_FILE, help="JSON lines with prompt, messages or input_ids.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--sampling", callback=parse_sampling, metavar="JSON", help="Further sampling parameters, an object.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="Limit of an answer.")
@click.option("--plot", "plot_file", type=_NEW_FILE, callback=_can_plot, metavar="FILE.png", help="Draw the sweep.")
@click.option("--json", "json_file", type=_NEW_FILE, callback=_in_a_folder, help="Append the result here too.")
def load(
    url: str,
    model: str,
    concurrency: Sequence[float] | None,
    rate: Sequence[float] | None,
    num_requests: int,
    warmup: int,
    prompts: Sequence[LoadRequest],
    max_tokens: int,
    sampling: Mapping[str, Any] | None,
    timeout: float | None,
    plot_file: Path | None,
    json_file: Path | None,
) -> None:
    """Send many requests and measure what users would see.

    One level after the other: so many requests at a time, or so many a second. Prints a table and, as the last line,
    the result as one JSON object. The exit status is 1 when at some level no request was answered.
    """
    if concurrency is not None and rate is not None:
        raise click.UsageError("--concurrency and --rate: give one of them")
    levels = [Level(rate_per_s=each) for each in rate or ()]
    levels = levels or [Level(concurrency=int(each)) for each in concurrency or (1, 2, 4, 8)]
    common: GenerateOptions = {"max_tokens": max_tokens, "sampling": sampling, "timeout_s": timeout}
    requests = [(text, GenerateOptions(**source, **common)) for text, source in prompts]
    for text, options in requests:
        try:
            build_payload(text, **options)
        except (ValueError, TypeError) as error:
            raise click.UsageError(str(error)) from error
    with exit_status():
        measured = asyncio.run(_sweep(url, model, requests, levels, num_requests, warmup))
    result = {"benchmark": "load", "model": model, "max_tokens": max_tokens, "warmup": warmup, "levels": measured}
    line = json.dumps(_rounded(result))
    click.echo(render(measured))
    click.echo(line)
    if json_file is not None:
        with json_file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    if plot_file is not None:
        plot(measured, f"{model}, {max_tokens} tokens at most", plot_file)
    if any(level["num_errors"] == level["num_requests"] for level in measured):
        raise click.exceptions.Exit(1)


async def _sweep(
    url: str,
    model: str,
    requests: Sequence[LoadRequest],
    levels: Sequence[Level],
    num_requests: int,
    num_warmup: int,
) -> list[dict[str, Any]]:
    measured = []
    async with AsyncTandemClient(url, model) as client:
        runner = LoadRunner(client, requests)
        for level in levels:
            click.echo(f"load {level.label}: {num_warmup} + {num_requests} requests", err=True)
            measured.append(figures(await runner.run(level, num_requests, num_warmup)))
    return measured


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value
