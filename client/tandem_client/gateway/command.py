# SPDX-License-Identifier: Apache-2.0
"""The commands `tandem gateway` and `tandem gateway-key`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError

from tandem_client.gateway.settings import ENV_PREFIX, Settings


def _shown(default: Any) -> str:
    return ", ".join(default) if isinstance(default, tuple) else str(default)


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    """An option for each setting; its default is told, not set, so that the environment counts."""
    for name, field in reversed(Settings.model_fields.items()):
        if name == "model_aliases":  # --alias
            continue
        option, is_many = "--" + name.replace("_", "-"), isinstance(field.default, tuple)
        default = "" if field.default in (None, ()) else f"  [default: {_shown(field.default)}]"
        kind: dict[str, Any] = {"metavar": "NUMBER" if isinstance(field.default, int | float) else "TEXT"}
        if isinstance(field.default, bool):
            kind, option = {"is_flag": True, "default": None}, f"{option}/--no-{option[2:]}"
        command = click.option(
            option.removesuffix("s") if is_many else option,
            name,
            multiple=is_many,
            help=f"{field.description}{default}  [env: {ENV_PREFIX}{name.upper()}]",
            **kind,
        )(command)
    return command


@click.command()
@_options
@click.option("--alias", "aliases", multiple=True, metavar="NAME=MODEL", help="A further name of a model; repeatable.")
def gateway(aliases: tuple[str, ...], **given: Any) -> None:
    """Serve the OpenAI API in front of a Triton server that runs Tandem.

    Chats, completions and responses at /v1, /health, /metrics. SIGTERM lets running answers end first.
    """
    from tandem_client.gateway.access import Access
    from tandem_client.gateway.serve import serve
    from tandem_client.gateway.stateful import StatefulHooks

    values = {name: value for name, value in given.items() if value not in (None, ())}
    if aliases:
        values["model_aliases"] = dict(_alias(text) for text in aliases)
    try:
        settings = Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise click.UsageError(f"{name}: {first['msg']}, got {str(first['input'])[:100]!r}") from error
    try:
        Access(settings)  # better known before anything runs
    except (OSError, ValueError) as error:
        raise click.ClickException(f"keys_file: {error}") from error
    try:
        hooks = StatefulHooks(settings)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    serve(settings, hooks)


def _alias(text: str) -> tuple[str, str]:
    name, separator, model = text.partition("=")
    if not (name and separator and model):
        raise click.BadParameter(f"must be NAME=MODEL, got {text!r}", param_hint="--alias")
    return name, model


@click.command()
@click.argument("keys_file", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("name")
@click.option("--requests-per-minute", type=click.IntRange(min=1), help="Limit of requests; none by default.")
@click.option("--max-concurrent", type=click.IntRange(min=1), help="Limit of requests at once; none by default.")
@click.option(
    "--cache-salt", metavar="TEXT", help="Keys of one salt share cached prefixes; by default each has its own."
)
def gateway_key(keys_file: Path, name: str, **limits: int | str | None) -> None:
    """Make an API key called NAME and print it.

    KEYS_FILE gets its hash and its limits; the key itself is kept nowhere. A running gateway reads the file again at
    POST /admin/keys/reload.
    """
    from tandem_client.gateway.access import add_key

    try:
        click.echo(add_key(keys_file, name, **limits))
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
