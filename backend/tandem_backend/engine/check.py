# SPDX-License-Identifier: Apache-2.0
"""Whether a configuration's checkpoints can be served, without reading a weight: what a load would refuse by name."""

import torch

from tandem_backend.config import EngineConfig
from tandem_backend.engine.drafters.build import DrafterPlan, plan_drafters
from tandem_backend.engine.tokenizer import Tokenizer, has_tokenizer
from tandem_backend.errors import CheckpointError, ConfigError
from tandem_backend.model.config import ModelConfig
from tandem_backend.model.decoder import Decoder

META = torch.device("meta")  # tensors with a shape and no data


def check_checkpoints(config: EngineConfig, *, needs_tokenizer: bool = True) -> DrafterPlan:
    """The drafters that will work; every tensor of target and drafters has been found with its shape.

    Raises CheckpointError and ConfigError as a load does, and where the tokenizer is missing or of another checkpoint.
    """
    target = Decoder(config.checkpoint, META)
    context_len(config, target.config)
    tokenizer = Tokenizer(config.checkpoint) if has_tokenizer(config.checkpoint) else None
    if tokenizer is not None:
        _check_tokenizer(config, tokenizer, target.config.vocab_size)
    elif needs_tokenizer:
        raise CheckpointError(f"{config.checkpoint}: has no tokenizer (tokenizer.json), so it takes input_ids alone")
    return plan_drafters(config, target, tokenizer)


def context_len(config: EngineConfig, model: ModelConfig) -> int:
    """Tokens that a sequence may have. Raises ConfigError where the checkpoint allows fewer."""
    if config.max_context_len > model.max_position:
        raise ConfigError(
            f"max_context_len: at most {model.max_position} (the checkpoint's), got {config.max_context_len}"
        )
    return config.max_context_len or model.max_position


def _check_tokenizer(config: EngineConfig, tokenizer: Tokenizer, vocab_size: int) -> None:
    highest = max(tokenizer.vocabulary().values())
    if highest >= vocab_size:
        raise CheckpointError(
            f"{config.checkpoint}: the tokenizer has token ids up to {highest}, the model ids below {vocab_size}; "
            "it is another model's"
        )
