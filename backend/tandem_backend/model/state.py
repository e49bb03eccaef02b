# SPDX-License-Identifier: Apache-2.0
"""ModelState: the memory that sequences live in. KV blocks and recurrent slots, a tensor a layer."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_backend.model.config import ModelConfig

KV_BLOCK = 64  # positions of a block; also the attention rule's block, so it is part of the arithmetic
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVLayer:
    keys: Tensor  # [blocks, kv_heads, block, head_dim] float32
    values: Tensor


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    conv: Tensor  # [slots, taps - 1, channels] float32, oldest first
    delta: Tensor  # [slots, value_heads, key_dim, value_dim] float32


@dataclass(frozen=True, slots=True)
class SlotState:
    """A copy of one recurrent slot: all that the delta layers know of a prefix. Empty where there are none."""

    tensors: tuple[Tensor, ...]  # conv and delta of each recurrent layer in turn, shaped as in RecurrentLayer

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class ModelState:
    """State of every layer, in layer order: a KVLayer for attention, a RecurrentLayer for delta."""

    layers: tuple[KVLayer | RecurrentLayer, ...]
    block: int

    def clear_slot(self, slot: int) -> None:
        """Set a recurrent slot to the state of the empty prefix."""
        for layer in self.layers:
            if isinstance(layer, RecurrentLayer):
                layer.conv[slot].zero_()
                layer.delta[slot].zero_()

    def copy_slot(self, slot: int) -> SlotState:
        return SlotState(tuple(part[slot].clone() for part in self._recurrent_parts()))

    def restore_slot(self, slot: int, saved: SlotState) -> None:
        for part, tensor in zip(self._recurrent_parts(), saved.tensors, strict=True):
            part[slot].copy_(tensor)

    def _recurrent_parts(self) -> list[Tensor]:
        layers = (layer for layer in self.layers if isinstance(layer, RecurrentLayer))
        return [part for layer in layers for part in (layer.conv, layer.delta)]

    @property
    def has_recurrent_layers(self) -> bool:
        return any(isinstance(layer, RecurrentLayer) for layer in self.layers)

    def kv_layers(self) -> list[KVLayer]:
        return [layer for layer in self.layers if isinstance(layer, KVLayer)]


def copy_block(layers: Iterable[KVLayer], source: int, target: int) -> None:
    """Copy one KV block of each of the layers to another."""
    for layer in layers:
        layer.keys[target].copy_(layer.keys[source])
        layer.values[target].copy_(layer.values[source])


def allocate_state(config: ModelConfig, num_blocks: int, num_slots: int, block: int = KV_BLOCK) -> ModelState:
    layers: list[KVLayer | RecurrentLayer] = []
    for kind in config.layer_kinds:
        if kind == "attention":
            layers.append(allocate_kv_layer(config, num_blocks, block))
        else:
            delta = config.delta
            assert delta is not None, "a config with delta layers has their sizes"
            conv = torch.zeros(num_slots, delta.conv_taps - 1, delta.conv_channels)
            matrix = torch.zeros(num_slots, delta.value_heads, delta.key_dim, delta.value_dim)
            layers.append(RecurrentLayer(conv, matrix))
    return ModelState(tuple(layers), block)


def allocate_kv_layer(config: ModelConfig, num_blocks: int, block: int = KV_BLOCK) -> KVLayer:
    shape = (num_blocks, config.num_kv_heads, block, config.head_dim)
    return KVLayer(torch.zeros(shape), torch.zeros(shape))


def block_bytes(config: ModelConfig, num_extra_layers: int = 0, block: int = KV_BLOCK) -> int:
    """Bytes of one KV block over all attention layers, and over a drafter's that use the same block ids."""
    per_layer = 2 * config.num_kv_heads * block * config.head_dim * FLOAT_BYTES
    return per_layer * (config.layer_kinds.count("attention") + num_extra_layers)


def slot_bytes(config: ModelConfig) -> int:
    """Bytes of one recurrent slot over all delta layers."""
    if config.delta is None:
        return 0
    d = config.delta
    per_layer = d.value_heads * d.key_dim * d.value_dim + (d.conv_taps - 1) * d.conv_channels
    return per_layer * FLOAT_BYTES * config.layer_kinds.count("delta")
