# SPDX-License-Identifier: Apache-2.0
"""`tandem serve`: a Triton server over a model repository, in the foreground."""

import re
import sys
from contextlib import suppress
from pathlib import Path

import click

from tandem_backend.serving.launcher import LaunchError, TritonServer, interrupt_on_signals
from tandem_backend.serving.supervisor import Supervisor

_LOG_ARGS = {
    "error": ("--log-info=false", "--log-warning=false"),
    "warning": ("--log-info=false",),
    "info": (),
    "verbose": ("--log-verbose=1",),
}


_KEY = re.compile(r"[\w.-]{16,}", re.ASCII)  # Triton server gives ; : , and = a meaning


def _checked_key(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value and not _KEY.fullmatch(value):
        raise click.BadParameter("must be 16 or more letters, digits, '_', '-' and '.'")
    return value or None


@click.command()
@click.option(
    "--model-repository",
    type=click.Path(path_type=Path),
    default=Path("model_repository"),
    show_default="./model_repository",
    help="Folder with the models to serve.",
)
@click.option("--triton-server", metavar="PATH", help="Triton server's folder or binary [env: TANDEM_TRITON_SERVER].")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all.")
@click.option("--http-port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: a free port.")
@click.option("--grpc-port", type=click.IntRange(0, 65535), default=8001, show_default=True, help="0: a free port.")
@click.option("--metrics-port", type=click.IntRange(0, 65535), default=8002, show_default=True, help="0: a free port.")
@click.option("--log-level", type=click.Choice(list(_LOG_ARGS)), default="warning", show_default=True)
@click.option(
    "--ready-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=300,
    show_default=True,
    help="Seconds the models get to load.",
)
@click.option(
    "--exit-timeout",
    type=click.IntRange(min=0),
    default=30,
    show_default=True,
    help="Seconds running requests get to finish after SIGTERM or Ctrl-C; then they are answered UNAVAILABLE.",
)
@click.option(
    "--heartbeat-timeout",
    type=click.FloatRange(min=2),
    default=30,
    show_default=True,
    help="A model that shows no sign of life for so many seconds is loaded anew.",
)
@click.option(
    "--repository-key",
    envvar="TANDEM_REPOSITORY_KEY",
    show_envvar=True,
    metavar="KEY",
    callback=_checked_key,
    help="What loading and unloading models by hand asks for; without one nobody can.",
)
@click.argument("server_args", nargs=-1, type=click.UNPROCESSED)
def serve(
    model_repository: Path,
    triton_server: str | None,
    host: str,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    log_level: str,
    ready_timeout: float,
    exit_timeout: int,
    heartbeat_timeout: float,
    repository_key: str | None,
    server_args: tuple[str, ...],
) -> None:
    """Serve a model repository with Triton server until SIGTERM or Ctrl-C.

    A model whose stub is dead or stuck is loaded anew, a server that crashed is started anew. SERVER_ARGS after `--` go
    to tritonserver as they are. Exits with the server's code.
    """
    server = TritonServer(
        model_repository,
        triton_server=triton_server,
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        foreground=True,
        extra_args=(*_LOG_ARGS[log_level], *server_args),
        ready_timeout_s=ready_timeout,
        exit_timeout_s=exit_timeout,
        repository_key=repository_key,
    )
    interrupt_on_signals()
    try:
        with server:
            _announce(server)
            Supervisor(
                server,
                heartbeat_timeout,
                load_timeout_s=ready_timeout,
                say=lambda line: click.echo(f"tandem: {line}", err=True),
                on_restart=lambda: _announce(server),
            ).run()
    except LaunchError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        pass  # the server has been stopped on the way out of the block
    code = server.process.wait()
    sys.exit(code if code >= 0 else 128 - code)


def _announce(server: TritonServer) -> None:
    text = f"""
Tandem is ready:
  HTTP     http://{server.http_url}
  gRPC     {server.grpc_url}
  metrics  http://{server.metrics_url}/metrics
"""
    for front in _fronts(server):
        text += f"""
  curl -N http://{server.http_url}/v2/models/{front}/generate_stream \\
      -d '{{"text_input": "def parse_args(", "stream": true, "max_tokens": 64}}'
"""
    click.echo(text, err=True)


def _fronts(server: TritonServer) -> list[str]:
    """The models that take HTTP generate; none where the server's repository API is closed to us."""
    with suppress(OSError):
        names = {model["name"]: None for model in server.api.models()}
        return [name for name in names if server.api.forwards_to(name) is not None]
    return []
