# SPDX-License-Identifier: Apache-2.0
"""Calls of whole residual blocks. A block's weights and sizes are laid out once, as the C structure of layers.c."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tandem_kernels.cpu.library import load_library
from tandem_kernels.cpu.ops import update_conv_state
from tandem_kernels.packed_weight import PackedWeight

if TYPE_CHECKING:
    from tandem_kernels.layers import AttentionLayer, DeltaLayer, MlpLayer, MtpLayer

_library = load_library()
_INT, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class _PackedWeight(ctypes.Structure):
    _fields_ = [("data", _POINTER), ("is_bf16", _INT), ("n", _INT), ("k", _INT)]


class _AttentionLayer(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("norm", "q_norm", "k_norm", "cos", "sin")),
        *((name, _PackedWeight) for name in ("input", "output")),
        *((name, _INT) for name in ("heads", "kv_heads", "dim", "rot", "is_gated")),
        *((name, _FLOAT) for name in ("eps", "scale")),
    ]


class _DeltaLayer(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("norm", "out_norm", "conv", "a_log", "dt_bias")),
        *((name, _PackedWeight) for name in ("input", "output")),
        *((name, _INT) for name in ("key_heads", "value_heads", "dk", "dv", "taps")),
        ("eps", _FLOAT),
    ]


class _MlpLayer(ctypes.Structure):
    _fields_ = [
        ("norm", _POINTER),
        *((name, _PackedWeight) for name in ("gate_up", "down")),
        ("eps", _FLOAT),
    ]


class _MtpLayer(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("embedding", "embedding_norm", "hidden_norm", "out_norm", "attention", "mlp")),
        *((name, _PackedWeight) for name in ("fc", "head")),
        ("embedding_is_bf16", _INT),
        ("eps", _FLOAT),
    ]


@dataclass(frozen=True, slots=True)
class Handle:
    """A structure in C's layout, its address and the sizes that Python needs of it."""

    structure: Any
    address: int
    width: int  # outputs of the input projection
    channels: int  # of the convolution

    @classmethod
    def of(cls, structure: Any, width: int = 0, channels: int = 0) -> "Handle":
        return cls(structure, ctypes.addressof(structure), width, channels)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _packed(weight: PackedWeight) -> _PackedWeight:
    return _PackedWeight(weight.data.data_ptr(), weight.is_bf16, weight.num_outputs, weight.num_inputs)


def attention_handle(layer: "AttentionLayer") -> Handle:
    structure = _AttentionLayer(
        norm=_address(layer.norm),
        q_norm=_address(layer.q_norm),
        k_norm=_address(layer.k_norm),
        cos=_address(layer.cos),
        sin=_address(layer.sin),
        input=_packed(layer.input),
        output=_packed(layer.output),
        heads=layer.heads,
        kv_heads=layer.kv_heads,
        dim=layer.dim,
        rot=2 * layer.cos.shape[1],
        is_gated=layer.is_gated,
        eps=layer.eps,
        scale=layer.dim**-0.5,
    )
    return Handle.of(structure)


def delta_handle(layer: "DeltaLayer") -> Handle:
    structure = _DeltaLayer(
        norm=_address(layer.norm),
        out_norm=_address(layer.out_norm),
        conv=_address(layer.conv),
        a_log=_address(layer.a_log),
        dt_bias=_address(layer.dt_bias),
        input=_packed(layer.input),
        output=_packed(layer.output),
        key_heads=layer.key_heads,
        value_heads=layer.value_heads,
        dk=layer.dk,
        dv=layer.dv,
        taps=layer.conv.shape[0],
        eps=layer.eps,
    )
    return Handle.of(structure, layer.input.num_outputs, layer.channels)


def mlp_handle(layer: "MlpLayer") -> Handle:
    structure = _MlpLayer(
        norm=_address(layer.norm), gate_up=_packed(layer.gate_up), down=_packed(layer.down), eps=layer.eps
    )
    return Handle.of(structure)


def mtp_handle(layer: "MtpLayer") -> Handle:
    structure = _MtpLayer(
        embedding=_address(layer.embedding),
        embedding_norm=_address(layer.embedding_norm),
        hidden_norm=_address(layer.hidden_norm),
        out_norm=_address(layer.out_norm),
        attention=layer.attention.handle.address,
        mlp=layer.mlp.handle.address,
        fc=_packed(layer.fc),
        head=_packed(layer.head),
        embedding_is_bf16=layer.embedding.dtype == torch.bfloat16,
        eps=layer.eps,
    )
    return Handle.of(structure, layer.head.num_outputs)


