# SPDX-License-Identifier: Apache-2.0
"""Compiles the Triton kernels of named shapes for an architecture, without a GPU: compile_kernels.py 90 27b 1,32.

Prints a line a kernel: registers, bytes spilled (stack), shared memory, and for the delta rule the layouts of its sums
over keys. Run by test_gpu_kernels.py in a process of its own, since it replaces Triton's driver.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
META = torch.device("meta")


class NoDriver(DriverBase):
    """A CUDA device to compile for; nothing can be started on it."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return META

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_empty_cache_for_benchmark(self) -> Any:
        raise NotImplementedError

    def clear_cache(self, cache: Any) -> None:
        raise NotImplementedError


def compile_only(capability: int) -> list[tuple[str, Any]]:
    """From now on starting a kernel compiles it; the list returned fills with names and results."""
    triton.runtime.driver.set_active(NoDriver(capability))
    run = JITFunction.run

    def warm_up(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append((self.fn.__name__, kernel))
        return kernel

    compiled: list[tuple[str, Any]] = []
    JITFunction.run = warm_up
    return compiled


def bf16(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device=META)


def f32(*shape: int) -> Tensor:
    return torch.empty(*shape, device=META)


def i32(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.int32, device=META)


# hidden, MLP width, query and key heads, head dims, is gated, delta key and value heads, vocabulary, context blocks
SHAPES = {
    "27b": (5120, 17408, 24, 4, 256, True, (16, 48), 248320, 128),
    "4b": (2560, 9216, 16, 4, 256, True, (16, 32), 248320, 128),
    "plain": (4096, 14336, 32, 8, 128, False, None, 128256, 128),
    "narrow": (72, 200, 4, 4, 64, False, None, 1003, 2),
}


def jobs(shape: str, rows: int) -> None:
    """Start every kernel that a pass of so many rows runs."""
    from tandem_kernels import gpu
    from tandem_kernels.layers import AttentionLayer, MlpLayer

    hidden, width, heads, kv_heads, dim, is_gated, delta, vocab, blocks = SHAPES[shape]
    seqs, page, x = 4, 64, f32(rows, hidden)
    parents, row_seqs = i32(rows), i32(rows)
    trees = gpu.plan_trees(parents, row_seqs)
    inputs = dim * ((2 if is_gated else 1) * heads + 2 * kv_heads)
    attention = AttentionLayer(
        norm=f32(hidden),
        input=gpu.pack_weight(bf16(inputs, hidden)),
        output=gpu.pack_weight(bf16(hidden, heads * dim)),
        q_norm=f32(dim),
        k_norm=f32(dim),
        cos=f32(4096, dim // 8),
        sin=f32(4096, dim // 8),
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        is_gated=is_gated,
        eps=1e-6,
    )
    mlp = MlpLayer(
        norm=f32(hidden),
        gate_up=gpu.pack_weight(bf16(2 * width, hidden)),
        down=gpu.pack_weight(bf16(hidden, width)),
        eps=1e-6,
    )
    cache, new = bf16(64, kv_heads, page, dim), bf16(rows, kv_heads, dim)
    batch = (i32(rows), parents, row_seqs, i32(seqs), i32(seqs, blocks * 256 // page))
    gpu.attention_layer(attention, x, new, new, *batch, cache, cache, trees)
    gpu.mlp_layer(mlp, x)
    logits = gpu.linear(gpu.rms_norm(x, f32(hidden), 1e-6), gpu.pack_weight(bf16(vocab, hidden)))
    gpu.argmax(logits)
    gpu.store_kv(new, new.flatten(1), cache, cache, i32(rows), i32(rows))
    gpu.rms_norm(bf16(rows, hidden), f32(hidden), 1e-6)
    gpu.gate_mul(bf16(rows, width), bf16(rows, width), silu=True)
    gpu.rope(bf16(rows, heads * dim), f32(dim), 1e-6, f32(4096, dim // 8), f32(4096, dim // 8), i32(rows), dim)
    if delta is not None:
        delta_jobs(hidden, *delta, x, parents, seqs)


def delta_jobs(hidden: int, key_heads: int, value_heads: int, x: Tensor, parents: Tensor, seqs: int) -> None:
    from tandem_kernels import gpu
    from tandem_kernels.layers import DeltaLayer
    from tandem_kernels.state_memory import LONG_PASS, PassedState, prepared_width

    rows, dk, dv, layers, slots = len(parents), 128, 128, 3, 8
    channels = 2 * key_heads * dk + value_heads * dv
    layer = DeltaLayer(
        norm=f32(hidden),
        input=gpu.pack_weight(bf16(channels + value_heads * dv + 2 * value_heads, hidden)),
        output=gpu.pack_weight(bf16(hidden, value_heads * dv)),
        conv=f32(4, channels),
        a_log=f32(value_heads),
        dt_bias=f32(value_heads),
        out_norm=f32(dv),
        key_heads=key_heads,
        value_heads=value_heads,
        dk=dk,
        dv=dv,
        eps=1e-6,
    )
    state, conv = f32(slots, value_heads, dk, dv), bf16(slots, 3, channels)
    trees = gpu.plan_trees(parents, parents)
    passed = PassedState(f32(value_heads, dk, dv), i32(1)) if rows >= LONG_PASS else None
    kept = bf16(rows, layer.input.num_outputs), f32(rows, prepared_width(key_heads, value_heads, dk, dv)), passed
    batch = (parents, parents, i32(seqs), i32(seqs + 1))
    _, projected, qkv = gpu.delta_layer(layer, x, *batch, conv, state, trees, kept)
    parts = ([part] * layers for part in (projected, qkv, conv, state))
    path = (i32(seqs), i32(seqs + 1), i32(rows))
    gpu.commit_delta_layers([layer] * layers, *parts, *path, [passed] * layers if passed is not None else None)
    gpu.causal_conv(projected, conv, layer.conv, parents, parents)
    gpu.gated_delta_commit(
        f32(rows, channels), bf16(rows, 2 * value_heads), f32(value_heads), f32(value_heads), state, i32(seqs),
        i32(seqs + 1), i32(rows), key_heads,
    )  # fmt: skip


def key_sums(ttgir: str) -> list[str]:
    """How the delta rule's sums over lanes lie in registers, their first dimension: the order of sums over keys."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.blocked<.*>)$", ttgir, re.M))
    summed = re.findall(r'"tt.reduce"\([^)]*\).*?\) : \(tensor<\d+x\d+xf32, (#\w+)>\)', ttgir, re.S)
    return sorted({str(re.findall(r"(\w+) = \[(\d+)", layouts.get(name, name))) for name in summed})


def report(name: str, kernel: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    numbers = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", usage.stdout)}
    return {
        "kernel": name,
        "warps": kernel.metadata.num_warps,
        "registers": numbers["REG"],
        "stack": numbers["STACK"] + numbers["LOCAL"],
        "shared": kernel.metadata.shared,
        "key_sums": key_sums(kernel.asm["ttgir"]) if "delta_kernel" in name else [],
    }


def main(arguments: list[str]) -> None:
    capability, shapes, rows = int(arguments[0]), arguments[1].split(","), [int(n) for n in arguments[2].split(",")]
    compiled = compile_only(capability)
    for shape in shapes:
        for n in rows:
            jobs(shape, n)
    seen: dict[str, Any] = {}
    for name, kernel in compiled:
        seen.setdefault(kernel.hash, (name, kernel))
    for name, kernel in seen.values():
        print(json.dumps(report(name, kernel)))


if __name__ == "__main__":
    main(sys.argv[1:])
