# SPDX-License-Identifier: Apache-2.0
"""The Triton model `tandem_generate`: the same contract without sequences, for HTTP generate and plain clients.

HTTP generate can't carry a sequence id, and `tandem` requires one. So each request is forwarded under an id of its own.
"""

import json
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tandem_backend.errors import InternalError, InvalidRequestError, UnavailableError
from tandem_backend.serving.ended_iterators import EndedIterators
from tandem_backend.serving.model_config import reports_metrics, string_parameters
from tandem_backend.serving.polling import POLL_INTERVAL_S, poll_pause_s
from tandem_backend.serving.registry import Registry
from tandem_backend.serving.request import ERROR_PARAMETER, FLAG_SEQUENCE_END, FLAG_SEQUENCE_START, read_parameters
from tandem_backend.serving.triton_errors import ERROR_OUTPUT, FINAL, passed_error, triton_error
from tandem_backend.serving.watchdog import exit_with_parent

# START and END in one request: Triton server frees the sequence's slot at once, the engine its state at the end.
ONE_SHOT = FLAG_SEQUENCE_START | FLAG_SEQUENCE_END
# More than the engine's default max_active + max_queued, so that usually the engine is the one that refuses.
DEFAULT_MAX_REQUESTS = 300
NUM_CLOSERS = 4
STOP_INTERVAL_S = 1.0
BEAT_INTERVAL_S = 1.0
HEARTBEAT = "tandem_heartbeat_timestamp_seconds"  # as `tandem` has one: see supervisor.py


@dataclass(slots=True)
class _Forwarded:
    """A request on its way through `tandem`.

    Once `cancelled`, nothing is sent but FINAL: a response to a connection that is gone can crash a server that exits.
    The lock keeps the watcher's is_cancelled() away from the FINAL flag: Triton server frees what is_cancelled() reads
    when FINAL comes, and crashes when both happen at once (seen with 2.51).
    """

    sequence_id: str
    sender: Any
    ended_iterators: EndedIterators
    responses: Any = None  # the BLS response iterator, from the first response on
    cancelled: bool = False
    next_stop_s: float = 0.0
    ended: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def end(self) -> None:
        """All responses were read. Asking once more lets go of them."""
        if self.responses is not None:
            self.ended_iterators.hold(self.responses)
            self.is_cancelled()
        with self.lock:
            self.ended = True

    def is_cancelled(self) -> bool:
        with self.lock:
            if not self.cancelled and not self.ended:
                self.cancelled = self.ended_iterators.ask_cancelled(self.sender)
            return self.cancelled


