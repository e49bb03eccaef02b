# SPDX-License-Identifier: Apache-2.0
"""Decoder layers assembled from kernels. A layer's forward only reads state; its commit alone writes it."""

from dataclasses import dataclass

import tandem_kernels as kernels
import torch
from tandem_kernels import PackedWeight
from torch import Tensor

from tandem_backend.model.batch import AcceptedRows, RowBatch
from tandem_backend.model.config import DeltaConfig
from tandem_backend.model.layout import WeightReader
from tandem_backend.model.state import KVLayer, RecurrentLayer


@dataclass(frozen=True, slots=True)
class RopeTables:
    cos: Tensor  # [max_position, rotary_dim / 2] float32
    sin: Tensor


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Keys and values of a pass, kept until commit."""

    keys: Tensor  # [rows, kv_heads, head_dim]
    values: Tensor  # [rows, kv_heads * head_dim], strided


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """Inputs of a pass's delta steps, kept until commit replays the accepted ones."""

    conv_inputs: Tensor  # [rows, channels], strided
    qkv: Tensor  # [rows, channels] after the convolution
    ab: Tensor  # [rows, 2 * value_heads], strided


class Attention:
    """Grouped-query attention; queries and keys normed and gated where the family says so."""

    def __init__(self, reader: WeightReader, layer: str, rope: RopeTables) -> None:
        self.config = reader.config
        self.rope = rope
        self.input = kernels.pack_weight(reader.attention_input(layer))
        self.output = kernels.pack_weight(reader.attention_output(layer))
        self.q_norm, self.k_norm = reader.qk_norms(layer)

    def weights(self) -> list[PackedWeight]:
        return [self.input, self.output]

    def forward(
        self, x: Tensor, residual: Tensor, batch: RowBatch, state: KVLayer, earlier: AttentionRows | None = None
    ) -> tuple[Tensor, AttentionRows]:
        """Rows `earlier` of the pass come before x's: batch.parents and batch.row_seqs cover both, positions only x's."""
        c, tables = self.config, self.rope
        query_dim, kv_dim = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        gate_dim = query_dim if c.family.is_hybrid else 0
        projected = kernels.linear(x, self.input)  # queries, gates, keys, values
        key_start = query_dim + gate_dim
        args = (c.rms_eps, tables.cos, tables.sin, batch.positions, c.head_dim)
        q = kernels.rope(projected[:, :query_dim], self.q_norm, *args)
        k = kernels.rope(projected[:, key_start : key_start + kv_dim], self.k_norm, *args)
        v = projected[:, key_start + kv_dim :]
        if earlier is not None:
            k, v = torch.cat([earlier.keys, k]), torch.cat([earlier.values, v])
        out = kernels.attention(
            q,
            k,
            v,
            state.keys,
            state.values,
            batch.block_tables,
            batch.prefix_lens,
            batch.parents,
            batch.row_seqs,
            c.head_dim**-0.5,
        )
        if gate_dim:
            out = kernels.gate_mul(out, projected[:, query_dim:key_start], silu=False)
        return kernels.linear(out, self.output, residual), AttentionRows(k, v)

    def commit(self, rows: AttentionRows, accepted: AcceptedRows, state: KVLayer) -> None:
        kernels.store_kv(rows.keys, rows.values, state.keys, state.values, accepted.path_rows, accepted.places)


class GatedDeltaNet:
    """Gated DeltaNet: convolved queries, keys and values walk a matrix state (Yang et al. 2024)."""

    def __init__(self, reader: WeightReader, layer: str, delta: DeltaConfig) -> None:
        self.config, self.delta = reader.config, delta
        self.input = kernels.pack_weight(reader.delta_input(layer, delta))
        self.output = kernels.pack_weight(reader.delta_output(layer, delta))
        self.conv = reader.delta_conv(layer, delta)
        self.a_log, self.dt_bias, self.norm = reader.delta_vectors(layer, delta)

    def weights(self) -> list[PackedWeight]:
        return [self.input, self.output]

    def forward(self, x: Tensor, residual: Tensor, batch: RowBatch, state: RecurrentLayer) -> tuple[Tensor, DeltaRows]:
        d = self.delta
        gate_start = d.conv_channels
        ab_start = gate_start + d.value_heads * d.value_dim
        projected = kernels.linear(x, self.input)  # convolution inputs, gates, a, b
        rows = DeltaRows(
            conv_inputs=projected[:, :gate_start],
            qkv=kernels.causal_conv(projected, state.conv, self.conv, batch.parents, batch.row_slots),
            ab=projected[:, ab_start:],
        )
        out = kernels.gated_delta(
            rows.qkv,
            rows.ab,
            self.a_log,
            self.dt_bias,
            state.delta,
            batch.slots,
            batch.seq_starts,
            batch.parents,
            d.key_heads,
        )
        out = kernels.gated_rms_norm(out, projected[:, gate_start:ab_start], self.norm, self.config.rms_eps)
        return kernels.linear(out, self.output, residual), rows

    def commit(self, rows: DeltaRows, accepted: AcceptedRows, state: RecurrentLayer) -> None:
        kernels.gated_delta_commit(
            rows.qkv,
            rows.ab,
            self.a_log,
            self.dt_bias,
            state.delta,
            accepted.slots,
            accepted.path_starts,
            accepted.path_rows,
            self.delta.key_heads,
        )
        kernels.update_conv_state(
            rows.conv_inputs, state.conv, accepted.slots, accepted.path_starts, accepted.path_rows
        )


class MLP:
    """SwiGLU: down(silu(gate) * up)."""

    def __init__(self, reader: WeightReader, layer: str) -> None:
        gate_up, down = reader.mlp(layer)
        self.width = reader.config.intermediate_size
        self.gate_up, self.down = kernels.pack_weight(gate_up), kernels.pack_weight(down)

    def weights(self) -> list[PackedWeight]:
        return [self.gate_up, self.down]

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        both = kernels.linear(x, self.gate_up)
        hidden = kernels.gate_mul(both[:, self.width :], both[:, : self.width], silu=True)
        return kernels.linear(hidden, self.down, residual)
