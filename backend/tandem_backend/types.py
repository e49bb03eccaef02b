# SPDX-License-Identifier: Apache-2.0
"""Plain data that crosses layers: a request on its way in, the outputs of a round on their way out. No tensors."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, Literal

from tandem_backend.errors import TandemError

SequenceId = int | str

DEFAULT_PRIORITY = 5

# Of the model's own logits, or of the distribution that tokens are chosen from: after penalties, masks and filters.
LogprobsMode = Literal["raw", "processed"]
# exact: seeded draws, the same tokens whatever is drafted. rejection: the same distribution only.
AcceptanceRule = Literal["exact", "rejection"]
TopLogprobs = tuple[tuple[int, float], ...]  # (token id, logprob), the likeliest first


class FinishReason(StrEnum):
    """Why a request ended: a stop token or stop string, the token limit, a cancellation, or its own timeout_ms."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"


class SessionEnd(StrEnum):
    """Why a session's state was dropped."""

    ENDED = "ended"  # by END or stop
    RESET = "reset"  # by START on the live sequence
    IDLE = "idle"  # for longer than session_idle_s
    MEMORY = "memory"  # its slot or blocks were needed, or max_sessions was reached
    FAILED = "failed"  # a round or a turn's start failed, or its first turn never ran


class GrammarKind(StrEnum):
    """How a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"  # a JSON list of texts
    GRAMMAR = "grammar"  # EBNF as in llama.cpp (::=), or Lark


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What an answer must look like."""

    kind: GrammarKind
    source: str
    field: str  # the request's field that asked for it, for errors
    whitespace_pattern: str | None = None  # a regex, of space within JSON; None: a space or an indented line break


