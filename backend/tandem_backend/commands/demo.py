# SPDX-License-Identifier: Apache-2.0
"""`tandem demo`: three answers streamed from a Triton server that lives as long as the demo."""

import time
from dataclasses import dataclass
from pathlib import Path

import click
from tandem_client import TandemClient, TandemClientError, Usage

from tandem_backend.serving.launcher import LaunchError, TritonServer, interrupt_on_signals


@dataclass(frozen=True, slots=True)
class _Example:
    title: str
    text: str
    is_chat: bool = False  # the text is a message, not the start of the answer


EXAMPLES = (
    _Example("chat", "What does json.dumps do?", is_chat=True),
    _Example("code", 'def bisect_left(a, x, lo=0, hi=None, *, key=None):\n    """Return the index where to insert'),
    _Example("prose", "### `shutil.copytree(src, dst)`\n\nRecursively copy an entire directory tree"),
)


@click.command()
@click.option(
    "--model-repository",
    type=click.Path(path_type=Path),
    default=Path("model_repository"),
    show_default="./model_repository",
    help="Folder with the models to serve.",
)
@click.option("--triton-server", metavar="PATH", help="Triton server's folder or binary [env: TANDEM_TRITON_SERVER].")
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True)
def demo(model_repository: Path, triton_server: str | None, max_tokens: int) -> None:
    """Start Triton server on free ports, stream the answers to three prompts, stop it."""
    interrupt_on_signals()
    click.secho(f"Starting Triton server with {model_repository} ...", dim=True)
    started = time.monotonic()
    try:
        with (
            TritonServer(model_repository, triton_server=triton_server) as server,
            TandemClient(server.grpc_url) as client,
        ):
            click.secho(f"Ready after {time.monotonic() - started:.1f} s on {server.grpc_url} (gRPC).", dim=True)
            for example in EXAMPLES:
                _stream(client, example, max_tokens)
    except (LaunchError, TandemClientError) as error:
        raise click.ClickException(str(error)) from error
    click.secho("\nTriton server has stopped.", dim=True)


def _stream(client: TandemClient, example: _Example, max_tokens: int) -> None:
    click.secho(f"\n--- {example.title} ---", bold=True)
    click.secho(example.text, fg="cyan", nl=example.is_chat)
    messages = [{"role": "user", "content": example.text}] if example.is_chat else None
    sent = time.monotonic()
    chunks = client.generate(None if messages else example.text, messages=messages, max_tokens=max_tokens)
    first_token_s = None
    for chunk in chunks:
        if first_token_s is None:
            first_token_s = time.monotonic() - sent
        click.echo(chunk.text, nl=False)
        if chunk.usage is not None:
            _report(chunk.usage, first_token_s)


def _report(usage: Usage, first_token_s: float) -> None:
    rate = usage.decode_tokens_per_s
    parts = [f"{usage.num_output_tokens} tokens", f"first token after {first_token_s * 1000:.0f} ms"]
    if rate is not None:
        parts.append(f"{rate:.0f} tokens/s")
    click.secho(f"\n[{', '.join(parts)}]", dim=True)
