# SPDX-License-Identifier: Apache-2.0
"""Models of `tandem new-model` on a real Triton server: several at once, loaded and unloaded meanwhile, versions."""

import http.client
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fakes.tiny_text_model import tiny_text_checkpoint
from running_server import running_server
from tandem_backend.commands.new_model import new_model
from tandem_backend.config import EngineConfig
from tandem_backend.engine import Engine
from tandem_backend.serving.launcher import TritonServer
from tandem_backend.types import Prompt, Request, SamplingParams
from tandem_client import ServerError, TandemClient

PROMPT = "abc"
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return [tiny_text_checkpoint(folder / f"tiny-{seed}", seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def texts(checkpoints: list[Path]) -> list[tuple[int, ...]]:
    """What each checkpoint says, by an engine in this process."""
    return [_decode(checkpoint) for checkpoint in checkpoints]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, checkpoints: list[Path]) -> Path:
    """One model, written in one place and copied to another as Triton server does with object stores."""
    folder = tmp_path_factory.mktemp("written")
    _write(folder / "alpha", checkpoints[0])
    moved = tmp_path_factory.mktemp("repositories") / "copied"
    shutil.copytree(folder, moved)
    shutil.rmtree(folder)
    return moved


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[TritonServer]:
    control = ("--model-control-mode=explicit", "--load-model=*")
    with running_server(repository, extra_args=control) as running:
        yield running


def _write(folder: Path, checkpoint: Path, *arguments: str) -> None:
    settings = ("--set", "kv_cache_bytes=4194304", "--set", "max_sessions=8", "--set", "num_threads=1")
    command = [str(folder), "--target", str(checkpoint), *settings, *arguments]
    result = CliRunner().invoke(new_model, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output


def _decode(checkpoint: Path) -> tuple[int, ...]:
    engine = Engine(EngineConfig(checkpoint=checkpoint, self_test_rows=0, kv_cache_bytes=1 << 22, num_threads=1))
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    engine.add(engine.prepare(Request(request_id="1", prompt=Prompt(text=PROMPT), params=params)))
    token_ids: list[int] = []
    while engine.has_work():
        token_ids += [token_id for output in engine.step() for token_id in output.token_ids]
    engine.close()
    return tuple(token_ids)


def _post(server: TritonServer, path: str, body: Any) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(server.http_url, timeout=60)
    connection.request("POST", f"/v2/{path}", json.dumps(body))
    reply = connection.getresponse()
    content = reply.read()
    connection.close()
    return reply.status, json.loads(content or b"null")


def _control(server: TritonServer, model: str, action: str) -> None:
    assert _post(server, f"repository/models/{model}/{action}", {}) == (200, None)


def _said_by_front(server: TritonServer, front: str) -> tuple[int, ...]:
    body = {"text_input": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
    status, reply = _post(server, f"models/{front}/generate", body)
    assert status == 200, reply
    return tuple(reply["token_ids"])


def _said(server: TritonServer, model: str) -> tuple[int, ...]:
    with TandemClient(server.grpc_url, model) as client:
        return client.complete(PROMPT, max_tokens=NUM_TOKENS, sampling={"ignore_eos": True}).token_ids


@pytest.mark.timeout(240)
def test_models_come_and_go_beside_each_other(
    server: TritonServer, repository: Path, checkpoints: list[Path], texts: list[tuple[int, ...]]
) -> None:
    assert texts[0] != texts[1]
    assert _said(server, "alpha") == _said_by_front(server, "alpha_generate") == texts[0]

    _write(repository / "beta", checkpoints[1], "--link")
    for model in ("beta", "beta_generate"):
        _control(server, model, "load")
    assert _said(server, "beta") == _said_by_front(server, "beta_generate") == texts[1]
    assert _said(server, "alpha") == _said_by_front(server, "alpha_generate") == texts[0]

    _control(server, "beta", "unload")
    with pytest.raises(ServerError, match="beta"):
        _said(server, "beta")
    status, reply = _post(server, "models/beta_generate/generate", {"text_input": PROMPT})
    assert status == 400
    assert "beta" in reply["error"]
    assert _said_by_front(server, "alpha_generate") == texts[0]


@pytest.mark.timeout(240)
def test_a_higher_version_takes_over_unless_both_are_asked_for(
    server: TritonServer, repository: Path, checkpoints: list[Path], texts: list[tuple[int, ...]]
) -> None:
    _write(repository / "alpha", checkpoints[1], "--version", "2")
    assert _said(server, "alpha") == texts[0]  # until it is loaded
    _control(server, "alpha", "load")
    assert _said(server, "alpha") == _said_by_front(server, "alpha_generate") == texts[1]
    assert _ready(server, "alpha/versions/1") == 400

    with (repository / "alpha" / "config.pbtxt").open("a") as config:
        config.write("version_policy { specific { versions: [ 1, 2 ] } }\n")
    _control(server, "alpha", "load")
    assert [_ready(server, f"alpha/versions/{version}") for version in (1, 2)] == [200, 200]
    assert _said_by_front(server, "alpha_generate") == texts[1]  # without a version it is the highest
    assert set(server.api.heartbeats()) >= {"alpha", "alpha_generate"}


def _ready(server: TritonServer, version: str) -> int:
    connection = http.client.HTTPConnection(server.http_url, timeout=60)
    connection.request("GET", f"/v2/models/{version}/ready")
    status = connection.getresponse().status
    connection.close()
    return status
