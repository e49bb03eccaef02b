# SPDX-License-Identifier: Apache-2.0
"""`tandem health`: whether models of a running server are alive, for whoever restarts it."""

import sys
import time

import click

from tandem_backend.serving.server_api import ServerApi


@click.command()
@click.option("--http", "http_url", default="127.0.0.1:8000", show_default=True, metavar="HOST:PORT")
@click.option("--metrics", "metrics_url", default="127.0.0.1:8002", show_default=True, metavar="HOST:PORT")
@click.option("--model", "models", multiple=True, default=["tandem"], show_default=True, help="May be repeated.")
@click.option(
    "--heartbeat-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=30,
    show_default=True,
    help="Seconds that the last sign of life of a model may be old.",
)
def health(http_url: str, metrics_url: str, models: tuple[str, ...], heartbeat_timeout: float) -> None:
    """Exit with 0 if each model is ready and its heartbeat is fresh, else with 1 and say why.

    Triton server's own endpoints keep saying 200 when a model's process is dead or stuck; the heartbeat does not.
    """
    faults = _faults(ServerApi(http_url, metrics_url), models, heartbeat_timeout)
    for fault in faults:
        click.echo(fault, err=True)
    sys.exit(1 if faults else 0)


def _faults(api: ServerApi, models: tuple[str, ...], heartbeat_timeout_s: float) -> list[str]:
    try:
        heartbeats = api.heartbeats()
    except OSError as error:
        return [f"{api.metrics_url}: {error}"]
    found = []
    for model in models:
        age_s = time.time() - heartbeats.get(model, 0)
        if not api.is_model_ready(model):
            found.append(f"{model}: not ready on {api.http_url}")
        elif model not in heartbeats:
            found.append(f"{model}: has no heartbeat")
        elif age_s > heartbeat_timeout_s:
            found.append(f"{model}: last heartbeat {age_s:.0f} s ago, allowed are {heartbeat_timeout_s:g}")
    return found
