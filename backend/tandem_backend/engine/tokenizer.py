# SPDX-License-Identifier: Apache-2.0
"""Tokenizer: text to ids, chats through the checkpoint's template, and ids back to text as they arrive."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer

from tandem_backend.errors import CheckpointError, InvalidRequestError


def has_tokenizer(checkpoint: Path) -> bool:
    return (checkpoint / "tokenizer_config.json").exists() or (checkpoint / "tokenizer.json").exists()


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

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

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
