# SPDX-License-Identifier: Apache-2.0
"""The decoder: one forward for any mix of rows of any sequences, one commit for what a round keeps of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tandem_kernels as kernels
import torch
from tandem_kernels import PackedWeight, TreePlan
from tandem_kernels.device import CPU
from torch import Tensor

from tandem_backend.model.batch import AcceptedRows, RowBatch, accept_rows
from tandem_backend.model.checkpoint import Checkpoint, Weights
from tandem_backend.model.config import ModelConfig, load_model_config
from tandem_backend.model.layers import (
    MLP,
    Attention,
    AttentionRows,
    DeltaRows,
    GatedDeltaNet,
    RopeTables,
    commit_delta_layers,
    new_delta_rows,
)
from tandem_backend.model.layout import WeightReader
from tandem_backend.model.state import KVLayer, ModelState, RecurrentLayer, slot_bytes


class DecoderLayer:
    """A mixer (attention or delta) and an MLP, each with its norm and residual."""

    def __init__(self, reader: WeightReader, layer: str, mixer: Attention | GatedDeltaNet) -> None:
        self.mixer = mixer
        self.mlp = MLP(reader, layer)

    def forward(
        self,
        x: Tensor,
        batch: RowBatch,
        state: KVLayer | RecurrentLayer,
        memory: AttentionRows | DeltaRows,
        trees: TreePlan | None,
    ) -> tuple[Tensor, AttentionRows | DeltaRows]:
        rows: AttentionRows | DeltaRows
        x, rows = self.mixer.forward(x, batch, state, memory, trees)  # type: ignore[arg-type]
        return self.mlp.forward(x), rows


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """A pass's outputs, and what commit needs of each layer."""

    logits: Tensor  # [logit rows, vocab] float32
    hidden: Tensor  # [rows, hidden_size] in the type of rows, after the final norm
    layer_rows: tuple[AttentionRows | DeltaRows, ...]
    best: tuple[Tensor, Tensor] | None = None  # argmax of the logits and its log-probabilities, on the host
    is_lent: bool = False  # the next pass writes into the same memory


class Decoder:
    """A target model. Weights are packed tensor by tensor from the memory-mapped file, so nothing is held twice."""

    def __init__(self, checkpoint_dir: Path, device: torch.device = CPU, weights: Weights | None = None) -> None:
        """The checkpoint's config.json says what the weights are; `weights` are where they come from, if elsewhere."""
        self.config: ModelConfig = load_model_config(checkpoint_dir)
        self.device = device
        self.weights: Weights = weights if weights is not None else Checkpoint(checkpoint_dir)
        reader = WeightReader(self.weights, self.config, device)
        c = self.config
        tables = kernels.rope_tables(c.max_position, c.rotary_dim, c.rope_theta, c.rope_scaling)
        self.rope = RopeTables(*(table.to(device) for table in tables))
        self.embedding = reader.embedding()  # [vocab, hidden] as stored; memory-mapped on the CPU
        self.layers = [self._layer(reader, i) for i in range(c.num_layers)]
        self.final_norm = reader.final_norm()
        self.head = kernels.pack_weight(reader.head())
        self.weights.refuse_unused()

    def _layer(self, reader: WeightReader, index: int) -> DecoderLayer:
        name = reader.layer(index)
        mixer: Attention | GatedDeltaNet
        if self.config.layer_kinds[index] == "attention":
            mixer = Attention(reader, name, self.rope)
        else:
            assert self.config.delta is not None, "a config with delta layers has their sizes"
            mixer = GatedDeltaNet(reader, name, self.config.delta)
        return DecoderLayer(reader, name, mixer)

    def forward(self, batch: RowBatch, state: ModelState) -> ForwardResult:
        """Logits of the batch's logit rows. Reads state, writes none: a pass that fails leaves every sequence whole."""
        batch = batch.to(self.device)
        x = kernels.embed(self.embedding, batch.token_ids)
        trees = kernels.plan_trees(batch.parents, batch.row_seqs)
        layer_rows = []
        for layer, memory, layer_state in zip(self.layers, self._new_rows(batch.num_rows), state.layers, strict=True):
            x, rows = layer.forward(x, batch, layer_state, memory, trees)
            layer_rows.append(rows)
        hidden = kernels.rms_norm(x, self.final_norm, self.config.rms_eps)
        chosen = hidden if batch.logit_rows is None else hidden[batch.logit_rows]
        return ForwardResult(kernels.linear(chosen, self.head), hidden, tuple(layer_rows))

    def _new_rows(self, num_rows: int) -> list[AttentionRows | DeltaRows]:
        """Memory for what each layer keeps of a pass until commit."""
        mixers = [layer.mixer for layer in self.layers]
        delta = iter(new_delta_rows([mixer for mixer in mixers if isinstance(mixer, GatedDeltaNet)], num_rows))
        return [mixer.new_rows(num_rows) if isinstance(mixer, Attention) else next(delta) for mixer in mixers]

    def commit(
        self,
        result: ForwardResult,
        batch: RowBatch,
        paths: Sequence[Sequence[int]],
        state: ModelState,
        offsets: Sequence[int] | None = None,
    ) -> AcceptedRows:
        """Write what each sequence keeps of the pass: `paths` are local row indices, root first, maybe empty.

        A path may be committed in parts: `offsets` says how many of each sequence's rows were committed before.
        """
        accepted = accept_rows(batch, paths, state.block, offsets).to(self.device)
        if len(accepted.slots):
            self.write(result.layer_rows, accepted, state)
        return accepted

    def write(self, kept: Sequence[AttentionRows | DeltaRows], accepted: AcceptedRows, state: ModelState) -> None:
        """`commit` with everything on the device: `kept` are a pass's rows by layer."""
        accepted = replace(accepted, places=accepted.places.long())  # once, not in each layer
        mixers: list[GatedDeltaNet] = []
        delta_rows: list[DeltaRows] = []
        delta_states: list[RecurrentLayer] = []
        for layer, rows, layer_state in zip(self.layers, kept, state.layers, strict=True):
            if isinstance(layer.mixer, Attention):
                layer.mixer.commit(rows, accepted, layer_state)  # type: ignore[arg-type]
            else:
                mixers.append(layer.mixer)
                delta_rows.append(rows)  # type: ignore[arg-type]
                delta_states.append(layer_state)  # type: ignore[arg-type]
        if mixers:
            commit_delta_layers(mixers, delta_rows, delta_states, accepted)

    def pass_bytes(self, num_rows: int) -> int:
        """At most so many bytes a pass keeps until commit: its rows, and one state where it is long."""
        return num_rows * sum(rows.num_bytes for rows in self._new_rows(1)) + slot_bytes(self.config, self.device)

    def packed_weights(self) -> list[PackedWeight]:
        """Of all linear layers, the head last."""
        return [*(w for layer in self.layers for w in (*layer.mixer.weights(), *layer.mlp.weights())), self.head]

    def residual_weights(self) -> list[PackedWeight]:
        """Of the linear layers whose results are added to the residual stream: the last of each block."""
        return [block.weights()[-1] for layer in self.layers for block in (layer.mixer, layer.mlp)]

    def num_weight_bytes(self) -> int:
        """Bytes of weights that a pass over one row reads."""
        return sum(weight.num_bytes for weight in self.packed_weights())
