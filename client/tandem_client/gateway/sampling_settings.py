# SPDX-License-Identifier: Apache-2.0
"""How the gateway samples by itself: with settings of its own, or with a checkpoint's generation_config.json."""

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

# What transformers' GenerationConfig samples with where a checkpoint's file says nothing.
_TRANSFORMERS_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}


class SamplingSettings(BaseModel):
    """Values of the model's sampling parameters, in the model's bounds; None: not sent."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: Annotated[float, Field(ge=0.001, le=100)] = 0.7
    top_k: Annotated[int, Field(ge=-1)] | None = None
    top_p: Annotated[float, Field(ge=1e-6, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(ge=1e-6, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None

    def values(self) -> dict[str, Any]:
        """The parameters by name, as they are sent and reported."""
        return self.model_dump(exclude_none=True)

    def __str__(self) -> str:
        """As JSON: how it is given on the command line, and shown there."""
        return json.dumps(self.values())


def read_generation_config(path: Path | None) -> SamplingSettings:
    """The sampling that a checkpoint's generation_config.json recommends; what it leaves out, as transformers has it.

    None: nothing but those defaults. Raises ValueError naming the file where it can't be read or holds wrong values.
    """
    try:
        config = json.loads(path.read_text()) if path is not None else {}
        known = {name: config[name] for name in SamplingSettings.model_fields if config.get(name) is not None}
        return SamplingSettings(**{**_TRANSFORMERS_DEFAULTS, **known})
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"generation_config: {path}: {error}") from error
