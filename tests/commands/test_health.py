# SPDX-License-Identifier: Apache-2.0
"""`tandem health` against an HTTP server that answers as Triton server does."""

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from click.testing import CliRunner, Result
from tandem_backend.commands.health import health

pages: dict[str, tuple[int, str]] = {}


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, body = pages.get(self.path, (404, ""))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    pages.clear()
    server = HTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def _heartbeat(model: str, age_s: float) -> str:
    return f'tandem_heartbeat_timestamp_seconds{{model="{model}",version="1"}} {time.time() - age_s}\n'


def _check(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(health, [f"--http={url}", f"--metrics={url}", *arguments])


def test_a_ready_model_with_a_fresh_heartbeat_is_healthy(url: str) -> None:
    pages["/metrics"] = (200, _heartbeat("tandem", 1) + _heartbeat("other", 1000))
    pages["/v2/models/tandem/ready"] = (200, "")
    result = _check(url)
    assert (result.exit_code, result.output) == (0, "")


def test_an_old_heartbeat_is_told_whatever_triton_server_says(url: str) -> None:
    pages["/metrics"] = (200, _heartbeat("tandem", 60))
    pages["/v2/models/tandem/ready"] = (200, "")
    result = _check(url)
    assert (result.exit_code, result.output) == (1, "tandem: last heartbeat 60 s ago, allowed are 30\n")
    assert _check(url, "--heartbeat-timeout=90").exit_code == 0


def test_every_named_model_must_be_there(url: str) -> None:
    pages["/metrics"] = (200, _heartbeat("tandem", 1))
    pages["/v2/models/tandem/ready"] = pages["/v2/models/silent/ready"] = (200, "")
    result = _check(url, "--model=tandem", "--model=silent", "--model=unloaded")
    assert result.exit_code == 1
    assert result.output == f"silent: has no heartbeat\nunloaded: not ready on {url}\n"


def test_a_server_that_does_not_answer_is_unhealthy() -> None:
    result = _check("127.0.0.1:1")
    assert (result.exit_code, result.output) == (1, "127.0.0.1:1: the metrics: status 0\n")
