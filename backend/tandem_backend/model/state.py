# SPDX-License-Identifier: Apache-2.0
"""ModelState: the memory that sequences live in. KV blocks and recurrent slots, a tensor a layer."""

from collections.abc import Iterable
from dataclasses import dataclass

import tandem_kernels as kernels
import torch
from tandem_kernels.device import CPU
from torch import Tensor

from tandem_backend.model.config import ModelConfig

KV_BLOCK = 64  # positions of a block; also the attention rule's block, so it is part of the arithmetic
STATE_BYTES = 4  # recurrent state is float32 on every device


@dataclass(frozen=True, slots=True)
class KVLayer:
    keys: Tensor  # [blocks, kv_heads, block, head_dim] in the type of rows
    values: Tensor


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    conv: Tensor  # [slots, taps - 1, channels] in the type of rows, oldest first
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

    @property
    def device(self) -> torch.device:
        first = self.layers[0]
        return first.keys.device if isinstance(first, KVLayer) else first.delta.device

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


def allocate_state(
    config: ModelConfig, num_blocks: int, num_slots: int, block: int = KV_BLOCK, device: torch.device = CPU
) -> ModelState:
    """State of the empty prefix in every slot, on `device`."""
    recurrent = iter(_allocate_recurrent_layers(config, num_slots, device))
    return ModelState(
        tuple(
            allocate_kv_layer(config, num_blocks, block, device) if kind == "attention" else next(recurrent)
            for kind in config.layer_kinds
        ),
        block,
    )


def _allocate_recurrent_layers(config: ModelConfig, num_slots: int, device: torch.device) -> list[RecurrentLayer]:
    """All of one tensor a kind, so that a device can commit to all layers in one launch."""
    delta, count = config.delta, config.layer_kinds.count("delta")
    if delta is None:
        return []
    shape = (count, num_slots, delta.conv_taps - 1, delta.conv_channels)
    conv = torch.zeros(shape, dtype=kernels.row_dtype(device), device=device)
    matrices = kernels.new_delta_states(
        count, num_slots, delta.value_heads, delta.key_dim, delta.value_dim, device=device
    )
    return [RecurrentLayer(*parts) for parts in zip(conv.unbind(), matrices.unbind(), strict=True)]


def allocate_kv_layer(
    config: ModelConfig, num_blocks: int, block: int = KV_BLOCK, device: torch.device = CPU
) -> KVLayer:
    shape = (num_blocks, config.num_kv_heads, block, config.head_dim)
    keys, values = (torch.zeros(shape, dtype=kernels.row_dtype(device), device=device) for _ in range(2))
    return KVLayer(keys, values)


def block_bytes(
    config: ModelConfig, num_extra_layers: int = 0, block: int = KV_BLOCK, device: torch.device = CPU
) -> int:
    """Bytes of one KV block over all attention layers, and over a drafter's that use the same block ids."""
    per_layer = 2 * config.num_kv_heads * block * config.head_dim * kernels.row_dtype(device).itemsize
    return per_layer * (config.layer_kinds.count("attention") + num_extra_layers)


def slot_bytes(config: ModelConfig, device: torch.device = CPU) -> int:
    """Bytes of one recurrent slot over all delta layers."""
    if config.delta is None:
        return 0
    d = config.delta
    conv_bytes = (d.conv_taps - 1) * d.conv_channels * kernels.row_dtype(device).itemsize
    per_layer = d.value_heads * d.key_dim * d.value_dim * STATE_BYTES + conv_bytes
    return per_layer * config.layer_kinds.count("delta")
