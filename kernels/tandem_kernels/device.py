# SPDX-License-Identifier: Apache-2.0
"""Where ops run. They follow the device of their tensors; what differs by device outside the ops is answered here."""

import importlib
import os
from types import ModuleType

import torch
from torch import Tensor

from tandem_kernels import cpu

CPU = torch.device("cpu")

# Triton's own switch: its kernels then run on CPU tensors, slowly, in Python. Tests use it where there is no GPU.
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def find_device(name: str) -> torch.device:
    """name: "cpu", "cuda" (or "cuda:1"), or "auto", which is CUDA where torch sees a device.

    Raises RuntimeError where CUDA is asked for and absent.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError("CUDA is not available: torch sees no CUDA device")
        device = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
    return device


def row_dtype(device: torch.device) -> torch.dtype:
    """Type of rows inside blocks, and of the keys, values, convolution inputs and hidden states kept of them."""
    return torch.bfloat16 if device.type == "cuda" or IS_INTERPRETED else torch.float32


def free_bytes(device: torch.device) -> int | None:
    """Memory of the device that nobody has taken; None for the CPU, whose memory others share and swap."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def runs_on_gpu(tensor: Tensor) -> bool:
    """Whether ops on the tensor are the Triton kernels."""
    return tensor.is_cuda or IS_INTERPRETED


def implementation(tensor: Tensor) -> ModuleType:
    """The module whose functions run on the tensor's device. The GPU's needs Triton, so it is loaded on first use."""
    return importlib.import_module("tandem_kernels.gpu") if runs_on_gpu(tensor) else cpu
