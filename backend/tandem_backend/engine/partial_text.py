# SPDX-License-Identifier: Apache-2.0
"""Reading a text that is still coming."""

from collections.abc import Sequence


def held_len(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of the markers without being all of it."""
    longest = max(map(len, markers)) - 1
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(m.startswith(text[-n:]) for m in markers)), 0)


def skip_space(text: str) -> int:
    """Length of the white space that `text` begins with."""
    return len(text) - len(text.lstrip())
