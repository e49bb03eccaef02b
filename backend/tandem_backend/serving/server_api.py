# SPDX-License-Identifier: Apache-2.0
"""What the launcher and the supervisor ask a running Triton server."""

import http.client
import json
import math
import re
from dataclasses import dataclass
from typing import Any

_HEARTBEAT = re.compile(r"^tandem_heartbeat_timestamp_seconds\{(.*)\} (\S+)$", re.MULTILINE)
_KEY_HEADER = "tandem-model-repository-key"


@dataclass(slots=True)
class ServerApi:
    """One server's services, as "HOST:PORT". Loading and unloading models takes its gRPC.

    They are for the holder of `key` alone: any client could do it otherwise.
    """

    http_url: str
    metrics_url: str
    grpc_url: str | None = None
    key: str | None = None

    def server_args(self) -> list[str]:
        """The server's arguments that ask for the key; without one anybody may load and unload."""
        restricted = f"model-repository:{_KEY_HEADER}={self.key}"
        return [f"--http-restricted-api={restricted}", f"--grpc-restricted-protocol={restricted}"] if self.key else []

    def is_ready(self) -> bool:
        return self._ask("GET", "/v2/health/ready")[0] == 200

    def is_model_ready(self, model: str) -> bool:
        return self._ask("GET", f"/v2/models/{model}/ready")[0] == 200

    def has_metrics(self) -> bool:
        return _ask(self.metrics_url, "GET", "/metrics", {}, 5)[0] == 200

    def models(self) -> list[dict[str, Any]]:
        """Name, version, state and reason of every model; raises OSError when the server does not answer."""
        status, body = self._ask("POST", "/v2/repository/index")
        if status != 200:
            raise OSError(f"the model repository's index: status {status} {body.decode(errors='replace')}")
        found: list[dict[str, Any]] = json.loads(body)
        return found

    def heartbeats(self) -> dict[str, float]:
        """When each model was last alive, as Unix time; of several versions the one that is longest silent.

        Raises OSError when the server does not answer.
        """
        status, body = _ask(self.metrics_url, "GET", "/metrics", {}, 5)
        if status != 200:
            raise OSError(f"the metrics: status {status}")
        latest: dict[tuple[str, str], float] = {}  # by model and version, of all its stubs: see OverlapNumber
        for labels, value in _HEARTBEAT.findall(body.decode(errors="replace")):
            named = dict(re.findall(r'(\w+)="(.*?)"', labels))
            key = (named["model"], named.get("version", ""))
            latest[key] = max(float(value), latest.get(key, 0.0))
        found: dict[str, float] = {}
        for (model, _), beat_s in latest.items():
            found[model] = min(beat_s, found.get(model, math.inf))
        return found

    def forwards_to(self, model: str) -> str | None:
        """The model that `model` is a front of, by its config.pbtxt; None for other models."""
        status, body = self._ask("GET", f"/v2/models/{model}/config")
        parameters = json.loads(body).get("parameters", {}) if status == 200 else {}
        name: str | None = parameters.get("model_name", {}).get("string_value")
        return name

    def unload(self, model: str) -> None:
        """Returns at once; the model's last streams may still run. Raises OSError when it is refused."""
        self._control(model, "unload", 10)

    def load(self, model: str, timeout_s: float) -> None:
        """Returns when the model is loaded. Raises OSError with the server's reason."""
        self._control(model, "load", timeout_s)

    def _control(self, model: str, action: str, timeout_s: float) -> None:
        """By gRPC: see the README's traps of Triton server for what loading over HTTP does to other requests."""
        from tritonclient.grpc import InferenceServerClient  # here: `tandem health` runs often and needs none of it
        from tritonclient.utils import InferenceServerException

        headers = {f"triton-grpc-protocol-{_KEY_HEADER}": self.key} if self.key else {}
        try:
            with InferenceServerClient(self.grpc_url, channel_args=[("grpc.enable_http_proxy", 0)]) as client:
                getattr(client, f"{action}_model")(model, headers=headers, client_timeout=timeout_s)
        except InferenceServerException as error:
            raise OSError(f"{action} of {model}: {error}") from error

    def _ask(self, method: str, path: str, timeout_s: float = 5) -> tuple[int, bytes]:
        return _ask(self.http_url, method, path, {_KEY_HEADER: self.key} if self.key else {}, timeout_s)


def _ask(url: str, method: str, path: str, headers: dict[str, str], timeout_s: float) -> tuple[int, bytes]:
    """Status and body; status 0 when nobody answers."""
    connection = http.client.HTTPConnection(url, timeout=timeout_s)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()
