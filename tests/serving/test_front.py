# SPDX-License-Identifier: Apache-2.0
"""The stateless front `tandem_generate`, with a scripted `tandem` behind it."""

import gc
import json
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.pb_utils import (
    InferenceRequest,
    InferenceResponse,
    ResponseSender,
    Tensor,
    TritonError,
    TritonModelException,
)
from tandem_backend.serving import front as front_module
from tandem_backend.serving.front import TritonPythonModel

Handler = Callable[[InferenceRequest], Iterator[InferenceResponse]]


def text(value: str) -> InferenceResponse:
    return InferenceResponse([Tensor("text_output", np.array([value], dtype=object))])


class Inner:
    """Plays `tandem`: records what arrives; a request runs `answer`, a stop request sets `stopped`."""

    def __init__(self, answer: Handler) -> None:
        self.requests: list[InferenceRequest] = []
        self.stopped = threading.Event()
        self._answer = answer

    def __call__(self, request: InferenceRequest) -> Iterator[InferenceResponse]:
        self.requests.append(request)
        if any(tensor.name() == "stop" for tensor in request.inputs()):
            self.stopped.set()
            return iter([text("")])
        return self._answer(request)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Inner]]:
    """Start the front before an answer of `tandem`: serve(answer, request, ..., max_requests=N)."""
    models: list[TritonPythonModel] = []

    def start(answer: Handler, *requests: InferenceRequest, **parameters: str) -> Inner:
        inner = Inner(answer)
        monkeypatch.setattr(InferenceRequest, "handler", staticmethod(inner), raising=False)
        model = TritonPythonModel()
        values = {key: {"string_value": value} for key, value in parameters.items()}
        config = json.dumps({"parameters": values})
        model.initialize({"model_config": config, "model_name": "tandem_generate", "model_version": "1"})
        models.append(model)
        model.execute(list(requests))
        return inner

    yield start
    for model in models:
        model.finalize()


def test_responses_pass_through_and_the_request_is_a_sequence_of_its_own(serve: Callable[..., Inner]) -> None:
    requests = [InferenceRequest.of(text_input="x", parameters='{"temperature": 0.5, "n": 1}') for _ in range(2)]
    inner = serve(lambda _: iter([text("a"), text("b"), InferenceResponse([])]), *requests)
    for request in requests:
        assert [response.value("text_output") for response in request.sender.wait()] == [["a"], ["b"]]
        assert request.sender.num_finals == 1
    first, second = inner.requests
    assert (first.model_name, first.flags()) == ("tandem", 3)
    assert first.correlation_id() != second.correlation_id()
    # BLS takes no floats; errors shall come as an output.
    assert json.loads(first.parameters()) == {"temperature": "0.5", "n": 1, "tandem_error_as_output": True}


def test_an_error_passes_through_unchanged(serve: Callable[..., Inner]) -> None:
    error = TritonError("[UNAVAILABLE] queue full", TritonError.UNAVAILABLE)
    request = InferenceRequest.of(text_input="x")
    serve(lambda _: iter([text("a"), InferenceResponse([], error=error)]), request)
    last = request.sender.wait()[-1].error()
    assert (last.message(), last.code()) == ("[UNAVAILABLE] queue full", "UNAVAILABLE")
    assert request.sender.num_finals == 1


@pytest.mark.parametrize("failure", [TritonModelException("model 'tandem' is not ready"), ValueError("bug")])
def test_a_failed_forward_is_answered(serve: Callable[..., Inner], failure: Exception) -> None:
    def fail(_: Any) -> Iterator[InferenceResponse]:
        raise failure

    request = InferenceRequest.of(text_input="x")
    serve(fail, request)
    assert str(failure) in request.sender.wait()[0].error().message()
    assert request.sender.num_finals == 1


def test_parameters_that_are_no_text_are_the_clients_mistake(serve: Callable[..., Inner]) -> None:
    def parameters() -> str:
        return b'{"cache_salt": "\xff"}'.decode()

    request = InferenceRequest.of(text_input="x")
    request.parameters = parameters  # type: ignore[method-assign]
    inner = serve(lambda _: iter([]), request)
    message = request.sender.wait()[0].error().message()
    assert message.startswith("[INVALID_ARG] request parameters: must be UTF-8")
    assert (inner.requests, request.sender.num_finals) == ([], 1)


def test_cancelling_stops_the_inner_request(serve: Callable[..., Inner]) -> None:
    def endless(_: InferenceRequest) -> Iterator[InferenceResponse]:
        yield text("a")
        assert InferenceRequest.handler.stopped.wait(10)
        yield text("b")

    request = InferenceRequest.of(text_input="x")
    inner = serve(endless, request)
    request.sender.wait_for_first()
    request.sender.cancelled = True
    request.sender.wait()
    generation, stop = inner.requests
    assert stop.correlation_id() == generation.correlation_id()
    assert request.sender.text() == "a"  # what came after the cancellation is dropped
    assert request.sender.num_finals == 1


