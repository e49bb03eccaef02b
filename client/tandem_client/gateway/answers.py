# SPDX-License-Identifier: Apache-2.0
"""Parts that the answers of all endpoints share: usage, finish reasons, log probabilities, what Tandem adds."""

from collections.abc import Iterable, Iterator
from typing import Any

from tandem_client.gateway.calls import Call
from tandem_client.types import Chunk, Completion, Usage

# The API has no words for an answer that its deadline cut off, or that was cancelled from elsewhere.
_FINISH_REASONS = {"timeout": "length", "cancelled": "stop"}


def finish_reason(reason: str) -> str:
    """The API's word; `tandem.finish_reason` has the backend's."""
    return _FINISH_REASONS.get(reason, reason)


def openai_usage(usages: Iterable[Usage], num_reasoning_tokens: int) -> dict[str, Any]:
    """The tokens of all choices of a request; its prompt counts once."""
    known = list(usages)
    num_prompt = max((usage.num_input_tokens for usage in known), default=0)
    num_output = sum(usage.num_output_tokens for usage in known)
    num_cached = known[0].num_cached_tokens if known else 0
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
    }


def joined_usage(calls: Iterable[Call]) -> dict[str, Any]:
    """The tokens of several calls."""
    found = [openai_usage(call.usages.values(), call.num_reasoning_tokens) for call in calls]
    total: dict[str, Any] = found[0]
    for usage in found[1:]:
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            total[name] += usage[name]
        total["prompt_tokens_details"]["cached_tokens"] += usage["prompt_tokens_details"]["cached_tokens"]
    return total


def tandem_report(usage: Usage | None, reason: str, call: Call) -> dict[str, Any]:
    """The `tandem` object of an ended choice: its seed, and how it was made. Sending the seed draws it again."""
    usage = usage or Usage()
    return {
        "finish_reason": reason,
        "sampling_mode": call.sampling_mode,
        "sampling": dict(call.sampling_values),
        "seed": usage.seed,
        "num_rounds": usage.num_rounds,
        "acceptance_len": usage.acceptance_len,
        "acceptance_rate": usage.acceptance_rate,
        "num_draft_tokens": usage.num_draft_tokens,
        "num_accepted_tokens": usage.num_accepted_tokens,
        "drafters": {
            name: {"drafted": item.drafted, "accepted": item.accepted, "share": item.share}
            for name, item in usage.drafters.items()
        },
        "time_to_first_token_s": usage.time_to_first_token_s,
        "decode_tokens_per_s": usage.decode_tokens_per_s,
    }


def logprob_entries(part: Chunk | Completion) -> list[dict[str, Any]]:
    """One entry a token, as chats and responses have them."""
    return [
        {
            **_spelt(part, token_id),
            "logprob": logprob,
            "top_logprobs": [{**_spelt(part, other), "logprob": value} for other, value in top],
        }
        for token_id, logprob, top in _logprobs(part)
    ]


def legacy_logprobs(part: Chunk | Completion, offset: int) -> dict[str, Any]:
    """As /v1/completions has them; `offset` is where in the answer's text the part begins."""
    entries = list(_logprobs(part))
    texts = [_text(part, token_id) for token_id, _, _ in entries]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [logprob for _, logprob, _ in entries],
        "top_logprobs": [{_text(part, other): value for other, value in top} for _, _, top in entries],
        "text_offset": offsets,
    }


def _logprobs(part: Chunk | Completion) -> Iterator[tuple[int, float, tuple[tuple[int, float], ...]]]:
    tops = part.top_logprobs or [()] * len(part.token_ids)
    return zip(part.token_ids, part.logprobs or (), tops, strict=False)


def _text(part: Chunk | Completion, token_id: int) -> str:
    """A token's text; bytes that are no whole character are shown as OpenAI does, \\xe2 for example."""
    return part.spelling.get(token_id, b"").decode("utf-8", "backslashreplace")


def _spelt(part: Chunk | Completion, token_id: int) -> dict[str, Any]:
    return {"token": _text(part, token_id), "bytes": list(part.spelling.get(token_id, b""))}
