# SPDX-License-Identifier: Apache-2.0
"""JSON of clients: what can be read, walked through and written back; nothing else gets in."""

from typing import Any

import orjson

MAX_DEPTH = 254  # levels that orjson writes; Python's json module and repr stand some more


def read_json(text: bytes | str) -> Any:
    """The value of `text`. Raises ValueError where it is no JSON, holds lone surrogates or is nested too deeply."""
    value = orjson.loads(text)
    try:
        orjson.dumps(value)
    except TypeError:
        raise ValueError(f"it is nested too deeply: at most {MAX_DEPTH} levels are read") from None
    return value
