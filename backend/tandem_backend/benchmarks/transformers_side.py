# SPDX-License-Identifier: Apache-2.0
"""The same checkpoint decoded by transformers: float32, greedy, with its cache, on as many threads."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from tandem_backend.errors import CheckpointError


@dataclass(slots=True)
class _Clock:
    """A streamer of `generate`: it is given the prompt before the first pass, then each token."""

    times: list[float] = field(default_factory=list)

    def put(self, token_ids: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


@dataclass(frozen=True, slots=True)
class Generated:
    prefill_s: float  # to the first token
    decode_s: float  # from the first token to the last
    num_tokens: int  # in decode_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.decode_s


def load_transformers(checkpoint: Path) -> Any:
    """The checkpoint in float32, generating greedily. Raises CheckpointError where transformers can't load it."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        model = AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=torch.float32, local_files_only=True).eval()
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise CheckpointError(f"{checkpoint}: transformers can't load it: {error}") from error
    # In place of the checkpoint's, which may ask for sampling or penalties and ends a text at an end-of-sequence token.
    model.generation_config = GenerationConfig(do_sample=False, use_cache=True, pad_token_id=0)
    return model


class TransformersModel:
    """Raises CheckpointError where transformers can't load the checkpoint."""

    def __init__(self, checkpoint: Path, num_threads: int) -> None:
        self.num_threads = num_threads
        self.model = load_transformers(checkpoint)

    def generate(self, prompt: Sequence[int], num_tokens: int) -> Generated:
        """Continue the prompt by exactly `num_tokens` tokens."""
        clock = _Clock()
        token_ids = torch.tensor([list(prompt)])
        torch.set_num_threads(self.num_threads)
        try:
            self.model.generate(
                token_ids, attention_mask=torch.ones_like(token_ids), max_new_tokens=num_tokens, streamer=clock
            )
        finally:
            torch.set_num_threads(1)  # idle threads of torch's spin, and our side's turn is next
        begun, first, *_ = clock.times
        return Generated(first - begun, clock.times[-1] - first, num_tokens - 1)
