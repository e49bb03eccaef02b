# SPDX-License-Identifier: Apache-2.0
"""A repository of the same models with small limits, and with a fault that a request can ask for."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from triton_calls import MODEL_REPOSITORY

IDLE_S = 3
NUM_CANDIDATES = 6
LIMITS = {"max_active": 2, "max_queued": 2, "max_sessions": 4, "queue_timeout_s": 8, "max_failed_rounds": 2}
MEMORY = {"kv_cache_bytes": 64 << 20}  # allocated a second sooner than the default
ADMIN_TOKEN = "the admin of the tests"
FAULT = 8000  # a token id that makes every round fail that reads it

FAULTY_MODEL = f"""
import torch
from tandem_backend.model.decoder import Decoder
from tandem_backend.serving import loop, metrics
from tandem_backend.serving.model import TritonPythonModel

loop.REPORT_INTERVAL_S, loop.SWEEP_INTERVAL_S, metrics.BUSY_INTERVAL_S = 0.1, 0.5, 0.5  # what tests wait for
forward = Decoder.forward


def failing_forward(self, batch, state):
    if bool((torch.as_tensor(batch.token_ids) == {FAULT}).any()):
        raise RuntimeError("the fault that was asked for")
    return forward(self, batch, state)


Decoder.forward = failing_forward
"""


def small_repository(folder: Path, **settings: Any) -> Path:
    """Both models under `folder`, with these settings more; the checkpoint stays where it is."""
    for name in ("tandem", "tandem_generate"):
        (folder / name / "1").mkdir(parents=True)
        shutil.copy(MODEL_REPOSITORY / name / "1" / "model.py", folder / name / "1" / "model.py")
        shutil.copy(MODEL_REPOSITORY / name / "config.pbtxt", folder / name / "config.pbtxt")
    shutil.copytree(MODEL_REPOSITORY / "tandem" / "warmup", folder / "tandem" / "warmup")
    (folder / "tandem" / "1" / "model.py").write_text(FAULTY_MODEL)
    config = folder / "tandem" / "config.pbtxt"
    text = config.read_text()
    for field, value in {
        "max_sequence_idle_microseconds": IDLE_S * 1_000_000,
        "max_candidate_sequences": NUM_CANDIDATES,
    }.items():
        text, found = re.subn(rf"({field}): \d+", rf"\1: {value}", text)
        assert found == 1
    config.write_text(text)
    engine = json.loads((MODEL_REPOSITORY / "tandem" / "1" / "engine.json").read_text())
    checkpoint = MODEL_REPOSITORY / "tandem" / "1" / engine["checkpoint"]
    own = {"checkpoint": str(checkpoint), "self_test_rows": 0, "admin_token": ADMIN_TOKEN}
    merged = engine | LIMITS | MEMORY | own | settings
    (folder / "tandem" / "1" / "engine.json").write_text(json.dumps(merged))
    return folder
