# SPDX-License-Identifier: Apache-2.0
"""Prompt files: JSON lines with an `id`, and a `prompt`, `messages` (maybe with `tools`) or `input_ids`."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tandem_backend.types import Prompt, SamplingParams

SOURCES = ("prompt", "messages", "input_ids")


@dataclass(frozen=True, slots=True)
class NamedPrompt:
    """A line of a prompt file."""

    name: str
    prompt: Prompt
    params: SamplingParams = field(
        default_factory=SamplingParams
    )  # how it is decoded; drafter and max_tokens come from the gate


class PromptFileError(ValueError):
    """The file can't be used; the message names the line and the key."""


class _Line(BaseModel):
    """Further keys (kind, source ...) describe the prompt and are not read."""

    model_config = ConfigDict(extra="ignore", strict=True)

    id: str | int
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    input_ids: list[int] | None = None
    tools: list[dict[str, Any]] | None = None


def read_prompts(path: Path) -> list[NamedPrompt]:
    """Read a file of prompts; empty lines are skipped. Raises PromptFileError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptFileError(f"{path}: can't be read: {error}") from error
    prompts = [_parse(f"{path}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not prompts:
        raise PromptFileError(f"{path}: holds no prompt")
    names = [prompt.name for prompt in prompts]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise PromptFileError(f"{path}: id {repeated!r} stands more than once")
    return prompts


def _parse(where: str, text: str) -> NamedPrompt:
    try:
        line = _Line.model_validate(json.loads(text))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise PromptFileError(f"{where}: {f'{key}: ' if key else ''}{problem['msg']}") from error
    except ValueError as error:
        raise PromptFileError(f"{where}: not valid JSON: {error}") from error
    given = [name for name in SOURCES if getattr(line, name) is not None]
    if len(given) != 1:
        raise PromptFileError(
            f"{where}: needs exactly one of {', '.join(SOURCES)}, has {' and '.join(given) or 'none'}"
        )
    if line.tools is not None and line.messages is None:
        raise PromptFileError(f"{where}: tools: only allowed with messages")
    prompt = Prompt(
        text=line.prompt,
        messages=None if line.messages is None else tuple(line.messages),
        token_ids=None if line.input_ids is None else tuple(line.input_ids),
        tools=None if line.tools is None else tuple(line.tools),
    )
    return NamedPrompt(str(line.id), prompt)
