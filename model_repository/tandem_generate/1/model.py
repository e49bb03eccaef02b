# SPDX-License-Identifier: Apache-2.0
"""Triton server loads its Python models from here; the model is in the package."""

from tandem_backend.serving.front import TritonPythonModel

__all__ = ["TritonPythonModel"]
