# SPDX-License-Identifier: Apache-2.0
"""What all endpoints ask of the backend in the same way: sampling values, limits, log probabilities."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem_client.gateway.errors import invalid
from tandem_client.gateway.fields import forwarded

# Beyond the backend's own deadline, after which it ends the answer itself; only a hung backend gets there.
GRACE_S = 10.0


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request, and what that allows: `cache_salt` is the circle within which prefixes are shared."""

    key_name: str = ""
    cache_salt: str = ""
    timeout_s: float = 600.0


def base_sampling(endpoint: str, values: Mapping[str, Any], caller: Caller) -> dict[str, Any]:
    """The sampling values that don't depend on the endpoint's own form."""
    sampling = forwarded(endpoint, values)
    limit_ms = max(int(caller.timeout_s * 1000), 1)
    sampling["timeout_ms"] = min(sampling.get("timeout_ms", limit_ms), limit_ms)
    salt = joined_salt(caller.cache_salt, values.get("cache_salt"))
    if salt:
        sampling["cache_salt"] = salt
    if "logprobs" in values:
        sampling["logprobs_bytes"] = True
    return sampling


def joined_salt(key_salt: str, own: str | None) -> str:
    """The cache's salt of a request: within a key's own caches a request may ask for a smaller circle, never leave."""
    if own is None:
        return key_salt
    return hashlib.sha256(f"{len(key_salt)}:{key_salt}{own}".encode("utf-8", "surrogatepass")).hexdigest()


def read_stream_options(values: Mapping[str, Any]) -> bool:
    """Whether the stream shall end with usage. Raises ApiError 400."""
    options = values.get("stream_options")
    if options is None:
        return False
    if not values.get("stream"):
        raise invalid("stream_options", "only with stream")
    for name, value in options.items():
        if name not in ("include_usage", "include_obfuscation"):
            raise invalid(f"stream_options.{name[:100]}", "is not known", "unknown_parameter")
        if value is not None and not isinstance(value, bool):
            raise invalid(f"stream_options.{name}", "must be true or false")
    return bool(options.get("include_usage"))


def one_limit(values: Mapping[str, Any], *names: str) -> int | None:
    """The token limit under whichever of `names` it was sent. Raises ApiError 400 where they contradict each other."""
    found = {values[name] for name in names if name in values}
    if len(found) > 1:
        raise invalid(names[0], f"contradicts {names[1]}")
    return found.pop() if found else None
