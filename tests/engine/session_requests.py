# SPDX-License-Identifier: Apache-2.0
"""Turns of sequences, in short."""

from collections.abc import Mapping, Sequence
from typing import Any

from tandem_backend.types import Prompt, Request, SamplingParams

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


def turn(
    request_id: str,
    token_ids: Sequence[int] = (5, 6, 7),
    *,
    sequence_id: int | str = 1,
    params: SamplingParams = PARAMS,
    **flags: bool,
) -> Request:
    prompt = Prompt(token_ids=tuple(token_ids))
    return Request(request_id=request_id, prompt=prompt, params=params, sequence_id=sequence_id, **flags)


def start(request_id: str, token_ids: Sequence[int] = (5, 6, 7), **values: Any) -> Request:
    return turn(request_id, token_ids, sequence_start=True, **values)


def say(request_id: str, text: str, *, reasoning: str | None = None, **flags: bool) -> Request:
    kwargs: Mapping[str, Any] = {} if reasoning is None else {"reasoning": reasoning}
    prompt = Prompt(messages=({"role": "user", "content": text},), template_kwargs=kwargs)
    return Request(request_id=request_id, prompt=prompt, params=PARAMS, sequence_id=1, **flags)
