# SPDX-License-Identifier: Apache-2.0
"""What was said in a session, to be said again to a server that does not know it. Pure; shared by both clients."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tandem_client.errors import ServerError, TandemClientError
from tandem_client.payload import Payload, json_tensor, read_json_tensor
from tandem_client.types import Chunk

# A turn of a sequence that Triton server, or the engine, has never seen or not seen for too long, in their words.
_UNKNOWN_SEQUENCE = ("must specify the START flag", "sequence_id: no open sequence")


class Conversation:
    """The messages of the turns that have ended, with their answers."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.is_whole = True  # no answer had parts that a message of plain text can't give back

    def turn(self, payload: Payload) -> "Turn":
        if "messages" not in payload.inputs:
            raise ValueError("messages: a session that resumes takes turns as messages alone")
        return Turn(self, payload)


class Turn:
    """A turn that is being answered; it belongs to the conversation once it has a finish reason."""

    def __init__(self, conversation: Conversation, payload: Payload) -> None:
        self._conversation, self._payload = conversation, payload
        self._messages: list[Any] = read_json_tensor(payload.inputs["messages"])
        self._text = ""

    def read(self, chunk: Chunk) -> None:
        self._text += chunk.text
        if chunk.tool_calls or chunk.reasoning:
            self._conversation.is_whole = False
        if chunk.finish_reason is not None:
            answer = {"role": "assistant", "content": self._text}
            self._conversation.messages += [*self._messages, answer]

    def whole(self, error: TandemClientError) -> Payload | None:
        """The turn with all that was said before it; None where `error` is another, or not all is known."""
        is_unknown = isinstance(error, ServerError) and any(words in error.message for words in _UNKNOWN_SEQUENCE)
        if not is_unknown or not self._conversation.is_whole:
            return None
        messages = [*self._conversation.messages, *self._messages]
        inputs: Mapping[str, Any] = {**self._payload.inputs, "messages": json_tensor("messages", messages)}
        return replace(self._payload, inputs=inputs)
