# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels where there is no GPU: run by Triton's interpreter, and compiled for three architectures.

Both need a process of their own: the interpreter is switched on before Triton is imported, and compiling replaces its
driver. The tests that the interpreter runs are those of tests/kernels/gpu, which a GPU machine runs as they are.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FOLDER = Path(__file__).parent / "gpu"

# Every kernel of a pass of so many rows: (architecture, shape, rows).
QUICK = [("80", "4b", "1"), ("90", "27b", "1,32"), ("100", "4b", "1")]
SLOW = [(arch, "27b,4b,plain,narrow", "1,32,64,1024") for arch in ("80", "90", "100")]
# What ptxas may spill: attention's tiles of 64 and 128 queries of 256 dims leave it no register, nor does, after its
# loop, the sum of a prefill's tile and its residual.
ALLOWED_SPILL_BYTES = {"partial_kernel": 512, "linear_kernel": 512}


def _compile(arch: str, shape: str, rows: str) -> None:
    command = [sys.executable, str(FOLDER / "compile_kernels.py"), arch, shape, rows]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    spilled = {k["kernel"]: k["stack"] for k in kernels if k["stack"] > ALLOWED_SPILL_BYTES.get(k["kernel"], 0)}
    assert not spilled
    # Delta's sums over keys must have one order in all builds.
    assert len({layout for k in kernels for layout in k["key_sums"]}) <= 1, kernels


@pytest.mark.parametrize(("arch", "shape", "rows"), QUICK)
def test_kernels_compile_without_spills(arch: str, shape: str, rows: str) -> None:
    _compile(arch, shape, rows)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("arch", "shape", "rows"), SLOW)
def test_all_shapes_compile_for_all_architectures(arch: str, shape: str, rows: str) -> None:
    _compile(arch, shape, rows)


def _interpret(*arguments: str) -> None:
    command = [sys.executable, "-m", "pytest", str(FOLDER), "-q", "-p", "no:cacheprovider", "-W", "ignore", *arguments]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_kernels_in_the_interpreter() -> None:
    _interpret("-k", "reference or equals_its_ops or equals_two_steps or plan or together")


def test_a_commit_by_way_of_a_passed_state_in_the_interpreter() -> None:
    _interpret("-k", "beside")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_properties_in_the_interpreter() -> None:
    _interpret()
