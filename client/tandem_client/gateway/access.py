# SPDX-License-Identifier: Apache-2.0
"""Who may send what: API keys, limits by key, the limit of all. Keys are kept as hashes alone."""

import hashlib
import hmac
import json
import os
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from time import time
from typing import Annotated

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import Headers

from tandem_client.gateway.errors import ApiError
from tandem_client.gateway.options import Caller
from tandem_client.gateway.settings import Settings

KEY_PREFIX = "sk-tandem-"
BUSY_RETRY_S = 1


class Key(BaseModel):
    """An API key as the keys file has it. A key is 256 random bits, so a plain hash of it can't be guessed back."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(min_length=1, max_length=100)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None  # keys of one salt share cached prefixes

    @property
    def salt(self) -> str:
        """What keeps this key's cached prefixes from other keys, and from those without one."""
        if self.cache_salt is not None:
            return self.cache_salt
        return hashlib.sha256(b"cache salt of " + self.sha256.encode()).hexdigest()


class _KeysFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: list[Key] = []


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def read_keys(path: Path) -> list[Key]:
    """The keys in a file. Raises ValueError naming what is wrong with it, OSError."""
    try:
        keys = _KeysFile.model_validate_json(path.read_bytes()).keys
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{path}: {where}: {first['msg']}") from error
    for what in ("name", "sha256"):  # of one hash, the last one's limits would count
        found = Counter(getattr(key, what) for key in keys)
        twice = [value for value, count in found.items() if count > 1]
        if twice:
            raise ValueError(f"{path}: the {what} {twice[0]!r} is there twice")
    return keys


def add_key(path: Path, name: str, **limits: int | str | None) -> str:
    """Add a fresh key to the file, its owner's alone, and return it: it is nowhere else. Raises as `read_keys`."""
    keys = read_keys(path) if path.exists() else []
    if any(key.name == name for key in keys):
        raise ValueError(f"{path}: the name {name!r} is taken")
    secret = KEY_PREFIX + secrets.token_urlsafe(32)
    keys.append(Key.model_validate({"name": name, "sha256": hash_key(secret), **limits}))
    text = json.dumps({"keys": [key.model_dump(exclude_none=True) for key in keys]}, indent=2) + "\n"
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.touch(mode=0o600)
    beside.write_text(text)
    beside.replace(path)
    return secret


class Access:
    """Admits requests. One process counts for itself: several gateways give a key several times its limits."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._running: Counter[str] = Counter()
        self._limiter = MovingWindowRateLimiter(MemoryStorage())
        self._keys: dict[str, Key] = {}
        self.reload()

    def reload(self) -> int:
        """Read the keys file again and tell how many keys there are. Where that raises the old ones stay."""
        path = self._settings.keys_file
        if path is not None:
            self._keys = {key.sha256: key for key in read_keys(path)}
        return len(self._keys)

    def identify(self, headers: Headers) -> Key | None:
        """The caller's key; None where none is asked for. Raises ApiError 401."""
        if self._settings.keys_file is None:
            return None
        key = self._keys.get(hash_key(_bearer(headers)))
        if key is None:
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        return key

    def caller(self, key: Key | None) -> Caller:
        """What is to be known of who sends a generating request with a key that `identify` returned."""
        name, salt = ("", "") if key is None else (key.name, key.salt)
        return Caller(key_name=name, cache_salt=salt, timeout_s=self._settings.request_timeout_s)

    @contextmanager
    def admitted(self, key: Key | None) -> Iterator[None]:
        """Counts a generating request while it runs. Raises ApiError 429 and 503."""
        if self._running.total() >= self._settings.max_requests:
            raise ApiError(503, "too many requests are running", code="overloaded", retry_after_s=BUSY_RETRY_S)
        name = "" if key is None else key.name
        if key is not None:
            self._check_limits(key)
        self._running[name] += 1
        try:
            yield
        finally:
            self._running[name] -= 1

    def check_admin(self, headers: Headers) -> None:
        """Raises ApiError 401 without the admin token, and 403 where none is set."""
        token = self._settings.admin_token
        if token is None:
            raise ApiError(403, "there is no admin: the gateway was started without an admin_token")
        if not hmac.compare_digest(_bearer(headers).encode(), token.get_secret_value().encode()):
            raise ApiError(401, "the admin token is needed: Authorization: Bearer TOKEN", code="invalid_admin_token")

    def describe(self) -> list[dict[str, object]]:
        """Each key's name, limits and running requests."""
        return [
            {
                **key.model_dump(include={"name", "requests_per_minute", "max_concurrent"}),
                "running": self._running[key.name],
            }
            for key in self._keys.values()
        ]

    def _check_limits(self, key: Key) -> None:
        if key.max_concurrent is not None and self._running[key.name] >= key.max_concurrent:
            raise ApiError(
                429,
                f"this key may run {key.max_concurrent} requests at once",
                code="concurrency_limit_exceeded",
                retry_after_s=BUSY_RETRY_S,
            )
        if key.requests_per_minute is None:
            return
        limit = RateLimitItemPerMinute(key.requests_per_minute)
        if not self._limiter.hit(limit, key.sha256):
            reset_s = self._limiter.get_window_stats(limit, key.sha256).reset_time
            raise ApiError(
                429,
                f"this key may send {key.requests_per_minute} requests a minute",
                code="rate_limit_exceeded",
                retry_after_s=max(ceil(reset_s - time()), 1),
            )


def _bearer(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
