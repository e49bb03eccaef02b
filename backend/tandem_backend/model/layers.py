# SPDX-License-Identifier: Apache-2.0
"""Blocks of decoder layers: weights from the checkpoint, work by the kernels. Forward reads state, commit writes it."""

from collections.abc import Sequence
from dataclasses import dataclass

import tandem_kernels as kernels
import torch
from tandem_kernels import PackedWeight, PassedState, TreePlan
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
    values: Tensor

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True, slots=True)
class DeltaRows:
    """Inputs of a pass's delta steps, kept until commit replays the accepted ones."""

    projected: Tensor  # [rows, width], the convolution's inputs first, a and b last
    qkv: Tensor  # [rows, channels or more] after the convolution, as the device's kernels keep them
    passed: PassedState | None  # of a long pass on a GPU

    @property
    def num_bytes(self) -> int:
        """Of the rows alone."""
        return self.projected.nbytes + self.qkv.nbytes


class Attention:
    """Grouped-query attention with its norm and residual; qk norms and an output gate where the family has them."""

    def __init__(self, reader: WeightReader, layer: str, rope: RopeTables) -> None:
        c = reader.config
        q_norm, k_norm = reader.qk_norms(layer)
        self.kernel = kernels.AttentionLayer(
            norm=reader.norm(f"{layer}input_layernorm.weight"),
            input=kernels.pack_weight(reader.attention_input(layer)),
            output=kernels.pack_weight(reader.attention_output(layer)),
            q_norm=q_norm,
            k_norm=k_norm,
            cos=rope.cos,
            sin=rope.sin,
            heads=c.num_heads,
            kv_heads=c.num_kv_heads,
            dim=c.head_dim,
            is_gated=c.family.is_hybrid,
            eps=c.rms_eps,
        )

    def weights(self) -> list[PackedWeight]:
        return [self.kernel.input, self.kernel.output]

    def new_rows(self, num_rows: int) -> AttentionRows:
        """Memory for the keys and values of a pass."""
        shape = (num_rows, self.kernel.kv_heads, self.kernel.dim)
        device = self.kernel.norm.device
        keys, values = (torch.empty(shape, dtype=kernels.row_dtype(device), device=device) for _ in range(2))
        return AttentionRows(keys, values)

    def forward(
        self, x: Tensor, batch: RowBatch, state: KVLayer, rows: AttentionRows, trees: TreePlan | None
    ) -> tuple[Tensor, AttentionRows]:
        out = kernels.attention_layer(
            self.kernel,
            x,
            rows.keys,
            rows.values,
            batch.positions,
            batch.parents,
            batch.row_seqs,
            batch.prefix_lens,
            batch.block_tables,
            state.keys,
            state.values,
            trees,
        )
        return out, rows

    def commit(self, rows: AttentionRows, accepted: AcceptedRows, state: KVLayer) -> None:
        """The places of `accepted` are int64 here."""
        kernels.store_kv(
            rows.keys, rows.values.flatten(1), state.keys, state.values, accepted.path_rows, accepted.places
        )


class GatedDeltaNet:
    """Gated DeltaNet with its norm and residual: convolved queries, keys and values walk a matrix state."""

    def __init__(self, reader: WeightReader, layer: str, delta: DeltaConfig) -> None:
        a_log, dt_bias, out_norm = reader.delta_vectors(layer, delta)
        self.kernel = kernels.DeltaLayer(
            norm=reader.norm(f"{layer}input_layernorm.weight"),
            input=kernels.pack_weight(reader.delta_input(layer, delta)),
            output=kernels.pack_weight(reader.delta_output(layer, delta)),
            conv=reader.delta_conv(layer, delta),
            a_log=a_log,
            dt_bias=dt_bias,
            out_norm=out_norm,
            key_heads=delta.key_heads,
            value_heads=delta.value_heads,
            dk=delta.key_dim,
            dv=delta.value_dim,
            eps=reader.config.rms_eps,
        )

    def weights(self) -> list[PackedWeight]:
        return [self.kernel.input, self.kernel.output]

    def forward(
        self, x: Tensor, batch: RowBatch, state: RecurrentLayer, rows: DeltaRows, trees: TreePlan | None
    ) -> tuple[Tensor, DeltaRows]:
        out, projected, qkv = kernels.delta_layer(
            self.kernel,
            x,
            batch.parents,
            batch.row_slots,
            batch.slots,
            batch.seq_starts,
            state.conv,
            state.delta,
            trees,
            (rows.projected, rows.qkv, rows.passed),
        )
        return out, DeltaRows(projected, qkv, rows.passed)


def new_delta_rows(mixers: Sequence[GatedDeltaNet], num_rows: int) -> list[DeltaRows]:
    """Memory for what each of these layers keeps of a pass."""
    if not mixers:
        return []
    return [DeltaRows(*parts) for parts in kernels.new_delta_rows([mixer.kernel for mixer in mixers], num_rows)]


def commit_delta_layers(
    mixers: Sequence[GatedDeltaNet],
    rows: Sequence[DeltaRows],
    states: Sequence[RecurrentLayer],
    accepted: AcceptedRows,
) -> None:
    """Replay the accepted rows in all delta layers at once: a layer alone is too little work for a call."""
    passed = [part.passed for part in rows if part.passed is not None]
    kernels.commit_delta_layers(
        [mixer.kernel for mixer in mixers],
        [part.projected for part in rows],
        [part.qkv for part in rows],
        [state.conv for state in states],
        [state.delta for state in states],
        accepted.slots,
        accepted.path_starts,
        accepted.path_rows,
        passed or None,
    )


class MLP:
    """SwiGLU with its norm and residual."""

    def __init__(self, reader: WeightReader, layer: str) -> None:
        gate_up, down = reader.mlp(layer)
        self.kernel = kernels.MlpLayer(
            norm=reader.norm(f"{layer}post_attention_layernorm.weight"),
            gate_up=kernels.pack_weight(gate_up),
            down=kernels.pack_weight(down),
            eps=reader.config.rms_eps,
        )

    def weights(self) -> list[PackedWeight]:
        return [self.kernel.gate_up, self.kernel.down]

    def forward(self, x: Tensor) -> Tensor:
        return kernels.mlp_layer(self.kernel, x)
