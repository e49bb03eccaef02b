# SPDX-License-Identifier: Apache-2.0
"""CPU implementations of the ops: thin calls into the compiled library. The op modules hold interfaces and shapes."""

from tandem_kernels.cpu.layers import (
    Handle,
    attention_handle,
    attention_layer,
    delta_handle,
    delta_layer,
    mlp_handle,
    mlp_layer,
)
from tandem_kernels.cpu.library import set_num_threads
from tandem_kernels.cpu.ops import (
    PackedWeight,
    argmax,
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

__all__ = [
    "Handle",
    "PackedWeight",
    "argmax",
    "attention",
    "attention_handle",
    "attention_layer",
    "causal_conv",
    "delta_handle",
    "delta_layer",
    "gate_mul",
    "gated_delta",
    "gated_delta_commit",
    "gated_rms_norm",
    "linear",
    "mlp_handle",
    "mlp_layer",
    "pack_weight",
    "rms_norm",
    "rope",
    "set_num_threads",
    "store_kv",
    "update_conv_state",
]
