# SPDX-License-Identifier: Apache-2.0
"""The decoder: one forward for any mix of rows of any sequences, one commit for what a round keeps of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tandem_kernels as kernels
from torch import Tensor

from tandem_backend.model.batch import AcceptedRows, RowBatch, accept_rows
from tandem_backend.model.checkpoint import Checkpoint
from tandem_backend.model.config import ModelConfig, load_model_config
from tandem_backend.model.layers import (
    MLP,
    Attention,
    AttentionRows,
    DeltaRows,
    GatedDeltaNet,
    RopeTables,
    commit_delta_layers,
)
from tandem_backend.model.layout import WeightReader
from tandem_backend.model.state import KVLayer, ModelState, RecurrentLayer


class DecoderLayer:
    """A mixer (attention or delta) and an MLP, each with its norm and residual."""

    def __init__(self, reader: WeightReader, layer: str, mixer: Attention | GatedDeltaNet) -> None:
        self.mixer = mixer
        self.mlp = MLP(reader, layer)

    def forward(
        self, x: Tensor, batch: RowBatch, state: KVLayer | RecurrentLayer
    ) -> tuple[Tensor, AttentionRows | DeltaRows]:
        rows: AttentionRows | DeltaRows
        x, rows = self.mixer.forward(x, batch, state)  # type: ignore[arg-type]
        return self.mlp.forward(x), rows


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """A pass's outputs, and what commit needs of each layer."""

    logits: Tensor  # [logit rows, vocab] float32
    hidden: Tensor  # [rows, hidden_size] float32, after the final norm
    layer_rows: tuple[AttentionRows | DeltaRows, ...]


class Decoder:
    """A target model. Weights are packed tensor by tensor from the memory-mapped file, so nothing is held twice."""

    def __init__(self, checkpoint_dir: Path) -> None:
        self.config: ModelConfig = load_model_config(checkpoint_dir)
        checkpoint = Checkpoint(checkpoint_dir)
        reader = WeightReader(checkpoint, self.config)
        c = self.config
        self.rope = RopeTables(*kernels.rope_tables(c.max_position, c.rotary_dim, c.rope_theta, c.rope_scaling))
        self.embedding = reader.embedding()  # [vocab, hidden] as stored, memory-mapped
        self.layers = [self._layer(reader, i) for i in range(c.num_layers)]
        self.final_norm = reader.final_norm()
        self.head = kernels.pack_weight(reader.head())
        checkpoint.refuse_unused()

    def _layer(self, reader: WeightReader, index: int) -> DecoderLayer:
        name = reader.layer(index)
        mixer: Attention | GatedDeltaNet
        if self.config.layer_kinds[index] == "attention":
            mixer = Attention(reader, name, self.rope)
        else:
            assert self.config.delta is not None, "a config with delta layers has their sizes"
            mixer = GatedDeltaNet(reader, name, self.config.delta)
        return DecoderLayer(reader, name, mixer)

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids: [rows] int64. Returns [rows, hidden] float32."""
        return self.embedding[token_ids].float()

    def forward(self, batch: RowBatch, state: ModelState) -> ForwardResult:
        """Logits of the batch's logit rows. Reads state, writes none: a pass that fails leaves every sequence whole."""
        x = self.embed(batch.token_ids)
        layer_rows = []
        for layer, layer_state in zip(self.layers, state.layers, strict=True):
            x, rows = layer.forward(x, batch, layer_state)
            layer_rows.append(rows)
        hidden = kernels.rms_norm(x, self.final_norm, self.config.rms_eps)
        chosen = hidden if batch.logit_rows is None else hidden[batch.logit_rows]
        return ForwardResult(kernels.linear(chosen, self.head), hidden, tuple(layer_rows))

    def commit(
        self, result: ForwardResult, batch: RowBatch, paths: Sequence[Sequence[int]], state: ModelState
    ) -> AcceptedRows:
        """Write what each sequence keeps of the pass: `paths` are local row indices, root first, maybe empty."""
        accepted = accept_rows(batch, paths, state.block)
        if not len(accepted.slots):
            return accepted
        mixers: list[GatedDeltaNet] = []
        delta_rows: list[DeltaRows] = []
        delta_states: list[RecurrentLayer] = []
        for layer, rows, layer_state in zip(self.layers, result.layer_rows, state.layers, strict=True):
            if isinstance(layer.mixer, Attention):
                layer.mixer.commit(rows, accepted, layer_state)  # type: ignore[arg-type]
            else:
                mixers.append(layer.mixer)
                delta_rows.append(rows)  # type: ignore[arg-type]
                delta_states.append(layer_state)  # type: ignore[arg-type]
        if mixers:
            commit_delta_layers(mixers, delta_rows, delta_states, accepted)
        return accepted

    def num_weight_bytes(self) -> int:
        """Bytes of weights that a pass over one row reads."""
        packed = [w for layer in self.layers for w in (*layer.mixer.weights(), *layer.mlp.weights())]
        return sum(w.num_bytes for w in [*packed, self.head])
