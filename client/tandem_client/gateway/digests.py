# SPDX-License-Identifier: Apache-2.0
"""Digests by which the gateway knows a conversation again without keeping its text. Pure."""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

Message = Mapping[str, Any]

_SIZE = 16  # bytes: no two conversations ever share one by chance


def message_digests(scope: object, messages: Sequence[Message]) -> tuple[bytes, ...]:
    """One digest a message, of everything up to it: equal where `scope` and all messages so far are equal.

    scope: JSON-like data on what else the conversation hangs: whose it is, the model, its tools. Fields that are null
    or empty count as absent, and text in parts as the text that they make, because clients send back either form.
    """
    digest = _digest(b"", scope)
    digests = []
    for message in messages:
        digest = _digest(
            digest, {name: value for name, value in _plain(message).items() if value not in (None, "", [])}
        )
        digests.append(digest)
    return tuple(digests)


def named_digest(scope: object, name: str) -> bytes:
    """The digest of a conversation that its client names, different from that of any messages."""
    return _digest(b"named", [scope, name])


def _digest(before: bytes, value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), key=before, digest_size=_SIZE).digest()


def _plain(message: Message) -> Message:
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return {**message, "content": "".join(str(part.get("text", "")) for part in content)}
    return message