class TritonPythonModel:
    """Forwards every request on a thread of its own and passes the responses through unchanged."""

    def initialize(self, args: dict[str, str]) -> None:
        exit_with_parent()
        config = json.loads(args["model_config"])
        parameters = string_parameters(config)
        self._registry = Registry(args["model_name"], args["model_version"]) if reports_metrics(config) else None
        self._model_name = parameters.get("model_name", "tandem")
        self._max_requests = int(parameters.get("max_requests", DEFAULT_MAX_REQUESTS))
        self._places = threading.Semaphore(self._max_requests)
        self._pool = ThreadPoolExecutor(self._max_requests, thread_name_prefix="forward")
        self._closers = ThreadPoolExecutor(NUM_CLOSERS, thread_name_prefix="close")
        self._lock = threading.Lock()
        self._live: dict[str, _Forwarded] = {}
        self._ended_iterators = EndedIterators()
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            if self._places.acquire(blocking=False):
                self._pool.submit(self._serve, request)
            else:
                served = f"max_requests: {self._max_requests} requests are being served"
                error = UnavailableError(served, retry_after_s=1)
                _finish(request.get_response_sender(), triton_error(error))

    def finalize(self) -> None:
        """Triton calls it after the last request has ended."""
        self._stopping.set()
        self._watcher.join()
        self._pool.shutdown(wait=False)
        self._closers.shutdown(wait=False)
        if self._registry is not None:
            self._registry.close()

    def _serve(self, request: Any) -> None:
        sender = request.get_response_sender()
        error = None
        try:
            if not sender.is_cancelled():
                self._forward(request, sender)
        except pb_utils.TritonModelException as failure:  # Triton refused it: `tandem` is not loaded, wrong dtype, ...
            error = pb_utils.TritonError(str(failure))
        except InvalidRequestError as failure:
            error = triton_error(failure)
        except Exception as failure:
            error = triton_error(InternalError(f"{type(failure).__name__}: {failure}"))
        finally:
            _finish(sender, error)
            self._places.release()

    def _forward(self, request: Any, sender: Any) -> None:
        sequence_id = f"generate-{uuid.uuid4()}"
        inner = pb_utils.InferenceRequest(
            model_name=self._model_name,
            request_id=request.request_id(),
            correlation_id=sequence_id,
            flags=ONE_SHOT,
            requested_output_names=[*request.requested_output_names(), ERROR_OUTPUT],
            inputs=request.inputs(),
            timeout=request.timeout(),
            parameters={**_bls_parameters(read_parameters(request)), ERROR_PARAMETER: True},
        )
        forwarded = _Forwarded(sequence_id, sender, self._ended_iterators)
        with self._lock:
            self._live[sequence_id] = forwarded
        try:
            forwarded.responses = inner.exec(decoupled=True)  # returns with the first response
            self._pass_on(forwarded)
        except BaseException:
            if forwarded.responses is not None:  # a response could not be sent: nobody is left to generate for
                self._cancel(forwarded)
                for _ in forwarded.responses:
                    pass
            raise
        finally:
            forwarded.end()
            with self._lock:
                self._live.pop(sequence_id, None)

    def _pass_on(self, forwarded: _Forwarded) -> None:
        for response in forwarded.responses:
            if forwarded.cancelled:
                continue
            tensors = response.output_tensors()  # held here: send() would free those it drops without the GIL
            error = _error(response)
            if error is not None:
                forwarded.sender.send(pb_utils.InferenceResponse(output_tensors=[], error=error))
            elif tensors:  # the empty one only carries the FINAL flag
                forwarded.sender.send(response)

    def _watch(self) -> None:
        """Cancellation does not travel through BLS by itself. The heartbeat is that of this thread."""
        next_beat_s, pause_s = 0.0, POLL_INTERVAL_S
        while not self._stopping.wait(pause_s):
            begun_s = time.monotonic()
            if self._registry is not None and time.monotonic() >= next_beat_s:
                self._registry.gauge(HEARTBEAT, "When the front's watcher last came by, since 1970", time.time())
                next_beat_s = time.monotonic() + BEAT_INTERVAL_S
            self._stop_cancelled()
            pause_s = poll_pause_s(begun_s)

    def _stop_cancelled(self) -> None:
        """Keeps nothing when it returns: Triton server unloads no model while a response sender is referenced."""
        with self._lock:
            live = list(self._live.values())
        for forwarded in live:
            # Again until it has ended: the first time `tandem` may not have seen the request yet.
            if forwarded.is_cancelled() and time.monotonic() >= forwarded.next_stop_s:
                forwarded.next_stop_s = time.monotonic() + STOP_INTERVAL_S
                self._closers.submit(self._cancel, forwarded)

    def _cancel(self, forwarded: _Forwarded) -> None:
        """End the inner request: by its iterator where Triton server has that (2025 and later), else by closing it."""
        try:
            if hasattr(forwarded.responses, "cancel"):
                forwarded.responses.cancel()
                return
            stop = pb_utils.InferenceRequest(
                model_name=self._model_name,
                correlation_id=forwarded.sequence_id,
                flags=ONE_SHOT,
                requested_output_names=["text_output", ERROR_OUTPUT],
                inputs=[pb_utils.Tensor("stop", np.array([True]))],
                parameters={ERROR_PARAMETER: True},
            )
            responses = stop.exec(decoupled=True)
            errors = [error.message() for error in map(_error, responses) if error is not None]
            self._ended_iterators.hold(responses)
            if errors:
                raise InternalError(errors[0])
        except Exception as error:
            pb_utils.Logger.log_warn(f"a cancelled request could not be stopped: {error}")


def _error(response: Any) -> Any | None:
    """The error in a response of `tandem`, Triton server's or our own."""
    return response.error() if response.has_error() else passed_error(response)


def _bls_parameters(parameters: str) -> dict[str, str | int | bool]:
    """Request parameters for an inner request, which takes no floats: those go as text."""
    values = json.loads(parameters or "{}")
    return {name: repr(value) if isinstance(value, float) else value for name, value in values.items()}


def _finish(sender: Any, error: Any | None) -> None:
    """Send FINAL, with `error` if there is one."""
    if error is None:
        sender.send(flags=FINAL)
        return
    try:
        sender.send(pb_utils.InferenceResponse(output_tensors=[], error=error), flags=FINAL)
    except Exception:
        sender.send(flags=FINAL)