class ToolMode(StrEnum):
    """Whether the answer may or must call tools."""

    AUTO = "auto"
    REQUIRED = "required"
    NAMED = "named"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    mode: ToolMode = ToolMode.AUTO
    name: str | None = None  # of the one tool that NAMED calls
    parallel: bool = True  # REQUIRED may make several calls


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What a request asks of decoding; validated by `serving.sampling` before it is built.

    The defaults are neutral: greedy decoding of the model's own logits.
    """

    max_tokens: int | None = None  # None: the engine's default_max_tokens
    min_tokens: int = 0  # end-of-sequence and stop tokens do not end the request before
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False  # keep the stop string in the text
    drafter: str | None = None  # a drafter's name, "none", or None for the engine's default
    num_draft_tokens: int | None = None  # upper bound of draft nodes a round; None: the engine's
    temperature: float = 0.0  # 0: greedy, which draws nothing
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None  # below 2^64; None: a fresh one where temperature is above 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0  # 0: any may repeat
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added), each id once
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    num_logprobs: int = 0  # of the likeliest tokens, beside the chosen one's
    logprobs_mode: LogprobsMode = "raw"
    prompt_logprobs: int | None = None  # the same for the prompt's tokens; None: not even theirs
    grammar: Grammar | None = None
    tool_choice: ToolChoice | None = None  # None: the text is not searched for calls
    max_reasoning_tokens: int | None = None  # of the answer's reasoning block; None: no limit
    reasoning_stall_tokens: int | None = None  # a block whose last so many tokens repeat is closed; None: never
    acceptance: AcceptanceRule = "exact"
    relax_tau: float | None = None  # a draft with this share of the largest probability is taken; None: never
    relax_rank: int = 5  # and only if it is among so many likeliest tokens
    num_choices: int = 1  # answers to the one prompt; answer k draws with seed + k

    @property
    def uses_rejection(self) -> bool:
        return self.acceptance == "rejection" and self.temperature > 0

    @property
    def depends_on_drafts(self) -> bool:
        """Whether its tokens may depend on what was drafted; by default they can't."""
        return self.uses_rejection or self.relax_tau is not None

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def is_plain(self) -> bool:
        """Whether a token is the one with the largest logit and comes with its own logprob (min_tokens aside)."""
        return not (
            self.temperature
            or self.has_penalties
            or self.no_repeat_ngram_size
            or self.logit_bias
            or self.bad_words
            or self.allowed_token_ids is not None
            or self.num_logprobs
            or self.relax_tau is not None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Exactly one of text, messages or token_ids; tools and template_kwargs go to the chat template."""

    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    token_ids: tuple[int, ...] | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One generation. With a sequence_id it is a turn of a session: START opens it, END drops it afterwards."""

    request_id: str  # unique among the engine's live requests
    prompt: Prompt
    params: SamplingParams = SamplingParams()
    sequence_id: SequenceId | None = None
    sequence_start: bool = False
    sequence_end: bool = False
    priority: int = DEFAULT_PRIORITY  # 1 starts first, 9 last
    timeout_ms: int | None = None  # from arrival to the last token; None: no limit
    cache_salt: str = ""  # only requests of the same salt share cached prefixes and responses
    whole_conversation: bool = False  # the prompt of a turn is the whole conversation, not what is new in it
    return_receipt: bool = False  # the last output has one
    return_draft_trees: bool = False  # outputs tell the rounds that gave them


def acceptance_len(num_tokens: int, num_decode_rounds: int) -> float:
    """Tokens committed a decoding round, bonus token included; 0.0 where no round decoded.

    num_tokens are those of the decoding rounds: a request's first token comes from its prompt's pass and isn't among
    them. Plain decoding has 1.0.
    """
    return num_tokens / num_decode_rounds if num_decode_rounds else 0.0


@dataclass(slots=True)
class RequestStats:
    """What a request cost; times are `time.time_ns()`."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens whose state was kept from before
    is_cached_response: bool = False  # the answer was kept whole: nothing was computed
    num_output_tokens: int = 0
    num_rounds: int = 0  # that took its prompt rows or gave it tokens
    num_decode_rounds: int = 0  # of these, the ones after its prompt's
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafter_tokens: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> (drafted, accepted)
    seed: int | None = None  # what its tokens were drawn with; None: greedy
    arrival_time_ns: int = 0
    first_scheduled_time_ns: int = 0
    first_token_time_ns: int = 0
    last_token_time_ns: int = 0

    @property
    def acceptance_len(self) -> float:
        return acceptance_len(self.num_output_tokens - 1, self.num_decode_rounds)


@dataclass(slots=True)
class CacheCounters:
    """What a cache did since the load."""

    num_hits: int = 0
    num_misses: int = 0
    num_saved_tokens: int = 0  # that were not computed again
    num_evictions: int = 0

    def count(self, num_tokens: int) -> None:
        """Take note of a request that found so many of its tokens; none: a miss."""
        if num_tokens:
            self.num_hits += 1
            self.num_saved_tokens += num_tokens
        else:
            self.num_misses += 1


@dataclass(slots=True)
class Histogram:
    """How many values lie up to each bound, and their sum."""

    bounds: tuple[float, ...]  # upper ones, included; ascending
    counts: list[int] = field(default_factory=list)  # by bound, and of the values beyond the last
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, number: int = 1) -> None:
        """Take note of `number` equal values."""
        self.counts[bisect_left(self.bounds, value)] += number
        self.total += value * number


# Bounds of histograms: seconds of what happens once a round or a token, and counts.
ROUND_S = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0)
TOKEN_S = (
    *(0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
ROUND_TOKENS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)


@dataclass(slots=True)
class EngineCounters:
    """What an engine did since it was loaded."""

    num_rounds: int = 0
    num_output_tokens: int = 0
    drafter_tokens: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> (drafted, accepted)
    caches: dict[str, CacheCounters] = field(default_factory=dict)  # by cache: prefix, session, response, disk
    ended_sessions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SessionEnd, 0))
    part_s: dict[str, float] = field(default_factory=dict)  # seconds of all rounds by part: draft, verify, ...
    round_s: Histogram = field(default_factory=partial(Histogram, ROUND_S))
    round_rows: Histogram = field(default_factory=partial(Histogram, ROWS))
    round_sequences: Histogram = field(default_factory=partial(Histogram, ROWS))
    # Tokens that a decoding sequence committed in a round, bonus token included.
    acceptance_len: Histogram = field(default_factory=partial(Histogram, ROUND_TOKENS))
    # Seconds between a request's tokens; those of one round share the time since the round before.
    inter_token_s: Histogram = field(default_factory=partial(Histogram, TOKEN_S))


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """Of a prompt token, given the tokens before it."""

    token_id: int
    logprob: float
    top: TopLogprobs = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTree:
    """A round that gave a request tokens, and the draft tree that it verified, in depth-first pre-order.

    Node 0 is the anchor, the token before. A node was accepted where its token is in the answer.
    """

    index: int  # 0: the pass over the prompt, which has no tree; then the request's decoding rounds
    num_tokens: int  # that it gave
    path: tuple[int, ...]  # the accepted nodes: token k is path[k]'s; the token after them is the target's own
    proposers: tuple[str, ...] = ()  # who proposed each node of `path`
    token_ids: tuple[int, ...] | None = ()  # by node; None: the tree is left out, too many were told before
    parents: tuple[int, ...] = ()  # -1: the anchor's
    scores: tuple[float, ...] = ()  # the drafter's own of each node, given its parent
    drafters: tuple[str, ...] = ()  # who proposed the node first; "" for the anchor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one round gave one request. The last output has a finish_reason or an error, never both."""

    request_id: str
    text: str = ""  # text that is final: whole characters, no possible start of a stop string
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()  # natural log of each token's probability, fp32
    top_logprobs: tuple[TopLogprobs, ...] = ()  # by token, where the request asks for them
    prompt_logprobs: tuple[PromptLogprob | None, ...] = ()  # on the first output, where the request asks for them
    finish_reason: FinishReason | None = None
    error: TandemError | None = None
    stats: RequestStats | None = None  # on the last output of a request that was scheduled
    receipt: str | None = None  # on the last output, where the request asks for it
    rounds: tuple[RoundTree, ...] = ()  # that gave token_ids, where the request asks for them

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None


def join_outputs(outputs: Sequence[StepOutput]) -> StepOutput:
    """One output with all that a request's outputs gave one after the other; what only the last has is the last's."""
    return replace(
        outputs[-1],
        text="".join(output.text for output in outputs),
        token_ids=tuple(token_id for output in outputs for token_id in output.token_ids),
        logprobs=tuple(logprob for output in outputs for logprob in output.logprobs),
        top_logprobs=tuple(top for output in outputs for top in output.top_logprobs),
        prompt_logprobs=tuple(entry for output in outputs for entry in output.prompt_logprobs),
        rounds=tuple(tree for output in outputs for tree in output.rounds),
    )
