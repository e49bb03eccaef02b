# SPDX-License-Identifier: Apache-2.0
"""Token embedding."""

from torch import Tensor


def embed(embedding: Tensor, token_ids: Tensor) -> Tensor:
    """embedding: [vocab, hidden], any float type; token_ids: [rows] int32 or int64. Returns [rows, hidden] float32."""
    return embedding[token_ids].float()
