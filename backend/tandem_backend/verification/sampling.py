# SPDX-License-Identifier: Apache-2.0
"""The kinds of requests that `tandem verify --sampling` decodes: each prompt once under each kind's options."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tandem_backend.types import Grammar, GrammarKind, SamplingParams
from tandem_backend.verification.prompts import NamedPrompt

_LIST = Grammar(kind=GrammarKind.REGEX, field="structured_outputs", source=r"[A-Z][a-z]{2,8}(, [a-z]{3,12}){4,20}\.")
KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, min_p=0.01),
    "penalties": SamplingParams(
        temperature=0.7,
        top_k=50,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        no_repeat_ngram_size=4,
        logit_bias=((1, 0.5),),
    ),
    "grammar": SamplingParams(temperature=0.7, grammar=_LIST),
    "logprobs": SamplingParams(temperature=0.5, num_logprobs=20, prompt_logprobs=5),
    "stops": SamplingParams(stop=(" the", "\n\n", "): "), include_stop=True, min_tokens=6),
}
# Of a request to a server: fields that have another name there.
_SERVED_NAMES = {
    "num_logprobs": "logprobs",
    "include_stop": "include_stop_str_in_output",
    "grammar": "structured_outputs",
}


def with_kinds(prompts: Sequence[NamedPrompt], kinds: Sequence[str]) -> list[NamedPrompt]:
    """Each prompt under each kind, side by side, so that requests of different kinds share a pass."""
    return [
        replace(prompt, name=f"{prompt.name} [{kind}]", params=_seeded(KINDS[kind], seed))
        for seed, prompt in enumerate(prompts, start=1)
        for kind in kinds
    ]


def _seeded(params: SamplingParams, seed: int) -> SamplingParams:
    return replace(params, seed=seed) if params.temperature > 0 else params


def served_options(params: SamplingParams) -> dict[str, Any]:
    """The options that differ from the defaults, by the names of a request to a server."""
    default, options = SamplingParams(), dict[str, Any]()
    for name in SamplingParams.__dataclass_fields__:
        value = getattr(params, name)
        if value == getattr(default, name):
            continue
        if isinstance(value, Grammar):
            value = {value.kind.value: value.source}
        if name == "logit_bias":
            value = {str(token_id): bias for token_id, bias in value}
        options[_SERVED_NAMES.get(name, name)] = list(value) if isinstance(value, tuple) else value
    return options