def attention_layer(
    layer: "AttentionLayer",
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    parents: Tensor,
    row_seqs: Tensor,
    prefix_lens: Tensor,
    block_tables: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    trees: None,
) -> Tensor:
    rows = x.shape[0]
    out = torch.empty_like(x)
    _library.tandem_attention_layer(
        layer.handle.address,
        x.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        out.data_ptr(),
        rows,
        keys.shape[0] - rows,
        positions.data_ptr(),
        parents.data_ptr(),
        row_seqs.data_ptr(),
        prefix_lens.data_ptr(),
        block_tables.data_ptr(),
        block_tables.shape[1],
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        k_cache.shape[2],
    )
    return out


def delta_layer(
    layer: "DeltaLayer",
    x: Tensor,
    parents: Tensor,
    row_slots: Tensor,
    slots: Tensor,
    seq_starts: Tensor,
    conv_state: Tensor,
    delta_state: Tensor,
    trees: None,
    kept: tuple[Tensor, Tensor, None] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[0]
    projected, qkv, _ = kept or (torch.empty(rows, layer.handle.width), torch.empty(rows, layer.handle.channels), None)
    out = torch.empty_like(x)
    _library.tandem_delta_layer(
        layer.handle.address,
        x.data_ptr(),
        projected.data_ptr(),
        qkv.data_ptr(),
        out.data_ptr(),
        rows,
        slots.shape[0],
        parents.data_ptr(),
        row_slots.data_ptr(),
        slots.data_ptr(),
        seq_starts.data_ptr(),
        conv_state.data_ptr(),
        delta_state.data_ptr(),
    )
    return out, projected, qkv


def mlp_layer(layer: "MlpLayer", x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _library.tandem_mlp_layer(layer.handle.address, x.data_ptr(), out.data_ptr(), x.shape[0])
    return out


def mtp_layer(
    layer: "MtpLayer",
    token_ids: Tensor,
    hidden: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    parents: Tensor,
    row_seqs: Tensor,
    prefix_lens: Tensor,
    block_tables: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    trees: None,
) -> Tensor:
    rows, dim = hidden.shape
    scratch, out = torch.empty(rows, 4 * dim), torch.empty(rows, dim)
    _library.tandem_mtp_layer(
        layer.handle.address,
        token_ids.data_ptr(),
        hidden.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        scratch.data_ptr(),
        out.data_ptr(),
        rows,
        keys.shape[0] - rows,
        positions.data_ptr(),
        parents.data_ptr(),
        row_seqs.data_ptr(),
        prefix_lens.data_ptr(),
        block_tables.data_ptr(),
        block_tables.shape[1],
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        k_cache.shape[2],
    )
    return out


def mtp_guess(layer: "MtpLayer", hidden: Tensor) -> tuple[Tensor, Tensor]:
    rows = hidden.shape[0]
    logits, ids, logprobs = (
        torch.empty(rows, layer.handle.width),
        torch.empty(rows, dtype=torch.int32),
        torch.empty(rows),
    )
    _library.tandem_mtp_guess(
        layer.handle.address, hidden.data_ptr(), logits.data_ptr(), ids.data_ptr(), logprobs.data_ptr(), rows
    )
    return ids, logprobs


def _addresses(tensors: Sequence[Tensor]) -> Any:
    return (_POINTER * len(tensors))(*[tensor.data_ptr() for tensor in tensors])


def commit_delta_layers(
    layers: Sequence["DeltaLayer"],
    projected: Sequence[Tensor],
    qkv: Sequence[Tensor],
    conv_states: Sequence[Tensor],
    delta_states: Sequence[Tensor],
    slots: Tensor,
    path_starts: Tensor,
    path_rows: Tensor,
    passed: None,
) -> None:
    layer, width = layers[0], projected[0].shape[1]
    _library.tandem_gated_delta_commit_layers(
        len(layers),
        _addresses(qkv),
        _addresses([part[:, width - 2 * layer.value_heads :] for part in projected]),
        width,
        _addresses([layer.a_log for layer in layers]),
        _addresses([layer.dt_bias for layer in layers]),
        _addresses(delta_states),
        slots.data_ptr(),
        path_starts.data_ptr(),
        path_rows.data_ptr(),
        slots.shape[0],
        layer.key_heads,
        layer.value_heads,
        layer.dk,
        layer.dv,
    )
    for part, state in zip(projected, conv_states, strict=True):
        update_conv_state(part, state, slots, path_starts, path_rows)
