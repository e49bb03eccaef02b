# SPDX-License-Identifier: Apache-2.0
"""Triton's `triton_python_backend_utils` as far as Tandem uses it; strict where the real one fails."""

import json
import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class TritonModelException(Exception):
    pass


class TritonError:
    INTERNAL = "INTERNAL"
    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"

    def __init__(self, message: str, code: str = INTERNAL) -> None:
        self._message = message
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> str:
        return self._code


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name = name
        self._array = array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor], error: TritonError | None = None) -> None:
        self._tensors = output_tensors
        self._error = error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def value(self, name: str) -> Any:
        """The elements of an output as a list, or None when the response lacks it."""
        found = [tensor.as_numpy().tolist() for tensor in self._tensors if tensor.name() == name]
        return found[0] if found else None


class Logger:
    lines: list[str] = []  # noqa: RUF012 (the real one is global too; a fixture empties it)

    @classmethod
    def log_info(cls, text: str) -> None:
        cls.lines.append(text)

    log_warn = log_error = log_info


class Metric:
    """One time series; counters only grow, gauges are set."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.number = 0.0
        self.num_writes = 0

    def increment(self, value: float) -> None:
        if self._kind == MetricFamily.COUNTER and value < 0:
            raise TritonModelException("TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically")
        self.number += value
        self.num_writes += 1

    def set(self, value: float) -> None:
        if self._kind == MetricFamily.COUNTER:
            raise TritonModelException("TRITONSERVER_METRIC_KIND_COUNTER does not support Set")
        self.number = float(value)
        self.num_writes += 1

    def value(self) -> float:
        return self.number


class MetricFamily:
    COUNTER = "counter"
    GAUGE = "gauge"
    series: dict[str, Metric] = {}  # noqa: RUF012 (the server's registry, by name and labels; a fixture empties it)

    def __init__(self, *, name: str, description: str, kind: str) -> None:
        assert description
        self._name = name
        self._kind = kind

    def Metric(self, *, labels: dict[str, str]) -> Metric:
        text = ",".join(f'{name}="{value}"' for name, value in labels.items())
        return self.series.setdefault(f"{self._name}{{{text}}}", Metric(self._kind))


class ResponseSender:
    """Records responses. `broken_sends` are the numbers of the sends that raise and deliver nothing."""

    def __init__(self, broken_sends: frozenset[int] = frozenset()) -> None:
        self.responses: list[InferenceResponse] = []
        self.num_finals = 0
        self.cancelled = False
        self.done: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._broken_sends = broken_sends
        self._num_sends = 0

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        self._num_sends += 1
        if self.num_finals:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        if self._num_sends in self._broken_sends:
            raise TritonModelException("Failed to increase the shared memory pool size")
        if response is None and flags != TRITONSERVER_RESPONSE_COMPLETE_FINAL:
            raise TritonModelException("Inference Response object must be provided when the response flags is set to 0")
        if response is not None:
            self.responses.append(response)
        if flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL:
            self.num_finals += 1
            self.done.put(True)

    def is_cancelled(self) -> bool:
        return self.cancelled

    def wait(self, timeout_s: float = 10.0) -> list[InferenceResponse]:
        """All responses, once FINAL has come; fails the test if it does not come."""
        self.done.get(timeout=timeout_s)
        return self.responses

    def wait_for_first(self, timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.responses:
            assert time.monotonic() < deadline, "no response came"
            time.sleep(0.002)

    def text(self) -> str:
        return "".join(response.value("text_output")[0] for response in self.responses)


class InferenceRequest:
    """Both what a model receives and what it sends by BLS; `handler` answers the latter."""

    handler: Callable[["InferenceRequest"], Iterator[InferenceResponse]]

    def __init__(
        self,
        model_name: str = "",
        requested_output_names: list[str] | None = None,
        inputs: list[Tensor] | None = None,
        request_id: str = "",
        correlation_id: int | str = 0,
        flags: int = 0,
        parameters: dict[str, Any] | None = None,
        timeout: int = 0,
    ) -> None:
        if any(isinstance(value, float) for value in (parameters or {}).values()):
            raise TritonModelException("Expect parameters values to have type bool/int/str, found type float")
        self.model_name = model_name
        self.sender = ResponseSender()
        self._requested_output_names = requested_output_names or []
        self._inputs = inputs or []
        self._request_id = request_id
        self._correlation_id = correlation_id
        self._flags = flags
        self._timeout_us = timeout
        self._parameters = json.dumps(parameters or {})

    @classmethod
    def of(
        cls, *, sequence_id: int | str = 0, flags: int = 0, parameters: str = "{}", timeout_us: int = 0, **inputs: Any
    ) -> "InferenceRequest":
        """A request as it reaches a model; text becomes bytes as in Triton, lists become 1-D tensors."""
        tensors = [Tensor(name, _as_tensor(value)) for name, value in inputs.items()]
        request = cls(correlation_id=sequence_id, flags=flags, inputs=tensors, timeout=timeout_us)
        request._parameters = parameters
        return request

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def requested_output_names(self) -> list[str]:
        return self._requested_output_names

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def flags(self) -> int:
        return self._flags

    def timeout(self) -> int:
        return self._timeout_us

    def parameters(self) -> str:
        return self._parameters

    def get_response_sender(self) -> ResponseSender:
        return self.sender

    def exec(self, decoupled: bool) -> Iterator[InferenceResponse]:
        assert decoupled
        return type(self).handler(self)


def _as_tensor(value: Any) -> np.ndarray:
    items = value if isinstance(value, list) else [value]
    if all(isinstance(item, str | bytes) for item in items):
        return np.array([item.encode() if isinstance(item, str) else item for item in items], dtype=object)
    return np.array(items, dtype=bool if isinstance(items[0], bool) else np.int64)
