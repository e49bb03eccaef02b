# SPDX-License-Identifier: Apache-2.0
"""RequestSampling: what a request asks of the choice of its tokens, and what that remembers between rounds."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_backend.engine.sampling.constraint import Constraint
from tandem_backend.engine.sampling.guarded import GuardedConstraint
from tandem_backend.engine.sampling.history import History
from tandem_backend.types import SamplingParams


@dataclass(slots=True)
class RequestSampling:
    """One a generation. All of it follows the committed tokens; nothing in a round changes it before commit."""

    params: SamplingParams
    num_prompt: int
    stop_ids: Tensor  # [n] int64, what min_tokens forbids
    history: History | None  # None where nothing looks at earlier tokens
    bias_ids: Tensor  # [n] int64
    bias: Tensor  # [n] float32
    forbidden: Tensor | None  # [vocab] bool, the tokens outside allowed_token_ids
    constraint: GuardedConstraint | None  # after the committed output

    @property
    def seed(self) -> int:
        """The seed's 64 bits as a signed number."""
        assert self.params.seed is not None, "a request that samples got a seed when it was prepared"
        return (self.params.seed + (1 << 63)) % (1 << 64) - (1 << 63)

    @property
    def is_finished(self) -> bool:
        """Whether the constraint says that the output is complete."""
        return self.constraint is not None and self.constraint.is_finished()

    def is_plain(self, num_output: int) -> bool:
        """Whether a row now chooses by the largest of its raw logits and nothing else is asked of it."""
        return num_output >= self.params.min_tokens and self.constraint is None and self.params.is_plain

    def may_settle(self, num_output: int) -> bool:
        """Whether a row now chooses by the largest of its raw logits that the constraint lets through, and no more."""
        return num_output >= self.params.min_tokens and self.constraint is not None and self.params.is_plain

    @property
    def fault(self) -> Exception | None:
        """What the constraint raised; the request can't go on then."""
        return self.constraint.fault.error if self.constraint is not None else None

    def commit(self, token_id: int) -> None:
        """The next output token is fixed, unless `fault` is set after it; never called with a rejected draft."""
        if self.constraint is not None:
            self.constraint.advance(token_id)


def fresh_seed() -> int:
    """A seed that nobody knows yet. Of 53 bits, so that JSON readers that keep numbers as doubles can replay it."""
    return secrets.randbits(53)


def start_sampling(
    params: SamplingParams,
    *,
    num_prompt: int,
    vocab_size: int,
    stop_ids: Iterable[int],
    bad_words: tuple[tuple[int, ...], ...] = (),
    constraint: Constraint | None = None,
) -> RequestSampling:
    """The state before a request's first token. bad_words: token ids of each; the constraint is forked."""
    forbidden = None
    if params.allowed_token_ids is not None:
        forbidden = torch.ones(vocab_size, dtype=torch.bool)
        forbidden[list(params.allowed_token_ids)] = False
    needs_history = bool(params.has_penalties or params.no_repeat_ngram_size or bad_words)
    return RequestSampling(
        params=params,
        num_prompt=num_prompt,
        stop_ids=torch.tensor(sorted(stop_ids), dtype=torch.int64),
        history=History(params, num_prompt, bad_words) if needs_history else None,
        bias_ids=torch.tensor([token_id for token_id, _ in params.logit_bias], dtype=torch.int64),
        bias=torch.tensor([bias for _, bias in params.logit_bias], dtype=torch.float32),
        forbidden=forbidden,
        constraint=GuardedConstraint(constraint.fork()) if constraint is not None else None,
    )
