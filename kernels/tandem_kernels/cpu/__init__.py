# SPDX-License-Identifier: Apache-2.0
"""CPU implementations of the ops: thin calls into the compiled library. The op modules hold interfaces and shapes."""

from tandem_kernels.cpu.layers import (
    Handle,
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
from tandem_kernels.cpu.library import set_num_threads
from tandem_kernels.cpu.ops import (
    attention,
    causal_conv,
    gate_mul,
    gated_delta,
    gated_delta_commit,
    gated_rms_norm,
    linear,
    pack_weight,
    rms_norm,
    rope,
    store_kv,
    update_conv_state,
)
from tandem_kernels.cpu.sampling_ops import apply_mask, argmax, filter_logits, gumbel_argmax, log_probs

__all__ = [
    "Handle",
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
    "rms_norm",
    "rope",
    "set_num_threads",
    "store_kv",
    "update_conv_state",
]
