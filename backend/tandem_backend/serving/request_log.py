# SPDX-License-Identifier: Apache-2.0
"""One JSON line for every request that has ended: what it cost and how it went, without its text unless asked."""

import io
import json
import logging
import logging.handlers
import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from tandem_backend.errors import ConfigError, TandemError
from tandem_backend.serving.response import Ended
from tandem_backend.types import Prompt, RequestStats, SequenceId

# An error's text may quote what was sent; the field it names first does not.
_FIELD = re.compile(r"[a-z_]+(?=:)")


class RequestLog:
    """Writes to the server's standard output, or to a file that may be rotated.

    Not to Triton server's log: it puts a head before each line, and backslashes before each quote.
    """

    def __init__(self, target: Literal["stdout"] | Path, *, with_prompts: bool) -> None:
        """Raises ConfigError where the file can't be opened."""
        self._with_prompts = with_prompts
        self._logger = logging.getLogger("tandem_backend.requests")
        self._logger.propagate = False
        for handler in self._logger.handlers:  # of a model that was loaded before
            handler.close()
        try:
            handler = _handler(target)
        except OSError as error:
            raise ConfigError(f"request_log: {target}: can't be written: {error.strerror}") from error
        self._logger.handlers = [handler]
        self._logger.setLevel(logging.INFO)

    def write(self, request_id: str, sequence_id: SequenceId | None, prompt: Prompt | None, ended: Ended) -> None:
        """`request_id` is the client's, empty where it sent none; `prompt` is None where the request had none."""
        entry: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": request_id,
            "sequence_id": sequence_id,
            "stream": ended.is_streaming,
            "outcome": ended.outcome,
        }
        if ended.choice_index is not None:
            entry["choice_index"] = ended.choice_index
        if ended.error is not None:
            entry |= self._error(ended.error)
        if ended.stats is not None:
            entry |= _costs(ended.stats)
        if self._with_prompts and prompt is not None:
            entry["prompt"] = prompt.text or prompt.messages or prompt.token_ids
        self._logger.info(json.dumps(entry, ensure_ascii=False))

    def _error(self, error: TandemError) -> dict[str, str]:
        named = _FIELD.match(str(error))
        known = {"error_code": error.code, "error_field": named.group() if named else ""}
        return {**known, "error": str(error)} if self._with_prompts else known


def _handler(target: Literal["stdout"] | Path) -> logging.Handler:
    if target == "stdout":
        if isinstance(sys.stdout, io.TextIOWrapper):  # of a server without a locale: ASCII
            sys.stdout.reconfigure(encoding="utf-8")
        return logging.StreamHandler(sys.stdout)
    return logging.handlers.WatchedFileHandler(target, "a", "utf-8")


def _costs(stats: RequestStats) -> dict[str, Any]:
    arrival_ns, first_ns = stats.arrival_time_ns, stats.first_token_time_ns
    return {
        "num_input_tokens": stats.num_prompt_tokens,
        "num_cached_tokens": stats.num_cached_tokens,
        "num_output_tokens": stats.num_output_tokens,
        "num_rounds": stats.num_rounds,
        "acceptance_length": round(stats.acceptance_len, 3),
        "drafters": {name: {"drafted": d, "accepted": a} for name, (d, a) in stats.drafter_tokens.items()},
        "queue_s": _seconds(stats.first_scheduled_time_ns - arrival_ns),
        "time_to_first_token_s": _seconds(first_ns - arrival_ns) if first_ns else None,
        "request_s": _seconds(time.time_ns() - arrival_ns),
    }


def _seconds(nanoseconds: int) -> float:
    return round(nanoseconds / 1e9, 6)
