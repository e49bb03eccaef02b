# SPDX-License-Identifier: Apache-2.0
"""GPU implementations of the ops in the Triton language. The op modules hold interfaces and shapes."""

from tandem_kernels.gpu.attention import attention, store_kv
from tandem_kernels.gpu.choice import argmax, log_probs
from tandem_kernels.gpu.conv import causal_conv, update_conv_state
from tandem_kernels.gpu.delta import gated_delta, gated_delta_commit
from tandem_kernels.gpu.layers import (
    attention_handle,
    attention_layer,
    commit_delta_layers,
    delta_handle,
    delta_layer,
    mlp_handle,
    mlp_layer,
    mtp_guess,
    mtp_handle,
    mtp_layer,
)
from tandem_kernels.gpu.linear import linear, pack_weight, unpack_weight
from tandem_kernels.gpu.rowwise import gate_mul, gated_rms_norm, rms_norm, rope
from tandem_kernels.gpu.sampling import apply_mask, filter_logits, gumbel_argmax
from tandem_kernels.gpu.trees import plan_trees

__all__ = [
    "apply_mask",
    "argmax",
    "attention",
    "attention_handle",
    "attention_layer",
    "causal_conv",
    "commit_delta_layers",
    "delta_handle",
    "delta_layer",
    "filter_logits",
    "gate_mul",
    "gated_delta",
    "gated_delta_commit",
    "gated_rms_norm",
    "gumbel_argmax",
    "linear",
    "log_probs",
    "mlp_handle",
    "mlp_layer",
    "mtp_guess",
    "mtp_handle",
    "mtp_layer",
    "pack_weight",
    "plan_trees",
    "rms_norm",
    "rope",
    "store_kv",
    "unpack_weight",
    "update_conv_state",
]