def test_cancelling_before_the_first_response(serve: Callable[..., Inner]) -> None:
    """As of a whole answer: Triton server's exec() returns with the first response."""

    def whole(_: InferenceRequest) -> Iterator[InferenceResponse]:
        assert InferenceRequest.handler.stopped.wait(10)
        return iter([text("never sent")])

    request = InferenceRequest.of(text_input="x")
    inner = serve(whole, request)
    while not inner.requests:
        time.sleep(0.005)
    request.sender.cancelled = True
    assert request.sender.wait() == []
    assert request.sender.num_finals == 1


def test_a_stop_that_came_too_early_is_repeated(serve: Callable[..., Inner], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "STOP_INTERVAL_S", 0.1)
    done = threading.Event()

    def late(_: InferenceRequest) -> Iterator[InferenceResponse]:
        assert done.wait(10)
        return iter([InferenceResponse([])])

    request = InferenceRequest.of(text_input="x")
    inner = serve(late, request)
    request.sender.cancelled = True
    deadline = time.monotonic() + 10
    while len(inner.requests) < 3 and request.sender.num_finals == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    done.set()
    request.sender.wait()


def test_cancelling_uses_the_iterator_where_it_can(serve: Callable[..., Inner]) -> None:
    class Cancellable:
        def __init__(self) -> None:
            self.cancelled = threading.Event()

        def __iter__(self) -> Iterator[InferenceResponse]:
            yield text("a")
            assert self.cancelled.wait(10)

        def cancel(self) -> None:
            self.cancelled.set()

    request = InferenceRequest.of(text_input="x")
    inner = serve(lambda _: Cancellable(), request)  # type: ignore[arg-type,return-value]
    request.sender.wait_for_first()
    request.sender.cancelled = True
    request.sender.wait()
    assert len(inner.requests) == 1
    assert request.sender.num_finals == 1


def test_a_request_cancelled_before_it_runs_is_not_forwarded(serve: Callable[..., Inner]) -> None:
    request = InferenceRequest.of(text_input="x")
    request.sender.cancelled = True
    inner = serve(lambda _: iter([text("a")]), request)
    assert request.sender.wait() == []
    assert inner.requests == []


def test_a_client_that_cannot_be_answered_stops_its_generation(serve: Callable[..., Inner]) -> None:
    request = InferenceRequest.of(text_input="x")
    request.sender._broken_sends = frozenset({1})
    inner = serve(lambda _: iter([text("a"), text("b")]), request)
    assert "shared memory" in request.sender.wait()[0].error().message()
    assert inner.stopped.is_set()


def test_more_requests_than_places_are_refused(serve: Callable[..., Inner]) -> None:
    release = threading.Event()

    def slow(_: InferenceRequest) -> Iterator[InferenceResponse]:
        assert release.wait(10)
        yield text("a")

    first, second = InferenceRequest.of(text_input="x"), InferenceRequest.of(text_input="x")
    serve(slow, first, second, max_requests="1")
    assert second.sender.wait()[0].error().message().startswith("[UNAVAILABLE] max_requests")
    release.set()
    first.sender.wait()
    assert first.sender.text() == "a"


def test_an_iterator_outlives_the_question_after_its_end(serve: Callable[..., Inner]) -> None:
    """Else the stub may be the last to let go of it, without the GIL: see ended_iterators."""

    class Responses:
        def __init__(self) -> None:
            self.ended = False

        def __iter__(self) -> Iterator[InferenceResponse]:
            yield text("a")
            self.ended = True

    alive: list[weakref.ref[Responses]] = []
    seen: list[bool] = []

    def answer(_: InferenceRequest) -> Responses:
        responses = Responses()
        alive.append(weakref.ref(responses))
        return responses

    class Asked(ResponseSender):
        def is_cancelled(self) -> bool:
            responses = alive[0]() if alive else None
            seen.append(responses is not None and responses.ended)
            return super().is_cancelled()

    request = InferenceRequest.of(text_input="x")
    request.sender = Asked()
    serve(answer, request)  # type: ignore[arg-type]
    request.sender.wait()
    assert seen[-1]  # before FINAL: Triton server frees then what is asked for
    deadline = time.monotonic() + 10
    while alive[0]() is not None:
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.01)


def test_the_front_loads_no_engine() -> None:
    """Its stub would need hundreds of megabytes and many seconds for what it never uses."""
    program = (
        "import sys; from fakes import pb_utils; sys.modules['triton_python_backend_utils'] = pb_utils\n"
        "import tandem_backend.serving.front\n"
        "print([name for name in ('torch', 'tandem_kernels', 'tandem_backend.engine') if name in sys.modules])"
    )
    tests = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program], cwd=tests, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_an_ended_requests_sender_is_let_go(serve: Callable[..., Inner]) -> None:
    """Triton server keeps a model loaded for as long as its stub has a response sender."""
    may_end = threading.Event()

    def answer(_: InferenceRequest) -> Iterator[InferenceResponse]:
        may_end.wait(5)
        yield text("a")

    request = InferenceRequest.of(text_input="x")
    serve(answer, request)
    time.sleep(3 * front_module.POLL_INTERVAL_S)  # the watcher has looked at it
    may_end.set()
    request.sender.wait()
    sender = weakref.ref(request.sender)
    del request.sender
    deadline_s = time.monotonic() + 5
    while sender() is not None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
