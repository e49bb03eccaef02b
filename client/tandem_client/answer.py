# SPDX-License-Identifier: Apache-2.0
"""From responses to chunks. Pure; shared by both clients."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tandem_client.draft_trees import DraftTrees
from tandem_client.errors import IncompleteStreamError
from tandem_client.types import Chunk, DrafterUsage, TokenLogprob, ToolCallDelta, Usage
from tandem_client.wire import InferResponse

# The finish_reason of a response that is not the last, in the vLLM backend's convention.
_NO_REASON = "None"

# Usage field -> output of the last response.
_PERF_OUTPUTS = {
    "num_draft_tokens": "total_draft_tokens",
    "num_accepted_tokens": "total_accepted_draft_tokens",
    "acceptance_rate": "acceptance_rate",
    "acceptance_len": "acceptance_length",
    "num_rounds": "num_rounds",
    "num_cached_tokens": "num_cached_tokens",
    "seed": "seed",
    "arrival_time_ns": "arrival_time_ns",
    "first_scheduled_time_ns": "first_scheduled_time_ns",
    "first_token_time_ns": "first_token_time_ns",
    "last_token_time_ns": "last_token_time_ns",
}


class Answer:
    """Reads the responses of one request in order. `on_accepted` is called at the first, `on_chunk` with each chunk."""

    def __init__(
        self,
        on_accepted: Callable[[], None] | None = None,
        num_choices: int = 1,
        on_chunk: Callable[[Chunk], None] | None = None,
    ) -> None:
        self._on_accepted = on_accepted
        self._on_chunk = on_chunk
        self._num_choices = num_choices
        self._num_input_tokens = 0
        self._num_output_tokens: Counter[int] = Counter()  # by choice
        self._ended: set[int] = set()  # the choices that have a finish reason
        self._is_final = False

    def read(self, response: InferResponse) -> Chunk | None:
        """The chunk in `response`; None for one that carries no outputs (the empty final response)."""
        chunk = self._read(response)
        if chunk is not None and self._on_chunk is not None:
            self._on_chunk(chunk)
        return chunk

    def _read(self, response: InferResponse) -> Chunk | None:
        if self._on_accepted is not None:
            self._on_accepted()
            self._on_accepted = None
        self._is_final = self._is_final or response.is_final
        if not response.outputs:
            return None
        tokens = response.outputs.get("token_ids")
        token_ids = () if tokens is None else tuple(tokens.tolist())
        self._num_input_tokens = response.scalar("num_input_tokens") or self._num_input_tokens
        choice_index = response.scalar("choice_index") or 0
        self._num_output_tokens[choice_index] += len(token_ids)
        finish_reason = response.scalar("finish_reason")
        if finish_reason == _NO_REASON:
            finish_reason = None
        if finish_reason is not None:
            self._ended.add(choice_index)
        entries, prompt = response.json("logprobs"), response.json("prompt_logprobs")
        trees = response.json("draft_trees")
        return Chunk(
            text=response.scalar("text_output") or "",
            reasoning=response.scalar("reasoning_content") or "",
            tool_calls=tuple(_tool_call(delta) for delta in response.json("tool_calls") or ()),
            token_ids=token_ids,
            logprobs=None if entries is None else tuple(entry["logprob"] for entry in entries),
            top_logprobs=_top_logprobs(entries),
            prompt_logprobs=None if prompt is None else tuple(entry and _token_logprob(entry) for entry in prompt),
            finish_reason=finish_reason,
            usage=None if finish_reason is None else self._usage(response, choice_index),
            choice_index=choice_index,
            receipt=response.scalar("receipt"),
            spelling=_spelling(entries),
            draft_trees=None if trees is None else DraftTrees.from_json(trees),
        )

    def finish(self) -> None:
        """The stream has ended. Raises IncompleteStreamError unless each answer is complete."""
        is_complete = len(self._ended) == self._num_choices
        if not self._is_final or not is_complete:
            missing = "a finish reason" if self._is_final else "the final response"
            raise IncompleteStreamError(f"the server closed the stream without {missing}")

    def _usage(self, response: InferResponse, choice_index: int) -> Usage:
        found: dict[str, Any] = {field: response.scalar(output) for field, output in _PERF_OUTPUTS.items()}
        return Usage(
            num_input_tokens=self._num_input_tokens,
            num_output_tokens=self._num_output_tokens[choice_index],
            drafters=_drafters(response.json("drafter_statistics") or {}),
            **{field: value for field, value in found.items() if value is not None},
        )


def _top_logprobs(entries: Sequence[Mapping[str, Any]] | None) -> tuple[tuple[tuple[int, float], ...], ...] | None:
    if not entries or "top_logprobs" not in entries[0]:
        return None
    return tuple(_pairs(entry["top_logprobs"]) for entry in entries)


def _spelling(entries: Sequence[Mapping[str, Any]] | None) -> dict[int, bytes]:
    """The bytes of every token that the entries name; none unless `logprobs_bytes` was asked for."""
    if not entries or "bytes" not in entries[0]:
        return {}
    named = [each for entry in entries for each in (entry, *entry.get("top_logprobs", ()))]
    return {each["token_id"]: bytes(each["bytes"]) for each in named}


def _token_logprob(entry: Mapping[str, Any]) -> TokenLogprob:
    return TokenLogprob(token_id=entry["token_id"], logprob=entry["logprob"], top=_pairs(entry["top_logprobs"]))


def _tool_call(delta: Mapping[str, Any]) -> ToolCallDelta:
    function = delta["function"]
    return ToolCallDelta(
        index=delta["index"], id=delta.get("id"), name=function.get("name"), arguments=function["arguments"]
    )


def _pairs(entries: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, float], ...]:
    return tuple((entry["token_id"], entry["logprob"]) for entry in entries)


def _drafters(statistics: Mapping[str, Mapping[str, Any]]) -> dict[str, DrafterUsage]:
    return {
        name: DrafterUsage(drafted=item["drafted"], accepted=item["accepted"], share=item["share"])
        for name, item in statistics.items()
    }
