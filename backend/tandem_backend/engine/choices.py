# SPDX-License-Identifier: Apache-2.0
"""The choices of a request with n above 1: requests of their own, equal to single ones with the seeds that follow."""

from dataclasses import replace

from tandem_backend.engine.cache.responses import response_key
from tandem_backend.engine.sequence import PreparedRequest
from tandem_backend.types import Request

NUM_SEEDS = 2**64


def choice_ids(request: Request) -> list[str]:
    """The ids under which the outputs of a request's choices come; the first has the request's own."""
    later = range(1, request.params.num_choices)
    return [request.request_id, *(f"{request.request_id}#{index}" for index in later)]


def choice_seed(request: Request, index: int) -> int | None:
    """What choice `index` is drawn with: the seeds that follow the request's."""
    seed = request.params.seed
    return None if seed is None else (seed + index) % NUM_SEEDS


def split_choices(prepared: PreparedRequest) -> list[PreparedRequest]:
    """One prepared request a choice; a request for a single answer is its own."""
    if prepared.request.params.num_choices == 1:
        return [prepared]
    return [_choice(prepared, index, name) for index, name in enumerate(choice_ids(prepared.request))]


def _choice(prepared: PreparedRequest, index: int, name: str) -> PreparedRequest:
    request, params = prepared.request, prepared.request.params
    # The prompt's logprobs are the same for all, and whoever tells them computes every row of the prompt.
    prompt_logprobs = None if index else params.prompt_logprobs
    own_params = replace(params, num_choices=1, seed=choice_seed(request, index), prompt_logprobs=prompt_logprobs)
    own = replace(request, request_id=name, params=own_params)
    key = response_key(own, prepared.prompt_ids) if prepared.response_key is not None else None
    return replace(prepared, request=own, choice_of=request.request_id, response_key=key)
