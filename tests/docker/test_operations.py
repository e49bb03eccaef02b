# SPDX-License-Identifier: Apache-2.0
"""The sizes in the operator's guide are those that the commands print."""

import re
from pathlib import Path

from deployments import DOCKER, ROOT
from tandem_backend.commands.describe_memory import describe_memory, render_memory
from tandem_backend.config import EngineConfig

GUIDE = (DOCKER / "OPERATIONS.md").read_text(encoding="utf-8")
CHECKPOINT = ROOT / "model_repository" / "tandem" / "1" / "tandem-pydoc"


def test_what_a_sequence_takes_is_what_inspect_says() -> None:
    assert render_memory(describe_memory(CHECKPOINT, 4096)) in GUIDE


def test_the_arithmetic_is_right() -> None:
    report, defaults = describe_memory(CHECKPOINT, 4096), EngineConfig(checkpoint=Path("any"))
    pool = report["blocks_per_sequence"] * report["block_bytes"] * defaults.max_active
    blocks, block, active, mebibytes = re.findall(r"= blocks of .* once: (\d+) x ([\d,]+) x (\d+) = (\d+) MiB", GUIDE)[
        0
    ]
    assert (int(blocks), int(block.replace(",", ""))) == (report["blocks_per_sequence"], report["block_bytes"])
    assert (int(active), int(mebibytes) << 20) == (defaults.max_active, pool)
    state = (defaults.max_active + defaults.max_sessions) * report["state_bytes_per_sequence"]
    slot = report["state_bytes_per_sequence"]
    assert f"({defaults.max_active} + {defaults.max_sessions}) x {slot:,} = {state:,} bytes" in GUIDE
