# SPDX-License-Identifier: Apache-2.0
"""The Triton model `tandem`: requests in, streams out, sequences kept as sessions."""

import itertools
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from tandem_backend.config import load_engine_config
from tandem_backend.engine import Engine
from tandem_backend.errors import InternalError, TandemError
from tandem_backend.serving.answer import answer_reader
from tandem_backend.serving.choices import choice_senders
from tandem_backend.serving.draft_trees import DraftTreeWriter
from tandem_backend.serving.drain import on_drain
from tandem_backend.serving.log import log_to_triton
from tandem_backend.serving.loop import EngineLoop
from tandem_backend.serving.metrics import Metrics
from tandem_backend.serving.model_config import check_model_config, engine_overrides, reports_metrics
from tandem_backend.serving.request import ended_sequence, parse_request, wants_error_output
from tandem_backend.serving.request_log import RequestLog
from tandem_backend.serving.response import Ended, Responder
from tandem_backend.serving.watchdog import exit_with_parent
from tandem_backend.types import Prompt, SequenceId


class TritonPythonModel:
    """Triton calls execute() with one request at a time (max_batch_size 0) and expects it back at once."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine. Raises pb_utils.TritonModelException naming the wrong key of config.pbtxt or engine.json."""
        exit_with_parent()
        log_to_triton()
        config = json.loads(args["model_config"])
        path = Path(args["model_repository"]) / args["model_version"] / "engine.json"
        try:
            check_model_config(config)
            self._metrics = Metrics(args["model_name"], args["model_version"]) if reports_metrics(config) else None
            engine_config = load_engine_config(path, engine_overrides(config))
            log = None
            if engine_config.request_log != "off":
                log = RequestLog(engine_config.request_log, with_prompts=engine_config.log_prompts)
            self._engine = Engine(engine_config)
        except TandemError as error:
            raise pb_utils.TritonModelException(error.wire()) from error
        self._request_ids = (str(number) for number in itertools.count(1))
        self._observe = partial(_Observer, self._metrics, log)
        self._loop = EngineLoop(
            self._engine,
            self._metrics.update if self._metrics else None,
            stream_interval_s=engine_config.stream_interval_ms / 1e3,
            on_broken=partial(_unload, args["model_name"]),
        )
        self._loop.start()
        on_drain(self._loop.drain)

    def is_ready(self) -> bool:
        """Servers from 2026 on ask for it; older ones learn by `_unload`."""
        return not self._engine.health.is_broken

    def execute(self, requests: list[Any]) -> None:
        """Hand the requests to the engine loop; responses follow through their senders."""
        for request in requests:
            self._accept(request)

    def finalize(self) -> None:
        """Answer what is left with UNAVAILABLE and stop. Also called when initialize() failed."""
        if hasattr(self, "_loop"):
            self._loop.stop()
            if self._metrics is not None:
                self._metrics.close()

    def _accept(self, request: Any) -> None:
        sender = request.get_response_sender()
        observer = self._observe(request.request_id(), request.correlation_id() or None)
        try:
            self._submit(request, sender, observer)
        except TandemError as error:
            self._refuse(request, sender, observer, error)
        except Exception as error:
            pb_utils.Logger.log_error(f"a request failed before it ran: {type(error).__name__}: {error}")
            self._refuse(request, sender, observer, InternalError(f"{type(error).__name__}: {error}"))

    def _refuse(self, request: Any, sender: Any, observer: "_Observer", error: TandemError) -> None:
        Responder(sender, on_end=observer, error_as_output=wants_error_output(request)).fail(error)
        sequence_id = ended_sequence(request)
        if sequence_id is not None:
            self._loop.end_sequence(sequence_id)

    def _submit(self, request: Any, sender: Any, observer: "_Observer") -> None:
        request_id = next(self._request_ids)
        parsed = parse_request(request, request_id)
        if parsed.ignored:
            pb_utils.Logger.log_info(f"unknown sampling parameters are ignored: {', '.join(parsed.ignored)}")
        if parsed.admin is not None:
            parsed.admin.check(self._engine.config.admin_token)
            self._loop.clear_caches(request_id, Responder(sender, parsed.options))
            return
        if parsed.request is None:
            assert parsed.sequence_id is not None
            responder = Responder(sender, parsed.options, error_as_output=wants_error_output(request))
            self._loop.close_sequence(parsed.sequence_id, request_id, responder)
            return
        observer.prompt = parsed.request.prompt
        prepared = self._engine.prepare(parsed.request)
        options, num_prompt_tokens = parsed.options, prepared.num_prompt_tokens
        senders = choice_senders(sender, prepared.request, num_prompt_tokens, is_streaming=options.stream)
        responders = [
            Responder(
                own_sender,
                options,
                num_prompt_tokens,
                observer,
                error_as_output=wants_error_output(request),
                reader=answer_reader(prepared, options.reasoning_format),
                choice=choice,
                token_bytes=self._engine.token_bytes if options.logprobs_bytes else None,
                trees=DraftTreeWriter(self._engine.tokenizer) if options.return_draft_trees else None,
            )
            for own_sender, choice in senders
        ]
        self._loop.submit(prepared, *responders)


@dataclass(slots=True)
class _Observer:
    """Tells the metrics and the request log how a request ended."""

    metrics: Metrics | None
    log: RequestLog | None
    request_id: str  # the client's
    sequence_id: SequenceId | None
    prompt: Prompt | None = None

    def __call__(self, ended: Ended) -> None:
        if self.metrics is not None:
            self.metrics.end_request(ended)
        if self.log is not None:
            self.log.write(self.request_id, self.sequence_id, self.prompt, ended)


def _unload(model_name: str) -> None:
    """Make the server say that the model isn't ready: it would otherwise until the next load (seen with 2.51).

    Only servers with explicit model control let a model do so, `tandem serve` among them.
    """
    try:
        pb_utils.unload_model(model_name)
    except Exception as error:
        pb_utils.Logger.log_error(f"{model_name} is broken and could not be unloaded: {error}")
