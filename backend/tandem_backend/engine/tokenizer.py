# SPDX-License-Identifier: Apache-2.0
"""Tokenizer: text to ids, chats through the checkpoint's template, and ids back to text as they arrive."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tandem_backend.errors import CheckpointError, InvalidRequestError


def has_tokenizer(checkpoint: Path) -> bool:
    return (checkpoint / "tokenizer_config.json").exists() or (checkpoint / "tokenizer.json").exists()


# What transformers itself reads or gives to a template; a client may only set the template's own variables.
RESERVED_KWARGS = frozenset(
    {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"}
    | {*PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES, "raise_exception", "strftime_now"}
)


class Tokenizer:
    """A checkpoint's tokenizer. Thread-safe: nothing is changed after loading."""

    def __init__(self, checkpoint: Path) -> None:
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(checkpoint), local_files_only=True)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{checkpoint}: the tokenizer can't be loaded: {error}") from error
        if not self._tokenizer.is_fast:
            raise CheckpointError(f"{checkpoint}: the tokenizer has no tokenizer.json (a fast tokenizer is needed)")
        self._backend = self._tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        longest = max(len(token.encode("utf-8")) for token in self.vocabulary())
        # Normalisation can compose what was sent as several code points, which at most thirds the bytes (NFC).
        self._max_token_bytes = longest if self._backend.normalizer is None else 3 * longest

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # A batch of one: unlike `encode` it lets other threads run meanwhile.
        ids: list[int] = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def min_tokens(self, text: str) -> int:
        """A bound that needs no tokenising: so many tokens the text has at least."""
        return len(text.encode("utf-8", "replace")) // self._max_token_bytes

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        """The chat as one text, ready for the assistant. Raises InvalidRequestError when the template refuses it."""
        if self._tokenizer.chat_template is None:
            raise InvalidRequestError("messages: the checkpoint has no chat template; send text_input")
        reserved = sorted(RESERVED_KWARGS.intersection(template_kwargs))
        if reserved:
            raise InvalidRequestError(f"chat_template_kwargs: {reserved[0]} may not be set")
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=True,
                tokenize=False,
                **template_kwargs,
            )
        # A template is a program of the checkpoint's: whatever it raises is about these messages.
        except Exception as error:
            raise InvalidRequestError(f"messages: the chat template refused them: {error}") from error
        return text

    def vocabulary(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocabulary

    @property
    def chat_template(self) -> str | None:
        template: str | None = self._tokenizer.chat_template
        return template if isinstance(template, str) else None

    def to_json(self) -> str:
        """As a tokenizer.json, with the tokens that tokenizer_config.json adds."""
        text: str = self._backend.to_str()
        return text

    def stream(self) -> "TokenTextStream":
        return TokenTextStream(self)


class TokenTextStream:
    """Text of tokens as they come; a character is given out when all its bytes are there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._num_given = 0

    def push(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        piece: str = self._decoder.step(self._tokenizer._backend, token_id) or ""
        self._num_given += len(piece)
        return piece

    def flush(self) -> str:
        """What is left at the end: bytes that never became a character, as replacement characters."""
        rest = self._tokenizer.decode(self._token_ids, skip_special_tokens=True)[self._num_given :]
        self._num_given += len(rest)
        return rest
