# SPDX-License-Identifier: Apache-2.0
"""Plain calls of a Triton server, without our client: tritonclient's gRPC streams and HTTP generate."""

import http.client
import json
import queue
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
from tritonclient import grpc as triton_grpc
from tritonclient.utils import InferenceServerException

MODEL_REPOSITORY = Path(__file__).parents[2] / "model_repository"
PROMPT = "def read_lines(path):\n"
CONTEXT_LEN = 4096
EXACTLY = '{"ignore_eos": true}'
TYPES = {"max_tokens": ("INT32", np.int32), "input_ids": ("INT32", np.int32), "seed": ("UINT64", np.uint64)}
FULL_ANSWER = {
    "return_finish_reason": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_token_ids": True,
    "return_logprobs": True,
}


class GrpcStream:
    """One client with one gRPC stream. Requests are told apart by their ids; an error has none and ends any wait."""

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        self._client = triton_grpc.InferenceServerClient(url)
        self._arrived: queue.SimpleQueue[tuple[Any, InferenceServerException | None]] = queue.SimpleQueue()
        self._kept: dict[str, list[Any]] = {}
        self._num_sent = self._num_ended = 0  # the first is the caller's thread's, the second the client's
        self._client.start_stream(self._take, headers=headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Close this stream; what has not ended is cancelled.

        Only that: Triton server never unloads a model whose client cancels while a last response is being written.
        """
        self._client.stop_stream(cancel_requests=self._num_ended < self._num_sent)
        self._client.close()

    def send(
        self,
        request_id: str = "",
        *,
        model: str = "tandem",
        sequence: tuple[Any, str] | None = None,
        timeout_us: int | None = None,
        empty_final: bool = True,
        **inputs: Any,
    ) -> None:
        """`sequence` is (id, flags), flags being any of the letters S(tart) and E(nd); default: one of its own.

        timeout_us is the protocol's own; without empty_final no response comes that only carries the FINAL flag.
        """
        self._num_sent += 1
        sequence_id, flags = sequence or (f"one-shot-{id(self)}-{request_id}", "SE")
        self._client.async_stream_infer(
            model,
            [_tensor(name, value) for name, value in inputs.items()],
            request_id=request_id,
            sequence_id=0 if model == "tandem_generate" else sequence_id,
            sequence_start="S" in flags and model == "tandem",
            sequence_end="E" in flags and model == "tandem",
            enable_empty_final_response=empty_final,
            timeout=timeout_us,
        )

    def responses(self, request_id: str = "", timeout_s: float = 60.0) -> Iterator["Response"]:
        """The request's data responses up to FINAL. Raises InferenceServerException for an error response."""
        while True:
            kept = self._kept.get(request_id)
            result = kept.pop(0) if kept else self._receive(timeout_s)
            if result.get_response().id != request_id:
                self._kept.setdefault(result.get_response().id, []).append(result)
                continue
            if result.get_response().outputs:
                yield Response(result)
            if result.get_response().parameters["triton_final_response"].bool_param:
                return

    def responses_of_one_message(self, timeout_s: float = 60.0) -> list["Response"]:
        """The data response of the next message of this stream, whoever's it is; none for a mere FINAL flag."""
        result = self._receive(timeout_s)
        return [Response(result)] if result.get_response().outputs else []

    def answer(self, **request: Any) -> "Answer":
        """Send one streaming request for everything and collect its responses."""
        self.send(**{"stream": True, **FULL_ANSWER, **request})
        return Answer(list(self.responses(request.get("request_id", ""))))

    def _take(self, result: Any, error: InferenceServerException | None) -> None:
        if error is not None or result.get_response().parameters["triton_final_response"].bool_param:
            self._num_ended += 1
        self._arrived.put((result, error))

    def _receive(self, timeout_s: float) -> Any:
        result, error = self._arrived.get(timeout=timeout_s)
        if error is not None:
            raise error
        return result


class Response:
    """One data response; attributes are its outputs, a single element as itself."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def __getattr__(self, name: str) -> Any:
        array = self._result.as_numpy(name)
        assert array is not None, f"the response has no {name}"
        items = [item.decode("utf-8") if isinstance(item, bytes) else item.item() for item in array]
        return items if name == "token_ids" else items[0]


class Answer:
    """A whole streamed answer; two answers are equal when text, tokens and logprobs are, bit for bit."""

    def __init__(self, responses: list[Response]) -> None:
        self.num_responses = len(responses)
        self.finish_reason = responses[-1].finish_reason
        self.num_input_tokens = responses[-1].num_input_tokens
        self.num_output_tokens = sum(response.num_output_tokens for response in responses)
        self.text = "".join(response.text_output for response in responses)
        self.token_ids = [token_id for response in responses for token_id in response.token_ids]
        self.logprobs = [item["logprob"] for response in responses for item in json.loads(response.logprobs)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Answer({self.text!r}, {self.token_ids}, {self.finish_reason})"

    def _key(self) -> tuple[Any, ...]:
        return (self.text, self.token_ids, self.logprobs, self.finish_reason)


def ask(server: Any, **request: Any) -> Answer:
    """One streamed answer over a client of its own."""
    with GrpcStream(server.grpc_url) as stream:
        return stream.answer(**request)


def post(url: str, path: str, body: dict[str, Any], timeout_s: float = 60.0) -> tuple[int, Any]:
    """POST to tandem_generate: status and JSON for `generate`, status and list of events for `generate_stream`."""
    connection = http.client.HTTPConnection(url, timeout=timeout_s)
    connection.request("POST", f"/v2/models/tandem_generate/{path}", json.dumps(body))
    reply = connection.getresponse()
    content = reply.read().decode("utf-8")
    connection.close()
    if path == "generate":
        return reply.status, json.loads(content)
    return reply.status, [json.loads(line.removeprefix("data: ")) for line in content.splitlines() if line]


def metrics_page(server: Any) -> str:
    connection = http.client.HTTPConnection(server.metrics_url, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode("utf-8")
    connection.close()
    return text


def metrics(server: Any) -> dict[str, float]:
    """The engine's metrics by name, and by name and the label that is not of the model: `name{outcome="stop"}`."""
    found = {}
    for name, labels, value in re.findall(r"^(tandem_\w+)\{(.*)\} (\S+)$", metrics_page(server), re.MULTILINE):
        if 'model="tandem_generate"' in labels:
            continue
        own = [label for label in labels.split(",") if not label.startswith(("model=", "version="))]
        found[f"{name}{{{','.join(own)}}}" if own else name] = float(value)
    return found


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Fails the test if the condition does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


def wait_until_free(server: Any) -> None:
    """Until nothing runs or waits and no session is open: then every block and slot must be back in its pool.

    A page may be read while its metrics are written, heartbeat last; one that is read after another showed a heartbeat
    has all that was written with it. So the pools are looked at one page after a heartbeat that is later than idleness.
    """
    found: dict[str, float] = {}

    def heartbeat_s() -> float:
        found.update(metrics(server))
        return found["tandem_heartbeat_timestamp_seconds"]

    def is_idle() -> bool:
        is_new = heartbeat_s() > called_s
        return is_new and all(found[f"tandem_num_{name}"] == 0 for name in ("active", "queued", "sessions"))

    called_s = time.time()
    wait_until(is_idle)
    idle_s = found["tandem_heartbeat_timestamp_seconds"]
    wait_until(lambda: heartbeat_s() > idle_s)
    pools = metrics(server)
    for pool in ("blocks", "slots"):
        assert pools[f"tandem_num_free_{pool}"] == pools[f"tandem_num_{pool}"]


def _tensor(name: str, value: Any) -> triton_grpc.InferInput:
    if isinstance(value, np.ndarray):
        tensor = triton_grpc.InferInput(name, value.shape, "INT64")
        tensor.set_data_from_numpy(value)
        return tensor
    items = value if isinstance(value, list) else [value]
    if isinstance(items[0], bool):
        kind, dtype = "BOOL", np.dtype(bool)
    else:
        kind, dtype = TYPES.get(name, ("BYTES", np.dtype(object)))
    if kind == "BYTES":
        items = [item.encode() if isinstance(item, str) else item for item in items]
    tensor = triton_grpc.InferInput(name, [len(items)], kind)
    tensor.set_data_from_numpy(np.array(items, dtype=dtype))
    return tensor
