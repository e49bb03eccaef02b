# SPDX-License-Identifier: Apache-2.0
"""The checkpoint's multi-token-prediction head: one attention layer that guesses the token after the next.

Format: `mtp.*` of Qwen3-Next and Qwen3.5. At position t it takes fc([norm(embed(token[t+1])), norm(h[t])]), h being the
target's hidden state after its final norm, or for further drafts its own output at the position before.
"""

import tandem_kernels as kernels
import torch
from torch import Tensor

from tandem_backend.errors import CheckpointError
from tandem_backend.model.batch import RowBatch
from tandem_backend.model.checkpoint import Checkpoint
from tandem_backend.model.decoder import Decoder
from tandem_backend.model.layers import MLP, Attention, AttentionRows
from tandem_backend.model.layout import WeightReader
from tandem_backend.model.state import KVLayer


class MtpHead:
    """Weights and the pass. `vocab` bounds the token ids it drafts (byte-pair ids are ordered by frequency); 0: all."""

    def __init__(self, decoder: Decoder, checkpoint: Checkpoint, vocab: int) -> None:
        config = decoder.config
        if config.num_mtp_layers != 1:
            raise CheckpointError(
                f"{checkpoint.directory}: mtp_num_hidden_layers is {config.num_mtp_layers}; the mtp drafter needs 1"
            )
        reader = WeightReader(checkpoint, config)
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

    @torch.inference_mode()
    def forward(
        self, hidden: Tensor, batch: RowBatch, kv: KVLayer, earlier: AttentionRows | None = None
    ) -> tuple[Tensor, AttentionRows]:
        """hidden: [rows, hidden_size]; batch.token_ids are the tokens after them. Returns outputs [rows, hidden_size].

        Rows `earlier` of the same draft come before these: batch.parents and batch.row_seqs cover them too.
        """
        rows = self.attention.new_rows(len(batch.parents))
        if earlier is not None:
            num_earlier = len(earlier.keys)
            rows.keys[:num_earlier], rows.values[:num_earlier] = earlier.keys, earlier.values
        out = kernels.mtp_layer(
            self.kernel,
            batch.token_ids,
            hidden,
            rows.keys,
            rows.values,
            batch.positions,
            batch.parents,
            batch.row_seqs,
            batch.prefix_lens,
            batch.block_tables,
            kv.keys,
            kv.values,
        )
        return out, rows

    @torch.inference_mode()
    def top_tokens(self, hidden: Tensor, count: int) -> tuple[list[list[int]], list[list[float]]]:
        """The `count` likeliest tokens of each row and their probabilities within the drafted vocabulary."""
        if count == 1:
            ids, logprobs = kernels.mtp_guess(self.kernel, hidden)
            return ids[:, None].tolist(), logprobs.exp()[:, None].tolist()
        logits = kernels.linear(hidden, self.kernel.head)
        probs, top_ids = torch.softmax(logits, dim=-1).topk(min(count, logits.shape[1]), dim=-1)
        return top_ids.tolist(), probs.tolist()
