# SPDX-License-Identifier: Apache-2.0
"""Receipts from a busy server, audited by the command: all confirmed, every mutated one refused."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from tandem_backend.commands.audit import audit
from tandem_backend.serving.launcher import TritonServer
from tandem_client import TandemClient
from triton_calls import MODEL_REPOSITORY

NUM_RECEIPTS, NUM_PARALLEL = 200, 16
SUBJECTS = ("json.dumps", "os.path.join", "re.sub", "itertools.chain", "bisect.insort")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "top_p": 0.9},
    {"sampling": {"repetition_penalty": 1.2, "presence_penalty": 0.3}},
    {"response_format": {"type": "json_object"}, "max_tokens": 24},
    {"stop": ["."], "logprobs": 2},
)


def take_receipt(url: str, number: int) -> str:
    options = {"max_tokens": 16 + number % 24} | OPTIONS[number % len(OPTIONS)]
    message = {"role": "user", "content": f"What does {SUBJECTS[number % len(SUBJECTS)]} do?"}
    with TandemClient(url) as client:
        receipt = client.complete(messages=[message], return_receipt=True, **options).receipt
    assert receipt is not None
    return receipt


def test_receipts_of_a_mixed_load_are_confirmed(server: TritonServer, tmp_path: Path) -> None:
    with ThreadPoolExecutor(NUM_PARALLEL) as pool:
        receipts = list(pool.map(lambda number: take_receipt(server.grpc_url, number), range(NUM_RECEIPTS)))
    checkpoint = str(MODEL_REPOSITORY / "tandem" / "1" / "tandem-pydoc")
    (tmp_path / "receipts").write_text("\n".join(receipts))
    confirmed = CliRunner().invoke(audit, ["--checkpoint", checkpoint, str(tmp_path / "receipts")])
    assert confirmed.exit_code == 0, confirmed.output
    assert confirmed.output.splitlines()[-1] == f"{NUM_RECEIPTS} confirmed, 0 refuted, 0 can't be judged"
    rng = random.Random(0)
    for i, receipt in enumerate(receipts):
        at = rng.randrange(len(receipt))
        receipts[i] = receipt[:at] + ("x" if receipt[at] != "x" else "y") + receipt[at + 1 :]
    (tmp_path / "mutated").write_text("\n".join(receipts))
    refused = CliRunner().invoke(audit, ["--checkpoint", checkpoint, str(tmp_path / "mutated")])
    assert refused.exit_code == 1
    assert refused.output.splitlines()[-1] == f"0 confirmed, {NUM_RECEIPTS} refuted, 0 can't be judged"
