# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled CPU kernels: the library of the highest x86-64 level that this processor has.

All levels give the same bits (tests hold them to it), so the choice is one of speed.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch

# What a level needs, as /proc/cpuinfo names it; best first.
LEVELS = {
    "v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "v3": {"avx2", "fma", "bmi2", "f16c"},
}

P, L, I, F = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float  # noqa: E741
SIGNATURES: dict[str, list[type]] = {
    "tandem_set_num_threads": [I],
    "tandem_linear": [P, L, P, I, P, P, L, L, L],
    "tandem_pack_bf16": [P, P, L, L],
    "tandem_pack_f32": [P, P, L, L],
    "tandem_rms_norm": [P, L, P, F, P, L, L, L],
    "tandem_gated_rms_norm": [P, P, L, P, F, P, L, L, L],
    "tandem_rope": [P, L, P, F, P, P, P, P, L, L, L, L],
    "tandem_gate_mul": [P, L, P, L, I, P, L, L],
    "tandem_causal_conv": [P, L, P, P, P, P, P, L, L, L],
    "tandem_update_conv_state": [P, L, P, P, P, P, L, L, L],
    "tandem_argmax": [P, P, P, L, L],
    "tandem_log_probs": [P, P, P, P, P, L, L, L],
    "tandem_apply_mask": [P, P, L, L],
    "tandem_filter_logits": [P, P, P, P, P, P, L, L],
    "tandem_gumbel_argmax": [P, P, P, P, L, L, I],
    "tandem_gated_delta": [P, P, L, P, P, P, P, P, P, P, L, L, L, L, L],
    "tandem_gated_delta_commit": [P, P, L, P, P, P, P, P, P, L, L, L, L, L],
    "tandem_gated_delta_commit_layers": [L, P, P, L, P, P, P, P, P, P, L, L, L, L, L],
    "tandem_attention": [P, P, P, L, P, P, P, L, P, P, P, F, P, L, L, L, L, L, L],
    "tandem_attention_layer": [P, P, P, P, P, L, L, P, P, P, P, P, L, P, P, L],
    "tandem_delta_layer": [P, P, P, P, P, L, L, P, P, P, P, P, P],
    "tandem_mlp_layer": [P, P, P, L],
    "tandem_mtp_layer": [P, P, P, P, P, P, P, L, L, P, P, P, P, P, L, P, P, L],
    "tandem_mtp_guess": [P, P, P, P, P, L],
    "tandem_store_kv": [P, P, L, P, P, P, P, L, L, L, L],
}


def supported_levels() -> list[str]:
    """The levels this processor can run, best first."""
    flags: set[str] = set()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("flags"):
            flags = set(line.split(":", 1)[1].split())
            break
    return [level for level, needed in LEVELS.items() if needed <= flags]


@cache
def load_library(level: str | None = None) -> ctypes.CDLL:
    """The kernels for `level` ("v3", "v4"), or for the best this processor has.

    Raises RuntimeError on a processor below x86-64-v3 and when the library was not built.
    """
    if level is None:
        levels = supported_levels()
        if not levels:
            raise RuntimeError("the CPU kernels need a processor with AVX2 and FMA (x86-64-v3)")
        level = levels[0]
    path = Path(__file__).parent / f"tandem_cpu_{level}.so"
    if not path.exists():
        raise RuntimeError(f"{path.name} is missing: install the package (or run kernels/build_kernels.py) to build it")
    library = ctypes.CDLL(str(path))
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = I if name == "tandem_set_num_threads" else None
    return library


def set_num_threads(num_threads: int) -> int:
    """Let kernels of this process run on so many threads; returns how many it got, -1 outside 1 to 512.

    torch is left with one thread: its idle ones spin, and would fight the kernels for the cores.
    """
    torch.set_num_threads(1)
    granted: int = load_library().tandem_set_num_threads(num_threads)
    return granted
