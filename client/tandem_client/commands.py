# SPDX-License-Identifier: Apache-2.0
"""The commands `tandem generate` and `tandem chat`."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import click

from tandem_client.errors import ConnectionFailedError, TandemClientError
from tandem_client.payload import GenerateOptions
from tandem_client.sync import Session, TandemClient
from tandem_client.transport import DEFAULT_MODEL, DEFAULT_URL, check_url
from tandem_client.types import Chunk, Usage

INTERRUPTED = 130  # what a shell reports for a command ended by Ctrl-C


def parse_sampling(ctx: click.Context, param: click.Parameter, value: str | None) -> dict[str, Any] | None:
    if value is None:
        return None
    try:
        parsed = json.loads(value)
    except ValueError as error:
        raise click.BadParameter(f"not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise click.BadParameter('must be a JSON object, such as {"ignore_eos": true}')
    return parsed


def parse_url(ctx: click.Context, param: click.Parameter, value: str) -> str:
    try:
        return check_url(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


_REQUEST_OPTIONS: tuple[Callable[[Callable[..., None]], Callable[..., None]], ...] = (
    click.option(
        "--url",
        default=DEFAULT_URL,
        envvar="TANDEM_URL",
        show_envvar=True,
        show_default=True,
        callback=parse_url,
        metavar="HOST:PORT",
        help="gRPC service of the server.",
    ),
    click.option("--model", default=DEFAULT_MODEL, show_default=True, help="Model on the server."),
    click.option("--max-tokens", type=int, help="Limit of output tokens of an answer."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before TEXT; may be repeated."),
    click.option("--system", metavar="TEXT", help="System message of the chat."),
    click.option("--sampling", callback=parse_sampling, metavar="JSON", help="Further sampling parameters, an object."),
    click.option("--timeout", type=float, metavar="SECONDS", help="Time limit of an answer."),
    click.option("--stats", is_flag=True, help="Print counts and speed of an answer to stderr."),
)


def _request_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_REQUEST_OPTIONS):
        command = option(command)
    return command


@click.command()
@click.argument("prompt")
@click.option("--chat", is_flag=True, help="Send PROMPT as a user message; implied by --system.")
@_request_options
def generate(prompt: str, chat: bool, url: str, model: str, system: str | None, stats: bool, **given: Any) -> None:
    """Print the answer to PROMPT as it arrives; "-" reads PROMPT from standard input.

    The exit status is 1 after an error and 130 after Ctrl-C, which cancels the request on the server.
    """
    options = _options(**given)
    with exit_status(), TandemClient(url, model) as client:
        text: str | None = sys.stdin.read() if prompt == "-" else prompt
        if chat or system is not None:
            options["messages"] = [*_system_messages(system), {"role": "user", "content": text}]
            text = None
        with client.generate(text, **options) as chunks:
            _print_answer(chunks, stats)


@click.command()
@_request_options
def chat(url: str, model: str, system: str | None, stats: bool, **given: Any) -> None:
    """Talk with the model, which keeps the conversation; one line a turn, from a terminal or a pipe.

    /reset forgets the conversation; /quit or Ctrl-D ends. Ctrl-C during an answer cancels that answer only.
    """
    options = _options(**given)
    interactive = sys.stdin.isatty()
    with exit_status(), TandemClient(url, model) as client, client.session() as session:
        for line in _read_lines(interactive):
            if line == "/quit":
                break
            if line == "/reset":
                session.close()
                continue
            try:
                _take_turn(session, line, system, options, stats)
            except TandemClientError as error:
                if not interactive:
                    raise
                click.echo(f"\nError: {error} (/reset starts a new conversation)", err=True)


def _take_turn(session: Session, line: str, system: str | None, options: GenerateOptions, stats: bool) -> None:
    opening = [] if session.is_open else _system_messages(system)
    turn: GenerateOptions = {**options, "messages": [*opening, {"role": "user", "content": line}]}
    with session.generate(**turn) as chunks:
        try:
            _print_answer(chunks, stats)
        except KeyboardInterrupt:
            click.echo("\n(cancelled)", err=True)


def _options(
    max_tokens: int | None,
    stop: tuple[str, ...],
    sampling: Mapping[str, Any] | None,
    timeout: float | None,
) -> GenerateOptions:
    for name, value in (("max_tokens", max_tokens), ("stop", stop or None)):
        if value is not None and name in (sampling or {}):
            raise click.UsageError(f"--{name.replace('_', '-')}: also given in --sampling")
    if timeout is not None and timeout <= 0:
        raise click.UsageError(f"--timeout: must be above 0, got {timeout}")
    return {"max_tokens": max_tokens, "stop": stop or None, "sampling": sampling, "timeout_s": timeout}


def _system_messages(system: str | None) -> list[dict[str, str]]:
    return [] if system is None else [{"role": "system", "content": system}]


def _print_answer(chunks: Iterable[Chunk], stats: bool) -> None:
    """The first answer as it comes; further ones, where `n` asks for them, whole and behind it."""
    usages: dict[int, Usage | None] = {0: None}
    later: dict[int, str] = {}
    for chunk in chunks:
        if chunk.choice_index:
            later[chunk.choice_index] = later.get(chunk.choice_index, "") + chunk.text
        else:
            click.echo(chunk.text, nl=False)
        usages[chunk.choice_index] = chunk.usage
    click.echo()
    for index in sorted(later):
        click.echo(f"--- choice {index}\n{later[index]}")
    for _, usage in sorted(usages.items()):
        if stats and usage is not None:
            click.echo(describe(usage), err=True)


def describe(usage: Usage) -> str:
    """Usage in one line."""
    cached = f" ({usage.num_cached_tokens} kept)" if usage.num_cached_tokens else ""
    rounds = f" in {usage.num_rounds} rounds" if usage.num_rounds else ""
    parts = [f"{usage.num_input_tokens} tokens in{cached}", f"{usage.num_output_tokens} out{rounds}"]
    if usage.time_to_first_token_s is not None:
        parts.append(f"first after {usage.time_to_first_token_s * 1000:.0f} ms")
    if usage.decode_tokens_per_s is not None:
        parts.append(f"{usage.decode_tokens_per_s:.1f} tokens/s")
    if usage.num_draft_tokens:
        shares = ", ".join(f"{name} {item.share:.0%}" for name, item in usage.drafters.items())
        accepted = f"{usage.num_accepted_tokens} of {usage.num_draft_tokens} draft tokens accepted"
        parts.append(f"{usage.acceptance_len:.2f} tokens a round")
        parts.append(f"{accepted} ({shares})" if shares else accepted)
    return ", ".join(parts)


def _read_lines(interactive: bool) -> Iterator[str]:
    """Lines that are not blank, up to the end of the input; Ctrl-C at the prompt only empties the line."""
    with suppress(ImportError):
        import readline  # noqa: F401  (gives input() editing and history)
    while True:
        try:
            line = input("> " if interactive else "")
        except EOFError:
            if interactive:
                click.echo()
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            click.echo()
            continue
        if line.strip():
            yield line


@contextmanager
def exit_status() -> Iterator[None]:
    try:
        yield
    except ConnectionFailedError as error:
        raise click.ClickException(f"{error} (is the server running? `tandem serve` starts one)") from error
    except TandemClientError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        click.echo(err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None
