# SPDX-License-Identifier: Apache-2.0
"""Tools that users have, unmodified: requests as vLLM's sample client sends them, curl, perf_analyzer, tandem load."""

import asyncio
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tandem_client.cli import main
from triton_calls import PROMPT, ask
from tritonclient.grpc import aio as grpc_aio

ROOT = Path(__file__).parents[2]
GENERATE = "v2/models/tandem_generate"


def _tensor(name: str, value: Any, kind: str) -> grpc_aio.InferInput:
    tensor = grpc_aio.InferInput(name, [1], kind)
    tensor.set_data_from_numpy(np.array([value], dtype=object if kind == "BYTES" else bool))
    return tensor


@pytest.mark.parametrize("stream", [False, True])
def test_requests_of_the_shape_of_vllm_backends_sample_client(server: Any, stream: bool) -> None:
    """Several on one gRPC stream; sampling parameters as JSON and as request parameters, numbers as text."""
    sampling = {"temperature": "0", "top_p": "1", "max_tokens": "12"}
    prompts = [PROMPT, "import json\n"]

    async def run() -> dict[str, list[bytes]]:
        found: dict[str, list[bytes]] = {str(n): [] for n in range(len(prompts))}

        async def requests() -> Any:
            for number, prompt in enumerate(prompts):
                yield {
                    "model_name": "tandem_generate",
                    "inputs": [
                        _tensor("text_input", prompt.encode(), "BYTES"),
                        _tensor("stream", stream, "BOOL"),
                        _tensor("sampling_parameters", json.dumps(sampling).encode(), "BYTES"),
                    ],
                    "outputs": [grpc_aio.InferRequestedOutput("text_output")],
                    "request_id": str(number),
                    "parameters": sampling,
                }

        async with grpc_aio.InferenceServerClient(server.grpc_url) as client:
            async for result, error in client.stream_infer(inputs_iterator=requests(), stream_timeout=60):
                assert error is None, error
                found[result.get_response().id] += list(result.as_numpy("text_output"))
        return found

    found = asyncio.run(run())
    for number, prompt in enumerate(prompts):
        texts = found[str(number)]
        expected = ask(server, text_input=prompt, max_tokens=12).text
        assert b"".join(texts).decode() == (expected if stream else prompt + expected)
        assert stream or len(texts) == 1


def _curl(server: Any, path: str, body: dict[str, Any]) -> str:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    url = f"http://{server.http_url}/{GENERATE}/{path}"
    command = [curl, "--silent", "--no-buffer", "--fail", "--max-time", "60", url, "-d", json.dumps(body)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_curl(server: Any) -> None:
    expected = ask(server, text_input=PROMPT, max_tokens=12).text
    whole = json.loads(_curl(server, "generate", {"text_input": PROMPT, "max_tokens": 12, "temperature": 0}))
    assert whole["text_output"] == PROMPT + expected
    events = _curl(server, "generate_stream", {"text_input": PROMPT, "max_tokens": 12, "stream": True}).splitlines()
    deltas = [json.loads(line.removeprefix("data: "))["text_output"] for line in events if line]
    assert "".join(deltas) == expected


def test_tandem_load_against_a_real_server(server: Any, tmp_path: Path) -> None:
    arguments = ["--concurrency", "1,3", "--requests", "6", "--warmup", "1", "--max-tokens", "8"]
    arguments += ["--sampling", '{"ignore_eos": true}', "--plot", str(tmp_path / "sweep.png")]
    result = CliRunner().invoke(main, ["load", "--url", server.grpc_url, *arguments])
    assert result.exit_code == 0, result.output
    levels = json.loads(result.stdout.splitlines()[-1])["levels"]
    assert [(level["num_errors"], level["num_tokens"]) for level in levels] == [(0, 48), (0, 48)]
    for level in levels:
        assert 0 < level["ttft_ms"]["p50"] <= level["ttft_ms"]["p99"] <= level["request_ms"]["p99"]
    assert (tmp_path / "sweep.png").stat().st_size > 1000


@pytest.fixture(scope="module")
def perf_analyzer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The command; installed for the run where it isn't there, else the tests are skipped and say why."""
    found = shutil.which("perf_analyzer")
    if found is not None:
        return found
    command = [str(ROOT / "scripts" / "install_perf_analyzer"), str(tmp_path_factory.mktemp("perf_analyzer"))]
    environment = {**os.environ, "PYTHON": str(ROOT / ".venv" / "bin" / "python")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    if done.returncode != 0:
        pytest.skip(done.stderr.strip())
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tandem_generate", "tandem"])
def test_perf_analyzer(server: Any, perf_analyzer: str, tmp_path: Path, model: str) -> None:
    """Single requests at tandem_generate, sequences of three turns at tandem."""
    turn = {"text_input": [PROMPT], "stream": [True], "max_tokens": [8]}
    data = [turn] if model == "tandem_generate" else [[turn, turn, turn]]
    (tmp_path / "input.json").write_text(json.dumps({"data": data}))
    command = [perf_analyzer, "-m", model, "-u", server.grpc_url, "-i", "grpc", "--async", "--streaming"]
    command += ["--input-data", str(tmp_path / "input.json"), "--concurrency-range", "2", "-s", "90", "-r", "3"]
    command += ["--measurement-mode", "count_windows", "--measurement-request-count", "12"]
    if model == "tandem":
        command += ["--sequence-id-range", "500000:600000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    throughput = re.search(r"Response Throughput: ([0-9.]+) infer/sec", done.stdout)
    assert throughput is not None, done.stdout
    assert float(throughput[1]) > 0
    assert ("Sequence count:" in done.stdout) == (model == "tandem")


@pytest.mark.slow
def test_aiperf(server: Any) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "run_aiperf", server.http_url, "--concurrency", "2", "--request-count", "8"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "COLUMNS": "160"},
    )
    if "AIPerf can't be installed" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Request Error Rate \(%\)\s*│\s*0\.00 ", done.stdout), done.stdout
    assert re.search(r"Request Count \(requests\)\s*│\s*8\.00 ", done.stdout), done.stdout
