# SPDX-License-Identifier: Apache-2.0
"""The checkpoint's multi-token-prediction head: one attention layer that guesses the token after the next.

Format: `mtp.*` of Qwen3-Next and Qwen3.5. At position t it takes fc([norm(embed(token[t+1])), norm(h[t])]), h being the
target's hidden state after its final norm, or for further drafts its own output at the position before.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tandem_kernels as kernels
import torch
from torch import Tensor

from tandem_backend.errors import CheckpointError
from tandem_backend.model.batch import PackedRows, pack_ints
from tandem_backend.model.checkpoint import Weights
from tandem_backend.model.decoder import Decoder
from tandem_backend.model.layers import MLP, Attention, AttentionRows
from tandem_backend.model.layout import WeightReader
from tandem_backend.model.state import KVLayer


@dataclass(frozen=True, slots=True)
class MtpRows(PackedRows):
    """Rows of one pass: a token and its place in a sequence each. Parents and sequences cover earlier rows too."""

    token_ids: Tensor  # [rows] int32
    positions: Tensor  # [rows] int32
    parents: Tensor  # [earlier and these rows] int32, row indices, -1 for a first row
    row_seqs: Tensor  # [earlier and these rows] int32
    prefix_lens: Tensor  # [seqs] int32, written positions
    block_tables: Tensor  # [seqs, longest] int32


def mtp_rows(
    token_ids: Sequence[int],
    positions: Sequence[int],
    parents: Sequence[int],
    row_seqs: Sequence[int],
    prefixes: Sequence[tuple[int, Sequence[int]]],
) -> MtpRows:
    """Lay rows out; `prefixes` are (written positions, block table) by sequence."""
    longest = max(len(table) for _, table in prefixes)
    tables = [block for _, table in prefixes for block in (*table, *[0] * (longest - len(table)))]
    prefix_lens = [num_written for num_written, _ in prefixes]
    packed, parts = pack_ints(token_ids, positions, parents, row_seqs, prefix_lens, tables)
    return MtpRows(
        packed=packed,
        token_ids=parts[0],
        positions=parts[1],
        parents=parts[2],
        row_seqs=parts[3],
        prefix_lens=parts[4],
        block_tables=parts[5].view(len(prefixes), longest),
    )


class MtpHead:
    """Weights and the pass. `vocab` bounds the token ids it drafts (byte-pair ids are ordered by frequency); 0: all."""

    def __init__(self, decoder: Decoder, checkpoint: Weights, vocab: int) -> None:
        config = decoder.config
        if config.num_mtp_layers != 1:
            raise CheckpointError(
                f"{checkpoint.directory}: mtp_num_hidden_layers is {config.num_mtp_layers}; the mtp drafter needs 1"
            )
        reader = WeightReader(checkpoint, config, decoder.device)
        hidden = config.hidden_size
        self.decoder = decoder
        self.attention = Attention(reader, "mtp.layers.0.", decoder.rope)
        self.kernel = kernels.MtpLayer(
            embedding=decoder.embedding,
            embedding_norm=reader.norm("mtp.pre_fc_norm_embedding.weight"),
            hidden_norm=reader.norm("mtp.pre_fc_norm_hidden.weight"),
            fc=kernels.pack_weight(reader.take("mtp.fc.weight", hidden, 2 * hidden)),
            attention=self.attention.kernel,
            mlp=MLP(reader, "mtp.layers.0.").kernel,
            out_norm=reader.norm("mtp.norm.weight"),
            head=kernels.pack_weight(reader.head()[:vocab]) if vocab else decoder.head,
            eps=config.rms_eps,
        )

    def forward(self, hidden: Tensor, rows: MtpRows, kv: KVLayer, memory: AttentionRows) -> Tensor:
        """hidden: [rows, hidden_size], before the tokens of `rows`. Returns the outputs [rows, hidden_size].

        memory holds the keys and values of the draft's earlier rows, and takes those of these rows after them.
        """
        rows = rows.to(self.decoder.device)
        total = len(rows.parents)
        return kernels.mtp_layer(
            self.kernel,
            rows.token_ids.long(),
            hidden,
            memory.keys[:total],
            memory.values[:total],
            rows.positions,
            rows.parents,
            rows.row_seqs,
            rows.prefix_lens,
            rows.block_tables,
            kv.keys,
            kv.values,
        )

    def store(self, memory: AttentionRows, places: Sequence[int], kv: KVLayer) -> None:
        """Write the first rows of memory to `places` (block index * block + offset) of kv."""
        device = self.decoder.device
        rows = torch.arange(len(places), dtype=torch.int32, device=device)
        to = torch.from_numpy(np.array(places, dtype=np.int64)).to(device, non_blocking=True)
        kernels.store_kv(memory.keys, memory.values.flatten(1), kv.keys, kv.values, rows, to)

    def top_tokens(self, hidden: Tensor, count: int) -> tuple[list[list[int]], list[list[float]]]:
        """The `count` likeliest tokens of each row and their probabilities within the drafted vocabulary."""
        if count == 1:
            ids, logprobs = kernels.mtp_guess(self.kernel, hidden)
            return [[token_id] for token_id in ids.tolist()], [[math.exp(value)] for value in logprobs.tolist()]
        logits = kernels.linear(hidden, self.kernel.head)
        probs, top_ids = torch.softmax(logits, dim=-1).topk(min(count, logits.shape[1]), dim=-1)
        return top_ids.tolist(), probs.tolist()
