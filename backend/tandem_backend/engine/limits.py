# SPDX-License-Identifier: Apache-2.0
"""Limits: what a request may ask of this model and this memory, whatever else runs."""

from dataclasses import dataclass

from tandem_backend.engine.scheduler import Scheduler
from tandem_backend.errors import InvalidRequestError
from tandem_backend.model.config import ModelConfig
from tandem_backend.types import Request


@dataclass(frozen=True, slots=True)
class Limits:
    model: ModelConfig
    scheduler: Scheduler

    def stop_ids(self, request: Request) -> frozenset[int]:
        """Tokens that end the request."""
        eos = () if request.params.ignore_eos else self.model.eos_token_ids
        return frozenset((*eos, *request.params.stop_token_ids))

    def check(self, request: Request, num_tokens: int) -> None:
        """Raises InvalidRequestError naming the field; num_tokens are the prompt's, kept ones included."""
        self._check_token_ids(request)
        if request.params.relax_tau is not None and not self.scheduler.config.allow_relaxed_acceptance:
            raise InvalidRequestError(
                "relax_tau: must be absent: it breaks exactness, and engine.json does not set allow_relaxed_acceptance"
            )
        self._check_choices(request)
        self._check_length(request, num_tokens)

    def _check_choices(self, request: Request) -> None:
        num_choices, config = request.params.num_choices, self.scheduler.config
        if num_choices == 1:
            return
        if request.sequence_id is not None and not (request.sequence_start and request.sequence_end):
            raise InvalidRequestError(
                f"n: must be 1 for a turn of a sequence that stays open, which goes on behind one answer; got "
                f"{num_choices} (START and END together make a single request)"
            )
        most = config.max_active + config.max_queued
        if num_choices > most:
            raise InvalidRequestError(
                f"n: must be at most {most}, the requests that this model takes (max_active + max_queued); "
                f"got {num_choices}"
            )

    def _check_token_ids(self, request: Request) -> None:
        params, vocab_size = request.params, self.model.vocab_size
        named = {
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": [token_id for token_id, _ in params.logit_bias],
            "allowed_token_ids": params.allowed_token_ids or (),
        }
        for name, token_ids in named.items():
            wrong = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
            if wrong:
                raise InvalidRequestError(
                    f"{name}: must be token ids of this model, 0 to {vocab_size - 1}, got {wrong[0]}"
                )
        if request.params.min_tokens and len(self.stop_ids(request)) >= vocab_size:
            raise InvalidRequestError("min_tokens: must be 0 where stop_token_ids leave no other token")

    def _check_length(self, request: Request, num_tokens: int) -> None:
        longest, num_blocks = self.scheduler.max_context_len, self.scheduler.blocks.size
        if num_tokens >= longest:
            raise InvalidRequestError(
                f"{_prompt_field(request)}: the prompt has {num_tokens} tokens; at most {longest - 1} fit the context "
                f"of {longest} with one token of output"
            )
        max_tokens = request.params.max_tokens or self.scheduler.config.default_max_tokens
        worst = self.scheduler.num_blocks(min(num_tokens + max_tokens, longest))
        if worst > num_blocks:
            raise InvalidRequestError(
                f"max_tokens: {num_tokens} prompt tokens and {max_tokens} output tokens need {worst} KV blocks; "
                f"kv_cache_bytes holds {num_blocks}"
            )


def _prompt_field(request: Request) -> str:
    prompt = request.prompt
    fields = {"input_ids": prompt.token_ids, "messages": prompt.messages, "text_input": prompt.text}
    return next(name for name, value in fields.items() if value is not None)
