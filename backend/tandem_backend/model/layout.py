# SPDX-License-Identifier: Apache-2.0
"""Names of a family's tensors, and the order of rows that the decoder wants in its fused projections."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem_backend.errors import CheckpointError
from tandem_backend.model.checkpoint import Weights
from tandem_backend.model.config import DeltaConfig, ModelConfig


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a family keeps its tensors; `delta` names how Gated DeltaNet's input projections are stored."""

    root: str = "model."
    delta: Callable[["WeightReader", str, DeltaConfig], Tensor] | None = None


class WeightReader:
    """Reads the decoder's weights by role onto a device; every shape is checked against the config."""

    def __init__(self, checkpoint: Weights, config: ModelConfig, device: torch.device) -> None:
        self.checkpoint, self.config, self.device = checkpoint, config, device
        self.layout = LAYOUTS[config.family.layout]
        self._embedding: Tensor | None = None  # on a device it is kept once: a tied head is the same memory

    def embedding(self) -> Tensor:
        if self._embedding is None:
            name = f"{self.layout.root}embed_tokens.weight"
            self._embedding = self.take(name, self.config.vocab_size, self.config.hidden_size)
        return self._embedding

    def head(self) -> Tensor:
        """The output head: its own tensor, or the embedding where the two are tied."""
        tied_copy = "lm_head.weight" in self.checkpoint.names()
        if self.config.tie_embeddings:
            embedding = self.embedding()
            copy = self.take("lm_head.weight", *embedding.shape) if tied_copy else None
            if copy is not None and not copy.is_meta and not torch.equal(copy, embedding):
                raise CheckpointError(
                    f"{self.checkpoint.directory}: lm_head.weight differs from the embedding, "
                    "but config.json says tie_word_embeddings"
                )
            return embedding
        return self.take("lm_head.weight", self.config.vocab_size, self.config.hidden_size)

    def norm(self, name: str, dim: int | None = None) -> Tensor:
        """A norm's multiplier in float32; zero-centred weights are stored without their 1."""
        weight = self.take(name, dim or self.config.hidden_size).float()
        return weight + 1.0 if self.config.family.is_hybrid else weight

    def final_norm(self) -> Tensor:
        return self.norm(f"{self.layout.root}norm.weight")

    def layer(self, index: int) -> str:
        return f"{self.layout.root}layers.{index}."

    def attention_input(self, layer: str) -> Tensor:
        """Rows of one projection: queries, output gates (gated attention only), keys, values."""
        c = self.config
        query_dim, kv_dim = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        parts = [self.take(f"{layer}self_attn.{name}_proj.weight", kv_dim, c.hidden_size) for name in "kv"]
        name = f"{layer}self_attn.q_proj.weight"
        if not c.family.is_hybrid:
            return torch.cat([self.take(name, query_dim, c.hidden_size), *parts])
        # Stored per head as (query, gate).
        both = self.take(name, 2 * query_dim, c.hidden_size).unflatten(0, (c.num_heads, 2, c.head_dim))
        return torch.cat([both[:, 0].flatten(0, 1), both[:, 1].flatten(0, 1), *parts])

    def attention_output(self, layer: str) -> Tensor:
        c = self.config
        return self.take(f"{layer}self_attn.o_proj.weight", c.hidden_size, c.num_heads * c.head_dim)

    def qk_norms(self, layer: str) -> tuple[Tensor | None, Tensor | None]:
        if not self.config.family.has_qk_norm:
            return None, None
        dim = self.config.head_dim
        return self.norm(f"{layer}self_attn.q_norm.weight", dim), self.norm(f"{layer}self_attn.k_norm.weight", dim)

    def delta_input(self, layer: str, delta: DeltaConfig) -> Tensor:
        """Rows of one projection: convolution inputs (queries, keys, values), output gates z, decays a, strengths b."""
        assert self.layout.delta is not None, "a family with delta layers has a layout for them"
        return self.layout.delta(self, f"{layer}linear_attn.", delta)

    def delta_conv(self, layer: str, delta: DeltaConfig) -> Tensor:
        """[taps, channels] float32, the current row's tap last."""
        weight = self.take(f"{layer}linear_attn.conv1d.weight", delta.conv_channels, 1, delta.conv_taps)
        return weight[:, 0].T.float().contiguous()

    def delta_vectors(self, layer: str, delta: DeltaConfig) -> tuple[Tensor, Tensor, Tensor]:
        """A_log, dt_bias [value_heads] and the output norm's plain multiplier [value_dim], float32."""
        prefix = f"{layer}linear_attn."
        a_log = self.take(f"{prefix}A_log", delta.value_heads).float()
        dt_bias = self.take(f"{prefix}dt_bias", delta.value_heads).float()
        return a_log, dt_bias, self.take(f"{prefix}norm.weight", delta.value_dim).float()

    def delta_output(self, layer: str, delta: DeltaConfig) -> Tensor:
        inputs = delta.value_heads * delta.value_dim
        return self.take(f"{layer}linear_attn.out_proj.weight", self.config.hidden_size, inputs)

    def mlp(self, layer: str) -> tuple[Tensor, Tensor]:
        """Gate and up rows of one projection, and the down projection."""
        c = self.config
        gate_up = [
            self.take(f"{layer}mlp.{name}_proj.weight", c.intermediate_size, c.hidden_size) for name in ("gate", "up")
        ]
        return torch.cat(gate_up), self.take(f"{layer}mlp.down_proj.weight", c.hidden_size, c.intermediate_size)

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor by its checkpoint name; on the CPU it stays memory-mapped."""
        return self.checkpoint.take(name, shape).to(self.device)


def _delta_split(reader: WeightReader, prefix: str, delta: DeltaConfig) -> Tensor:
    """Qwen3.5: four projections, rows already in order."""
    hidden, values = reader.config.hidden_size, delta.value_heads * delta.value_dim
    rows = {"qkv": delta.conv_channels, "z": values, "a": delta.value_heads, "b": delta.value_heads}
    return torch.cat([reader.take(f"{prefix}in_proj_{name}.weight", n, hidden) for name, n in rows.items()])


def _delta_interleaved(reader: WeightReader, prefix: str, delta: DeltaConfig) -> Tensor:
    """Qwen3-Next: per key head (query, key, values, z) in one projection and (b, a) in another."""
    hidden, group = reader.config.hidden_size, delta.value_heads // delta.key_heads
    widths = [delta.key_dim, delta.key_dim, group * delta.value_dim, group * delta.value_dim]
    qkvz = reader.take(f"{prefix}in_proj_qkvz.weight", delta.key_heads * sum(widths), hidden)
    ba = reader.take(f"{prefix}in_proj_ba.weight", 2 * delta.value_heads, hidden)
    q, k, v, z = qkvz.unflatten(0, (delta.key_heads, sum(widths))).split(widths, dim=1)
    b, a = ba.unflatten(0, (delta.key_heads, 2 * group)).split(group, dim=1)
    return torch.cat([part.flatten(0, 1) for part in (q, k, v, z, a, b)])


LAYOUTS = {
    "plain": Layout(),
    "qwen3_next": Layout(delta=_delta_interleaved),
    "qwen3_5": Layout(delta=_delta_split),
    "qwen3_5_nested": Layout(root="model.language_model.", delta=_delta_split),
}
