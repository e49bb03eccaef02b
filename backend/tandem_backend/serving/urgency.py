# SPDX-License-Identifier: Apache-2.0
"""How soon a request wants its answer: the fields that concern its place in the queue and its time, not its text."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from tandem_backend.serving.sampling import Integer, validated
from tandem_backend.types import DEFAULT_PRIORITY

MAX_TIMEOUT_MS = 86_400_000


class Urgency(BaseModel):
    """Numbers may be text, as in `sampling.SamplingFields`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    priority: Annotated[Integer, Field(ge=0, le=9)] = DEFAULT_PRIORITY
    timeout_ms: Annotated[Integer, Field(ge=1, le=MAX_TIMEOUT_MS)] | None = None


def take_urgency(values: dict[str, Any], timeout_us: int) -> Urgency:
    """Take the fields out of `values`. `timeout_us` is the protocol's own timeout, 0 for none; timeout_ms wins over it.

    Raises InvalidRequestError naming the field. Priority 0 is the default one, as in Triton server.
    """
    given: Mapping[str, Any] = {name: values.pop(name) for name in Urgency.model_fields if name in values}
    if given.get("timeout_ms") is None and timeout_us > 0:
        given = {**given, "timeout_ms": min(-(-timeout_us // 1000), MAX_TIMEOUT_MS)}
    urgency = validated(Urgency, given)
    return urgency if urgency.priority else urgency.model_copy(update={"priority": DEFAULT_PRIORITY})
