# SPDX-License-Identifier: Apache-2.0
"""Loop escape: an agent that makes one call over and over gets out by sampling; greedily it would go on for ever.

All of it is in the conversation itself, so any gateway comes to the same conclusion, and the first turn that makes
another call, like a new message of the user, is the progress that ends it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem_client.gateway.json_text import read_json

Message = Mapping[str, Any]


def is_looping(messages: Sequence[Message], num_turns: int) -> bool:
    """Whether the last `num_turns` turns of the agent all made one and the same call, by name and arguments.

    Calls beside it and the tools' results don't count.
    """
    common: set[tuple[str, str]] | None = None
    found = 0
    for calls in _turns_backwards(messages):
        common = calls if common is None else common & calls
        found += 1
        if not common or found == num_turns:
            break
    return bool(common) and found == num_turns


def _turns_backwards(messages: Sequence[Message]) -> Iterator[set[tuple[str, str]]]:
    """The calls of each turn of the agent since the user's last message, the latest turn first."""
    for message in reversed(messages):
        if message.get("role") == "assistant":
            yield {_call(call) for call in message.get("tool_calls") or ()}
        elif message.get("role") not in ("tool", "function"):
            return


def _call(call: Mapping[str, Any]) -> tuple[str, str]:
    function = call.get("function") or call
    return str(function.get("name")), _canonical(function.get("arguments"))


def _canonical(arguments: object) -> str:
    """Equal for arguments that mean the same, however they are written."""
    try:
        value = read_json(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        value = arguments
    return json.dumps(value, sort_keys=True)
