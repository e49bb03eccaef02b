# SPDX-License-Identifier: Apache-2.0
"""What a generation yields: chunks of text as they become final, usage with the last one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from tandem_client.draft_trees import DraftTrees

T = TypeVar("T")

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterUsage:
    """What one drafter did for a request."""

    drafted: int
    accepted: int
    share: float  # of all accepted draft tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request cost. Times are the server's `time.time_ns()`; 0: that point was never reached."""

    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_rate: float = 0.0  # accepted / drafted tokens; 0.0 without drafts
    acceptance_len: float = 0.0  # tokens a decoding round, its bonus token included; plain decoding has 1.0
    num_rounds: int = 0  # rounds that took prompt rows or gave tokens
    num_cached_tokens: int = 0  # prompt tokens whose state the server still had
    seed: int | None = None  # what the tokens were drawn with: send it to get the same answer again; None: greedy
    drafters: Mapping[str, DrafterUsage] = field(default_factory=dict, hash=False)  # by name
    arrival_time_ns: int = 0
    first_scheduled_time_ns: int = 0
    first_token_time_ns: int = 0
    last_token_time_ns: int = 0

    @property
    def time_to_first_token_s(self) -> float | None:
        """Seconds from the request's arrival at the server to its first token; None without a token."""
        if not self.first_token_time_ns:
            return None
        return (self.first_token_time_ns - self.arrival_time_ns) / NS_PER_S

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens a second after the first one; None for less than two tokens."""
        elapsed_ns = self.last_token_time_ns - self.first_token_time_ns
        if self.num_output_tokens < 2 or elapsed_ns <= 0:
            return None
        return (self.num_output_tokens - 1) * NS_PER_S / elapsed_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token's natural log-probability, and those of the likeliest tokens in its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), the likeliest first


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A piece of a tool call. The first piece of each has id and name; the arguments' pieces joined are JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call. `arguments` is JSON text as the model wrote it; incomplete where the answer was cut off."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one round of the server added to an answer; each answer's last chunk has finish_reason and usage."""

    text: str = ""  # final text: whole characters that are never taken back
    reasoning: str = ""  # with reasoning_format "field" or "both"
    tool_calls: tuple[ToolCallDelta, ...] = ()  # with tools
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None  # natural logs, one a token; None unless asked for
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = (
        None  # (token id, logprob), likeliest first, a token
    )
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # on the first chunk; None for tokens without one
    finish_reason: str | None = None  # "stop", "tool_calls", "length", "cancelled" or "timeout"
    usage: Usage | None = None
    receipt: str | None = None  # on the last chunk, with return_receipt; for `tandem audit`
    draft_trees: DraftTrees | None = None  # of its tokens, with return_draft_trees
    choice_index: int = 0  # which of the n answers it belongs to
    spelling: Mapping[int, bytes] = field(default_factory=dict, hash=False)  # of tokens with logprobs, if asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer: with n above 1 the first one, and the others in `choices`."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: str
    usage: Usage
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    receipt: str | None = None
    draft_trees: DraftTrees | None = None
    others: tuple["Completion", ...] = ()
    spelling: Mapping[int, bytes] = field(default_factory=dict, hash=False)  # of tokens with logprobs, if asked for

    @property
    def choices(self) -> tuple["Completion", ...]:
        """All n answers in the order of their seeds."""
        return (replace(self, others=()), *self.others)

    @classmethod
    def from_chunks(cls, chunks: Iterable[Chunk]) -> "Completion":
        """Join the chunks of one generation. Raises ValueError where an answer's last one is missing."""
        answers: dict[int, list[Chunk]] = {0: []}
        for chunk in chunks:
            answers.setdefault(chunk.choice_index, []).append(chunk)
        first, *others = [cls._of_answer(answers[index]) for index in sorted(answers)]
        return replace(first, others=tuple(others))

    @classmethod
    def _of_answer(cls, parts: Sequence[Chunk]) -> "Completion":
        if not parts or parts[-1].finish_reason is None or parts[-1].usage is None:
            raise ValueError("chunks: the last one must have a finish_reason and usage")
        return cls(
            text="".join(part.text for part in parts),
            token_ids=tuple(token for part in parts for token in part.token_ids),
            logprobs=_joined(part.logprobs for part in parts),
            finish_reason=parts[-1].finish_reason,
            usage=parts[-1].usage,
            top_logprobs=_joined(part.top_logprobs for part in parts),
            prompt_logprobs=_joined(part.prompt_logprobs for part in parts),
            reasoning="".join(part.reasoning for part in parts),
            tool_calls=_joined_calls(delta for part in parts for delta in part.tool_calls),
            receipt=parts[-1].receipt,
            spelling={token_id: text for part in parts for token_id, text in part.spelling.items()},
            draft_trees=DraftTrees.joined(part.draft_trees for part in parts),
        )


def _joined(parts: Iterable[tuple[T, ...] | None]) -> tuple[T, ...] | None:
    """The parts one after the other; None where no chunk has any."""
    found = [part for part in parts if part is not None]
    return tuple(item for part in found for item in part) if found else None


def _joined_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    calls: dict[int, ToolCall] = {}
    for delta in deltas:
        call = calls.get(delta.index, ToolCall(id=delta.id or "", name=delta.name or "", arguments=""))
        calls[delta.index] = replace(call, arguments=call.arguments + delta.arguments)
    return tuple(calls.values())
