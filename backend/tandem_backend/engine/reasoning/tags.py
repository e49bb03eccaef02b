# SPDX-License-Identifier: Apache-2.0
"""ReasoningTags: the tokens that open and close a reasoning block, as the checkpoint's chat template uses them."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem_backend.engine.tokenizer import Tokenizer
from tandem_backend.errors import InvalidRequestError

OPEN, CLOSE = "<think>", "</think>"
REASONING, ANSWER = "the-reasoning", "the-answer"
USUAL_CLOSING = f"\n{CLOSE}\n\n"
TAIL_LEN = 8  # tokens at a prompt's end in which the template may have opened a block


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    open_id: int
    close_id: int
    closing_ids: tuple[int, ...]  # what the template writes between reasoning and answer; has close_id

    @property
    def after_close_ids(self) -> tuple[int, ...]:
        return self.closing_ids[self.closing_ids.index(self.close_id) + 1 :]


def find_tags(tokenizer: Tokenizer) -> ReasoningTags | None:
    """None for a tokenizer that has no tags of its own."""
    vocabulary = tokenizer.vocabulary()
    if OPEN not in vocabulary or CLOSE not in vocabulary:
        return None
    closing_ids = tuple(tokenizer.encode(_closing(tokenizer), add_special_tokens=False))
    return ReasoningTags(vocabulary[OPEN], vocabulary[CLOSE], closing_ids)


def _closing(tokenizer: Tokenizer) -> str:
    """What the template writes between reasoning and answer; the usual where it has none."""
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "reasoning_content": REASONING, "content": ANSWER},
    ]
    try:
        text = tokenizer.render_chat(messages, None, {})
    except InvalidRequestError:
        return USUAL_CLOSING
    between = text.partition(REASONING)[2].partition(ANSWER)[0]
    return between if between.count(CLOSE) == 1 else USUAL_CLOSING


def opens_reasoning(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool:
    """Whether the prompt ends within a reasoning block that its template has just opened."""
    tail = tokenizer.decode(prompt_ids[-TAIL_LEN:], skip_special_tokens=False)
    return tail.rstrip().endswith(OPEN)
