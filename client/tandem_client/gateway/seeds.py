# SPDX-License-Identifier: Apache-2.0
"""Seeds that say what they are for: sent back with the same conversation, a seed alone tells how it was sampled.

A seed is 32 random bits, the index of its mode, and a check over both and the conversation. So the gateway that gets it
back needs no memory, and a client's own seed is taken for one of these once in a million times.
"""

import secrets
from hashlib import blake2b

MODES = ("regenerate", "loop_escape")

_RANDOM_BITS, _CHECK_BITS = 32, 20  # with one bit for the mode, 53 in all: what a double, so any JSON reader, holds


def fresh_seed(mode: str, digest: bytes) -> int:
    """A new seed to sample an answer to the conversation `digest` in `mode`."""
    stem = secrets.randbits(_RANDOM_BITS) * len(MODES) + MODES.index(mode)
    return stem << _CHECK_BITS | _check(stem, digest)


def mode_of(seed: object, digest: bytes) -> str | None:
    """The mode that `seed` was made for, with this conversation; None for any other value."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 1 << 53:
        return None
    stem = seed >> _CHECK_BITS
    return MODES[stem % len(MODES)] if seed == stem << _CHECK_BITS | _check(stem, digest) else None


def _check(stem: int, digest: bytes) -> int:
    found = blake2b(stem.to_bytes(8, "big"), key=digest, digest_size=4).digest()
    return int.from_bytes(found, "big") % (1 << _CHECK_BITS)
