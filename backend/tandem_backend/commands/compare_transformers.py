# SPDX-License-Identifier: Apache-2.0
"""Compares the decoder's logits with transformers' in float32, along transformers' own greedy text."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tandem_kernels as kernels
import torch
from torch import Tensor

from tandem_backend.benchmarks.transformers_side import load_transformers
from tandem_backend.engine.prompts import PromptEncoder
from tandem_backend.engine.tokenizer import Tokenizer
from tandem_backend.errors import InvalidRequestError
from tandem_backend.model.batch import SequenceRows, build_batch
from tandem_backend.model.decoder import Decoder
from tandem_backend.model.state import KV_BLOCK, allocate_state
from tandem_backend.types import Prompt

CLEAR_GAP = 0.05  # between transformers' two best logits: below it, a different argmax is rounding
MAX_DIFFERENCE = 2e-3  # of any logit
CHUNK_ROWS = 256


@dataclass(frozen=True, slots=True)
class PromptCase:
    id: str
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Fork:
    """The first token where our greedy text leaves transformers', and how close transformers' two best logits are."""

    index: int
    our_id: int
    our_text: str
    their_id: int
    their_text: str
    gap_nats: float
    gap_bf16_ulps: float  # of the best logit


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt; positions are those of the continuation."""

    id: str
    num_positions: int
    num_equal: int  # argmax equal
    num_clear_differences: int  # argmax different where the gap is above CLEAR_GAP
    max_difference: float
    fork: Fork | None


@dataclass(frozen=True, slots=True)
class Totals:
    num_prompts: int
    num_same_text: int
    num_positions: int
    num_equal: int
    num_clear_differences: int
    max_difference: float

    @property
    def agrees(self) -> bool:
        return self.num_clear_differences == 0 and self.max_difference < MAX_DIFFERENCE

    @classmethod
    def of(cls, results: Sequence[Comparison]) -> "Totals":
        return cls(
            num_prompts=len(results),
            num_same_text=sum(result.fork is None for result in results),
            num_positions=sum(result.num_positions for result in results),
            num_equal=sum(result.num_equal for result in results),
            num_clear_differences=sum(result.num_clear_differences for result in results),
            max_difference=max((result.max_difference for result in results), default=0.0),
        )


def read_prompts(path: Path) -> list[PromptCase]:
    """JSON lines with id and prompt, or id, messages and maybe tools. Raises InvalidRequestError naming the line."""
    cases = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            text, messages, tools = (values.get(key) for key in ("prompt", "messages", "tools"))
        except (ValueError, AttributeError) as error:
            raise InvalidRequestError(f"{path}: line {number}: not a JSON object: {error}") from error
        if (text is None) == (messages is None):
            raise InvalidRequestError(f"{path}: line {number}: needs either prompt or messages")
        prompt = Prompt(text=text, messages=messages and tuple(messages), tools=tools and tuple(tools))
        cases.append(PromptCase(str(values.get("id", number)), prompt))
    if not cases:
        raise InvalidRequestError(f"{path}: has no prompts")
    return cases


class Comparator:
    """Both models of one checkpoint. Raises CheckpointError when either can't load it."""

    def __init__(self, checkpoint: Path) -> None:
        kernels.set_num_threads(len(os.sched_getaffinity(0)))
        self.decoder = Decoder(checkpoint)
        self.tokenizer = Tokenizer(checkpoint)
        self.encoder = PromptEncoder(self.tokenizer, self.decoder.config.vocab_size, self.decoder.config.max_position)
        self.model = load_transformers(checkpoint)

    def compare(self, case: PromptCase, max_tokens: int) -> Comparison:
        prompt = self.encoder.encode(case.prompt)
        num_tokens = min(max_tokens, self.decoder.config.max_position - len(prompt))
        if num_tokens < 1:
            raise InvalidRequestError(
                f"prompt {case.id}: has {len(prompt)} tokens; the context is {self.decoder.config.max_position}"
            )
        continuation = self._greedy(prompt, num_tokens)
        token_ids = [*prompt, *continuation[:-1]]
        theirs = self._their_logits(token_ids, num_tokens)
        ours = self._our_logits(token_ids, num_tokens)
        top = theirs.topk(2, dim=-1).values
        gaps = top[:, 0] - top[:, 1]
        is_equal = ours.argmax(-1) == theirs.argmax(-1)
        return Comparison(
            id=case.id,
            num_positions=num_tokens,
            num_equal=int(is_equal.sum()),
            num_clear_differences=int((~is_equal & (gaps > CLEAR_GAP)).sum()),
            max_difference=float((ours - theirs).abs().max()),
            fork=self._find_fork(ours.argmax(-1).tolist(), continuation, top),
        )

    def _greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """transformers' text; past an end-of-sequence token too, so that every prompt counts alike."""
        token_ids = torch.tensor([prompt])
        output = self.model.generate(token_ids, attention_mask=torch.ones_like(token_ids), max_new_tokens=num_tokens)
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    @torch.inference_mode()
    def _their_logits(self, token_ids: list[int], count: int) -> Tensor:
        """Logits of the last `count` rows [count, vocab] float32, in one pass."""
        logits: Tensor = self.model(torch.tensor([token_ids]), use_cache=False).logits[0, -count:]
        return logits

    def _our_logits(self, token_ids: list[int], count: int) -> Tensor:
        """The same rows from the decoder; how they are cut into passes can't show."""
        num_blocks = math.ceil(len(token_ids) / KV_BLOCK)
        state = allocate_state(self.decoder.config, num_blocks, num_slots=1)
        logits = []
        for start in range(0, len(token_ids), CHUNK_ROWS):
            chunk = token_ids[start : start + CHUNK_ROWS]
            wanted = range(max(0, len(token_ids) - count - start), len(chunk))
            batch = build_batch([SequenceRows(chunk, start, 0, range(num_blocks), logit_rows=wanted)])
            result = self.decoder.forward(batch, state)
            self.decoder.commit(result, batch, [range(len(chunk))], state)
            logits.append(result.logits)
        return torch.cat(logits)

    def _find_fork(self, ours: list[int], theirs: list[int], top: Tensor) -> Fork | None:
        index = next((i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
        if index is None:
            return None
        best, second = top[index].tolist()
        return Fork(
            index=index,
            our_id=ours[index],
            our_text=self.tokenizer.decode([ours[index]], skip_special_tokens=False),
            their_id=theirs[index],
            their_text=self.tokenizer.decode([theirs[index]], skip_special_tokens=False),
            gap_nats=best - second,
            gap_bf16_ulps=(best - second) / bf16_ulp(best),
        )


def bf16_ulp(value: float) -> float:
    """Distance between bfloat16 numbers (8 significant bits) at `value`'s size."""
    return 2.0 ** (math.frexp(value)[1] - 8)
