# SPDX-License-Identifier: Apache-2.0
"""Receipts: what a request asked, what it got and under what, so that anyone with the checkpoint can hold us to it.

`trail` has four bytes a token of a hash that runs over every token id and the bits of its log-probability: the first
place where it differs from a replay is the first token that differs. `digest` covers everything else, so an edited
receipt is told from one that is merely wrong; it is no signature.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from tandem_backend.engine.fingerprint import Fingerprint
from tandem_backend.errors import TandemError
from tandem_backend.types import FinishReason, Prompt, Request, SamplingParams

if TYPE_CHECKING:  # a generation has a trail
    from tandem_backend.engine.sequence import Generation

TRAIL_DIGITS = 8  # hexadecimal, of the running hash after each token
_PARAMS = TypeAdapter(SamplingParams)


class ReceiptError(TandemError):
    """A text is no receipt, or not one as it was given out."""


@dataclass(slots=True)
class Trail:
    """The running hash over (token id, bits of its log-probability)."""

    _hash: Any = field(default_factory=hashlib.sha256)
    _marks: list[str] = field(default_factory=list)

    def add(self, token_ids: Iterable[int], logprobs: Iterable[float]) -> None:
        for token_id, logprob in zip(token_ids, logprobs, strict=True):
            self._hash.update(struct.pack("<if", token_id, logprob))
            self._marks.append(self._hash.hexdigest()[:TRAIL_DIGITS])

    @property
    def marks(self) -> str:
        return "".join(self._marks)

    @property
    def hash(self) -> str:
        return str(self._hash.hexdigest())


class Receipt(BaseModel):
    """Hashes are SHA-256 in hex."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    fingerprint: Fingerprint
    prompt_ids: tuple[int, ...]  # of the whole conversation, in a session
    prompt_hash: str
    params: dict[str, Any]  # SamplingParams, with the seed and the limit that were used
    tools: tuple[dict[str, Any], ...] | None
    template_kwargs: dict[str, Any]
    num_output_tokens: int
    finish_reason: FinishReason
    output_hash: str  # of the output token ids
    logprobs_hash: str  # the running hash after the last token
    trail: str

    def request(self) -> Request:
        """The request again, alone and as long as its output was. Raises ReceiptError."""
        try:
            params = _PARAMS.validate_python(self.params)
        except ValidationError as error:
            raise ReceiptError(f"params: {error}") from error
        prompt = Prompt(token_ids=self.prompt_ids, tools=self.tools, template_kwargs=self.template_kwargs)
        return Request(request_id="audit", prompt=prompt, params=replace(params, drafter="none"))

    def dump(self) -> str:
        """One line of JSON, closed by its digest."""
        return _line(self.model_dump(mode="json"))

    @classmethod
    def load(cls, text: str) -> "Receipt":
        """Raises ReceiptError where a single byte is not as `dump` wrote it."""
        try:
            values = json.loads(text)
            if not isinstance(values, dict):
                raise ReceiptError("a receipt is a JSON object")
            values.pop("digest", None)
            receipt = cls.model_validate(values)
        except (ValueError, RecursionError) as error:
            raise ReceiptError(f"no receipt: {error}") from error
        if text.removesuffix("\n") != receipt.dump():
            raise ReceiptError("the receipt was changed after it was given out: its digest does not fit")
        return receipt


def _line(values: Mapping[str, Any]) -> str:
    body = json.dumps(values, separators=(",", ":"), sort_keys=True)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{body[:-1]},"digest":"{digest}"}}'


def hash_ids(token_ids: Iterable[int]) -> str:
    return hashlib.sha256(b"".join(struct.pack("<i", token_id) for token_id in token_ids)).hexdigest()


def make_receipt(generation: "Generation", trail: Trail, reason: FinishReason, fingerprint: Fingerprint) -> Receipt:
    """The receipt of a request that has ended with all its tokens in `trail`."""
    request, token_ids = generation.request, generation.sequence.token_ids
    first = len(token_ids) - generation.num_output
    params = replace(request.params, max_tokens=generation.max_tokens)
    return Receipt(
        fingerprint=fingerprint,
        prompt_ids=tuple(token_ids[:first]),
        prompt_hash=hash_ids(token_ids[:first]),
        params=_PARAMS.dump_python(params, mode="json"),
        tools=None if request.prompt.tools is None else tuple(dict(tool) for tool in request.prompt.tools),
        template_kwargs=dict(request.prompt.template_kwargs),
        num_output_tokens=generation.num_output,
        finish_reason=reason,
        output_hash=hash_ids(token_ids[first:]),
        logprobs_hash=trail.hash,
        trail=trail.marks,
    )
