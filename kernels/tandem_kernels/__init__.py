# SPDX-License-Identifier: Apache-2.0
"""Deterministic kernels: one module an op, holding its interface and its reference twin. See kernels/README.md."""

from tandem_kernels.argmax import argmax
from tandem_kernels.attention import attention, store_kv
from tandem_kernels.causal_conv import causal_conv, update_conv_state
from tandem_kernels.cpu import set_num_threads
from tandem_kernels.device import find_device, free_bytes, row_dtype
from tandem_kernels.embed import embed
from tandem_kernels.gate_mul import gate_mul
from tandem_kernels.gated_delta import gated_delta, gated_delta_commit
from tandem_kernels.layers import (
    AttentionLayer,
    DeltaLayer,
    MlpLayer,
    MtpLayer,
    attention_layer,
    commit_delta_layers,
    delta_layer,
    mlp_layer,
    mtp_guess,
    mtp_layer,
)
from tandem_kernels.linear import linear, pack_weight
from tandem_kernels.packed_weight import PackedWeight
from tandem_kernels.rms_norm import gated_rms_norm, rms_norm
from tandem_kernels.rope import rope, rope_tables
from tandem_kernels.sampling import apply_mask, filter_logits, gumbel_argmax, log_probs, probabilities, uniforms
from tandem_kernels.state_memory import PassedState, new_delta_rows, new_delta_states
from tandem_kernels.tree_plan import PADDING, TreePlan, plan_trees

__all__ = [
    "PADDING",
    "AttentionLayer",
    "DeltaLayer",
    "MlpLayer",
    "MtpLayer",
    "PackedWeight",
    "PassedState",
    "TreePlan",
    "apply_mask",
    "argmax",
    "attention",
    "attention_layer",
    "causal_conv",
    "commit_delta_layers",
    "delta_layer",
    "embed",
    "filter_logits",
    "find_device",
    "free_bytes",
    "gate_mul",
    "gated_delta",
    "gated_delta_commit",
    "gated_rms_norm",
    "gumbel_argmax",
    "linear",
    "log_probs",
    "mlp_layer",
    "mtp_guess",
    "mtp_layer",
    "new_delta_rows",
    "new_delta_states",
    "pack_weight",
    "plan_trees",
    "probabilities",
    "rms_norm",
    "rope",
    "rope_tables",
    "row_dtype",
    "set_num_threads",
    "store_kv",
    "uniforms",
    "update_conv_state",
]
