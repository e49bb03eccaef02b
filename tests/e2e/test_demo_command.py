# SPDX-License-Identifier: Apache-2.0
"""`tandem demo`, the first thing a newcomer runs, on the bundled model."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TANDEM = Path(sys.executable).parent / "tandem"


@pytest.mark.timeout(180)
def test_three_answers_are_streamed_and_measured() -> None:
    command = [TANDEM, "demo", "--max-tokens=24"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"--- (\w+) ---", done.stdout) == ["chat", "code", "prose"]
    measured = re.findall(r"\[(\d+) tokens, first token after (\d+) ms, (\d+) tokens/s\]", done.stdout)
    assert [int(num_tokens) for num_tokens, _, _ in measured] == [24, 24, 24]
    assert "serializes `obj` to a JSON formatted `str`" in done.stdout
    assert done.stdout.endswith("Triton server has stopped.\n")
