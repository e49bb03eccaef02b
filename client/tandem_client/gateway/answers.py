# SPDX-License-Identifier: Apache-2.0
"""Parts that the answers of all endpoints share: usage, finish reasons, log probabilities, what Tandem adds."""

from collections.abc import Iterable
from typing import Any

from tandem_client.gateway.calls import Call
from tandem_client.types import Chunk, Completion, Usage

# The API has no words for an answer that its deadline cut off, or that was cancelled from elsewhere.
_FINISH_REASONS = {"timeout": "length", "cancelled": "stop"}


def finish_reason(reason: str) -> str:
    """The API's word; `tandem.finish_reason` has the backend's."""
    return _FINISH_REASONS.get(reason, reason)


def openai_usage(usages: Iterable[Usage]) -> dict[str, Any]:
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
    }


def tandem_report(usage: Usage | None, reason: str, call: Call) -> dict[str, Any]:
    """The `tandem` object of an ended choice: its seed, and how it was made. Sending the seed draws it again."""
    usage = usage or Usage()
    return {
        "finish_reason": reason,
        "sampling_mode": call.sampling_mode,
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


def logprob_entries(part: Chunk | Completion) -> dict[str, Any]:
    """`logprobs` of a chat's choice: one entry a token."""
    tops = part.top_logprobs or [()] * len(part.token_ids)
    content = [
        {**_token(token_id), "logprob": logprob, "top_logprobs": [{**_token(i), "logprob": p} for i, p in top]}
        for token_id, logprob, top in zip(part.token_ids, part.logprobs or (), tops, strict=False)
    ]
    return {"content": content, "refusal": None}


def no_logprobs() -> dict[str, Any]:
    return {"content": [], "refusal": None}


def _token(token_id: int) -> dict[str, Any]:
    return {"token": f"token_id:{token_id}", "bytes": None}
