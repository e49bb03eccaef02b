# SPDX-License-Identifier: Apache-2.0
"""`tandem gateway` as a process of its own, on a free port."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

START_TIMEOUT_S = 30.0


class GatewayProcess:
    """A running gateway: its URL, and the signal that ends it."""

    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self._process, self.url = process, url

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def address(self) -> str:
        """host:port."""
        return self.url.removeprefix("http://")

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self, timeout_s: float = 30.0) -> int:
        return self._process.wait(timeout_s)


@contextmanager
def running_gateway(backend_url: str, *options: str) -> Iterator[GatewayProcess]:
    """Start a gateway, yield it once it listens, and end it."""
    run = "from tandem_client.cli import main; main()"
    command = [sys.executable, "-c", run, "gateway", "--port", "0", "--backend-url", backend_url, *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    killer = threading.Timer(START_TIMEOUT_S, process.kill)
    killer.start()
    assert process.stderr is not None
    found = next((match for line in process.stderr if (match := re.search(r"http://[\d.]+:\d+", line))), None)
    killer.cancel()
    threading.Thread(target=process.stderr.read, daemon=True).start()
    try:
        assert found is not None, "the gateway did not start"
        yield GatewayProcess(process, found[0])
    finally:
        process.terminate()
        process.wait(30)
