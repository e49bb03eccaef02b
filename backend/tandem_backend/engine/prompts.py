# SPDX-License-Identifier: Apache-2.0
"""Prompts: from what a request says (text, messages or ids) to the token ids its sequence shall hold."""

from collections.abc import Sequence

from tandem_backend.engine.sequence import Session
from tandem_backend.engine.tokenizer import Tokenizer
from tandem_backend.errors import InvalidRequestError
from tandem_backend.types import Prompt


class PromptEncoder:
    """Thread-safe; holds no state but the tokenizer (None for a checkpoint without one)."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, max_context_len: int) -> None:
        self.tokenizer, self.vocab_size, self.max_context_len = tokenizer, vocab_size, max_context_len

    def encode(self, prompt: Prompt) -> list[int]:
        """The prompt by itself, as a first turn. Raises InvalidRequestError naming the field."""
        if prompt.token_ids is not None:
            return self._checked("input_ids", prompt.token_ids)
        if prompt.messages is not None:
            tokenizer = self._tokenizer("messages")
            self._check_size("messages", len(prompt.messages))
            text = tokenizer.render_chat(prompt.messages, prompt.tools, prompt.template_kwargs)
            self._check_size("messages", tokenizer.min_tokens(text))
            return self._checked("messages", tokenizer.encode(text, add_special_tokens=False))
        tokenizer, text = self._tokenizer("text_input"), prompt.text or ""
        self._check_size("text_input", tokenizer.min_tokens(text))
        return self._checked("text_input", tokenizer.encode(text, add_special_tokens=True))

    def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of each word as it is and after a space. Raises InvalidRequestError without a tokenizer."""
        if not words:
            return ()
        tokenizer = self._tokenizer("bad_words")
        spellings = [form for word in words for form in (word.lstrip(), " " + word.lstrip())]
        return tuple(dict.fromkeys(tuple(tokenizer.encode(form, add_special_tokens=False)) for form in spellings))

    def continue_session(self, session: Session, kept: Sequence[int], prompt: Prompt) -> list[int]:
        """All tokens of the conversation with this turn added to the `kept` ones.

        The result begins with `kept` unless the chat template writes earlier turns differently now (reasoning left out,
        say): then it is the whole conversation afresh.
        """
        if prompt.messages is None or session.messages is None:
            return [*kept, *self.encode(prompt)]
        tokenizer = self._tokenizer("messages")
        text = tokenizer.render_chat([*session.messages, *prompt.messages], prompt.tools, prompt.template_kwargs)
        kept_text = tokenizer.decode(kept, skip_special_tokens=False)
        if text.startswith(kept_text):
            return [*kept, *tokenizer.encode(text[len(kept_text) :], add_special_tokens=False)]
        return tokenizer.encode(text, add_special_tokens=False)

    def _tokenizer(self, field: str) -> Tokenizer:
        if self.tokenizer is None:
            hint = "it can't be used" if field == "bad_words" else "send input_ids"
            raise InvalidRequestError(f"{field}: the checkpoint has no tokenizer; {hint}")
        return self.tokenizer

    def _check_size(self, field: str, min_tokens: int) -> None:
        """Refuse what can't fit before it is tokenised: a huge text would take seconds."""
        if min_tokens >= self.max_context_len:
            raise InvalidRequestError(
                f"{field}: the prompt has at least {min_tokens} tokens; the context has {self.max_context_len}"
            )

    def _checked(self, field: str, token_ids: Sequence[int]) -> list[int]:
        if not token_ids:
            raise InvalidRequestError(f"{field}: must not be empty")
        wrong = [token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size]
        if wrong:
            raise InvalidRequestError(f"{field}: token ids must be in [0, {self.vocab_size}), got {wrong[0]}")
        return list(token_ids)
