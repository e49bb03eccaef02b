# SPDX-License-Identifier: Apache-2.0
"""Two threads between Triton and the engine: one runs rounds and never sends, one sends and never computes."""

import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from tandem_backend.engine.choices import choice_ids
from tandem_backend.errors import InternalError, TandemError, UnavailableError
from tandem_backend.serving.outbox import Outbox
from tandem_backend.serving.polling import POLL_INTERVAL_S, poll_pause_s
from tandem_backend.serving.response import Responder
from tandem_backend.types import EngineCounters, FinishReason, SequenceId, StepOutput

if TYPE_CHECKING:
    from tandem_backend.engine import Engine, PreparedRequest

SWEEP_INTERVAL_S = 5.0
# A report takes 4 ms of the sender's time and some of the server's, most of it for histograms.
REPORT_INTERVAL_S = 1.0
# After a failed round, so that an engine that fails every time does not fill the log.
FAILURE_PAUSE_S = 0.1
FLUSH_S = 10.0  # for writing the disk cache once all has drained

log = logging.getLogger(__name__)

Report = Callable[[Mapping[str, float], EngineCounters], None]


class EngineLoop:
    """Owns the engine and the responders of all accepted requests; its methods may be called from any thread.

    The engine thread takes commands (add, cancel, close) between rounds. Outputs go through an outbox to the sender
    thread, because one send costs 0.2 ms and up: 32 streams would hold back each round by several milliseconds.
    A stream's responses are at least `stream_interval_s` apart. There `report` gets the engine's statistics and
    counters about once a second.
    """

    def __init__(
        self,
        engine: "Engine",
        report: Report | None = None,
        *,
        stream_interval_s: float = 0.0,
        on_broken: Callable[[], None] | None = None,
    ) -> None:
        self._engine = engine
        self._report = report
        self._on_broken = on_broken
        self._next_report_s = 0.0 if report else math.inf  # engine thread only
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outbox = Outbox(stream_interval_s)
        self._lock = threading.Lock()  # guards _live and _refusal
        self._live: dict[str, Responder] = {}
        self._refusal: str | None = None  # why requests are refused, closing sequences included
        self._draining = False
        self._is_flushed = False  # engine thread only
        self._stopping = threading.Event()
        self._in_engine: set[str] = set()  # engine thread only
        self._cancelling: set[str] = set()  # sender thread only
        self._threads = [
            threading.Thread(target=self._run_engine, name="engine", daemon=True),
            threading.Thread(target=self._run_sender, name="sender", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def submit(self, prepared: "PreparedRequest", *responders: Responder) -> None:
        """Run a request; its responders, one a choice, get all outputs.

        Raises UnavailableError after drain() and stop().
        """
        if self._draining:
            raise UnavailableError("the server is shutting down")
        self._register(dict(zip(choice_ids(prepared.request), responders, strict=True)))
        self._commands.put(partial(self._add, prepared))

    def close_sequence(self, sequence_id: SequenceId, request_id: str, responder: Responder) -> None:
        """Cancel the sequence's requests and drop its state, then answer with one empty output, "cancelled"."""
        self._register({request_id: responder})
        self._commands.put(partial(self._close, sequence_id, request_id))

    def clear_caches(self, request_id: str, responder: Responder) -> None:
        """Forget cached prefixes and answers, then answer with how many there were, as JSON by cache."""
        self._register({request_id: responder})
        self._commands.put(partial(self._clear, request_id))

    def end_sequence(self, sequence_id: SequenceId) -> None:
        """Drop the sequence's state once its requests are done: its END came with a request that was refused."""
        self._commands.put(partial(self._engine.end_sequence, sequence_id))

    def drain(self, timeout_s: float) -> None:
        """Refuse new requests from now on; what still runs after `timeout_s` is answered with UNAVAILABLE.

        Then the engine writes to disk: Triton server does not come to stop() while a sequence or a stream is open.
        """
        self._draining = True
        self._commands.put(lambda: None)  # wakes the engine thread
        timer = threading.Timer(timeout_s, self._outbox.call, [self._end_all])
        timer.daemon = True
        timer.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Answer what is left with UNAVAILABLE, stop both threads and let the engine write, for at most `timeout_s`."""
        with self._lock:
            self._refusal = "the model is being unloaded"
        self._stopping.set()
        self._commands.put(lambda: None)  # wakes the engine thread
        end_s = time.monotonic() + timeout_s
        engine_thread, sender_thread = self._threads
        engine_thread.join(timeout_s / 2)
        self._outbox.close()
        sender_thread.join(timeout_s / 4)
        if not engine_thread.is_alive():
            self._engine.close(max(end_s - time.monotonic(), 0))

    def _register(self, responders: Mapping[str, Responder]) -> None:
        with self._lock:
            if self._refusal is not None:
                raise UnavailableError(self._refusal)
            self._live.update(responders)
        for request_id, responder in responders.items():
            self._outbox.open(request_id, is_streaming=responder.is_streaming)

    # The engine thread.

    def _run_engine(self) -> None:
        next_sweep = time.monotonic() + SWEEP_INTERVAL_S
        while not self._stopping.is_set() and not self._engine.health.is_broken:
            try:
                self._take_commands(self._idle_s())
                if self._engine.has_work():
                    self._emit(self._engine.step())
                elif self._draining and not self._is_flushed:
                    self._is_flushed = True
                    self._engine.flush(FLUSH_S)
                if self._report is not None and time.monotonic() >= self._next_report_s:
                    statistics = {**self._engine.statistics(), "heartbeat_timestamp_seconds": time.time()}
                    self._outbox.call(partial(self._report, statistics, self._engine.counters()))
                    self._next_report_s = time.monotonic() + REPORT_INTERVAL_S
                if time.monotonic() >= next_sweep:
                    self._engine.sweep()
                    next_sweep = time.monotonic() + SWEEP_INTERVAL_S
            except Exception as error:
                log.exception("the engine failed")
                self._engine.health.failed()
                self._abandon(error)
        if not self._stopping.is_set():
            self._give_up()

    def _idle_s(self) -> float:
        """How long the engine thread may wait for a command."""
        if self._engine.has_work():
            return 0
        return min(max(self._next_report_s - time.monotonic(), 0), SWEEP_INTERVAL_S)

    def _take_commands(self, timeout_s: float) -> None:
        try:
            command = self._commands.get(timeout=timeout_s) if timeout_s else self._commands.get_nowait()
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _emit(self, outputs: list[StepOutput]) -> None:
        self._in_engine.difference_update(output.request_id for output in outputs if output.is_last)
        self._outbox.put(outputs)

    def _add(self, prepared: "PreparedRequest") -> None:
        request_ids, sequence_id = choice_ids(prepared.request), prepared.request.sequence_id
        try:
            self._engine.add(prepared)
            self._in_engine.update(request_ids)
        except TandemError as error:
            self._emit([StepOutput(request_id=request_id, error=error) for request_id in request_ids])
            if sequence_id is not None and prepared.request.sequence_end:
                self._engine.end_sequence(sequence_id)
        except Exception as error:
            log.exception("a request could not be added")
            self._emit([StepOutput(request_id=request_id, error=_internal(error)) for request_id in request_ids])

    def _clear(self, request_id: str) -> None:
        self._in_engine.add(request_id)
        text = json.dumps(self._engine.clear_caches())
        log.info("an admin cleared the caches: %s", text)
        self._emit([StepOutput(request_id=request_id, text=text, finish_reason=FinishReason.STOP)])

    def _close(self, sequence_id: SequenceId, request_id: str) -> None:
        self._in_engine.add(request_id)  # so that it is answered even if the engine fails now
        self._engine.close_sequence(sequence_id)
        self._emit([StepOutput(request_id=request_id, finish_reason=FinishReason.CANCELLED)])

    def _abandon(self, error: Exception) -> None:
        """The engine failed outside its own error handling: answer everything it holds, and go on."""
        lost, self._in_engine = self._in_engine, set()
        self._outbox.put(StepOutput(request_id=request_id, error=_internal(error)) for request_id in lost)
        for request_id in lost:
            try:
                self._engine.cancel(request_id)
            except Exception:
                log.exception("request %s could not be cancelled", request_id)
        self._stopping.wait(FAILURE_PAUSE_S)

    def _give_up(self) -> None:
        """The engine is broken: answer all that is here, take nothing more, and let the heartbeat stop."""
        reason = f"the engine failed {self._engine.health.num_failed} times in a row; the model must be loaded again"
        log.critical(reason)
        with self._lock:
            self._refusal = reason
        self._outbox.call(partial(self._fail_all, UnavailableError(reason)))
        if self._on_broken is not None:
            self._on_broken()

    # The sender thread.

    def _run_sender(self) -> None:
        next_poll = time.monotonic() + POLL_INTERVAL_S
        while (taken := self._outbox.take(next_poll)) is not None:
            outputs, calls = taken
            jobs: list[Callable[[], None]] = [partial(self._deliver, output) for output in outputs]
            for job in [*jobs, *calls]:
                try:
                    job()
                except Exception:
                    log.exception("a delivery failed")
            # Waking costs more than looking: who is awake shortly before it is time looks at once.
            if (begun := time.monotonic()) >= next_poll - POLL_INTERVAL_S / 2:
                self._poll_cancelled()
                next_poll = time.monotonic() + poll_pause_s(begun)
        self._fail_all(UnavailableError("the model is being unloaded"))

    def _fail_all(self, error: TandemError) -> None:
        for request_id, responder in self._snapshot().items():
            responder.fail(error)
            with self._lock:
                del self._live[request_id]

    def _deliver(self, output: StepOutput) -> None:
        with self._lock:
            responder = self._live.get(output.request_id)
        if responder is None:  # answered before: abandoned, or its response could not be sent
            return
        if output.request_id in self._cancelling and not output.is_last:
            return
        responder.output(output)
        if responder.finished:
            self._cancelling.discard(output.request_id)
            with self._lock:
                del self._live[output.request_id]
            if not output.is_last:
                self._commands.put(partial(self._engine.cancel, output.request_id))

    def _end_all(self) -> None:
        error = UnavailableError("the server is shutting down: the request ran past its exit timeout")
        for request_id in self._snapshot():
            self._deliver(StepOutput(request_id=request_id, error=error))
            self._commands.put(partial(self._engine.cancel, request_id))

    def _poll_cancelled(self) -> None:
        for request_id, responder in self._snapshot().items():
            if request_id in self._cancelling:
                continue
            try:
                cancelled = responder.is_cancelled()
            except Exception:
                log.exception("request %s: its cancellation can't be read", request_id)
                continue
            if cancelled:
                self._cancelling.add(request_id)
                self._commands.put(partial(self._engine.cancel, request_id))

    def _snapshot(self) -> dict[str, Responder]:
        with self._lock:
            return dict(self._live)


def _internal(error: Exception) -> InternalError:
    return InternalError(f"the engine failed: {type(error).__name__}: {error}")
