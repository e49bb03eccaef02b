# SPDX-License-Identifier: Apache-2.0
"""From warm-up to the last answer: reloads, shutdowns and deaths of a real Triton server with requests running."""

import http.client
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from small_server import small_repository
from tandem_backend.serving.launcher import TritonServer
from triton_calls import (
    EXACTLY,
    FULL_ANSWER,
    MODEL_REPOSITORY,
    PROMPT,
    Answer,
    GrpcStream,
    ask,
    metrics,
    post,
    wait_until,
)
from tritonclient.utils import InferenceServerException

TANDEM = Path(sys.executable).parent / "tandem"
READY_S = 90
NUM_CONNECTIONS = 16  # twice as many as Triton server has HTTP threads
# Runs for six seconds where nothing else does.
LONG = {"text_input": PROMPT, "max_tokens": 4000, "sampling_parameters": '{"ignore_eos": true, "draft": "off"}'}
SOME = {"text_input": PROMPT, "max_tokens": 100, "sampling_parameters": EXACTLY}
SOME_BY_HTTP = {"text_input": PROMPT, "max_tokens": 100, "ignore_eos": True}


def stub(server_pid: int, model: str) -> psutil.Process:
    """The model's newest stub that lives."""
    found = [
        process
        for process in psutil.Process(server_pid).children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE
        and any(argument.endswith(f"/{model}/1/model.py") for argument in process.cmdline())
    ]
    return max(found, key=psutil.Process.create_time)


@contextmanager
def in_background(call: Callable[[], Any]) -> Iterator["queue.SimpleQueue[Any]"]:
    """Its result, or the exception it raised, comes through the queue."""
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put(call())
        except Exception as error:
            results.put(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield results
    finally:
        thread.join()


def num_ended(server: TritonServer) -> float:
    """Requests of `tandem` that have ended in any way, by its metric."""
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics") as response:
        text = response.read().decode()
    return sum(float(value) for value in re.findall(r"^tandem_requests_total\{.*\} (\S+)$", text, re.MULTILINE))


def status_of_live(connection: http.client.HTTPConnection) -> int:
    connection.request("GET", "/v2/health/live")
    with connection.getresponse() as response:
        response.read()
        return response.status


def model_state(server: TritonServer, model: str) -> str:
    return next(str(found.get("state")) for found in server.api.models() if found["name"] == model)


def reload_front_while_clients_ask(server: TritonServer) -> None:
    """No connection waits for the end of the load. For a server without a request yet: all are then one thread's."""
    server.api.unload("tandem_generate")
    with ExitStack() as stack:
        connections = [http.client.HTTPConnection(server.http_url, timeout=READY_S) for _ in range(NUM_CONNECTIONS)]
        for connection in connections:
            stack.enter_context(closing(connection))
            assert status_of_live(connection) == 200
        loaded = stack.enter_context(in_background(lambda: server.api.load("tandem_generate", READY_S)))
        wait_until(lambda: model_state(server, "tandem_generate") == "LOADING")
        assert {status_of_live(connection) for connection in connections} == {200}
        assert model_state(server, "tandem_generate") == "LOADING"
        assert loaded.get(timeout=READY_S) is None


def regions(server: TritonServer) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{server.shm_prefix}*"))


def unload_while_it_answers(server: TritonServer, expected: Answer) -> None:
    """What runs goes on to its end, what comes is refused."""
    with GrpcStream(server.grpc_url) as stream:
        stream.send(stream=True, **SOME, **FULL_ANSWER)
        responses = stream.responses()
        first = next(responses)
        with in_background(lambda: post(server.http_url, "generate", SOME_BY_HTTP)) as by_http:
            server.api.unload("tandem")
            with pytest.raises(InferenceServerException, match="unknown model: 'tandem'"):
                ask(server, **SOME)
            assert Answer([first, *responses]) == expected
            status, answer = by_http.get(timeout=READY_S)
            assert status in (200, 400)  # 400: not forwarded before the unloading
            if status == 200:
                assert answer["text_output"] == PROMPT + expected.text
    assert "error" in post(server.http_url, "generate", {"text_input": PROMPT, "max_tokens": 1})[1]


def test_who_asks_for_it_gets_errors_with_a_status(tmp_path: Path) -> None:
    """On a server of its own: 2.51 crashes in one of some forty such streams, once the client has its answer."""
    with (
        TritonServer(small_repository(tmp_path / "models"), log_path=tmp_path / "server.log") as server,
        GrpcStream(server.grpc_url, headers={"triton_grpc_error": "true"}) as stream,
    ):
        stream.send(text_input="")
        with pytest.raises(InferenceServerException) as info:
            list(stream.responses())
        assert str(info.value.status()) == "StatusCode.INVALID_ARGUMENT"


@pytest.mark.timeout(2 * READY_S)
def test_reload_under_load_then_a_killed_server(tmp_path: Path) -> None:
    # Room for what outlives the reload, and a core for the reload.
    roomy = {"max_active": 32, "kv_cache_bytes": 256 << 20, "num_threads": 1}
    repository = small_repository(tmp_path / "models", **roomy)
    with TritonServer(repository, log_path=tmp_path / "server.log") as server:
        reload_front_while_clients_ask(server)
        wait_until(lambda: num_ended(server) == 1)  # the warm-up
        expected = ask(server, **SOME)
        with GrpcStream(server.grpc_url) as outliving:  # the whole reload
            many = '{"ignore_eos": true, "draft": "off", "n": 16}'
            outliving.send(stream=True, **LONG | {"sampling_parameters": many})
            next(outliving.responses())
            unload_while_it_answers(server, expected)
            server.api.load("tandem", READY_S)
            assert ask(server, **SOME) == expected
            assert post(server.http_url, "generate", SOME_BY_HTTP)[1]["text_output"] == PROMPT + expected.text
            overlapping = metrics(server)
        assert overlapping["tandem_num_active"] == 16
        assert 'tandem_num_active{overlap="1"}' in overlapping
        wait_until(lambda: "tandem_num_active" not in metrics(server))  # the older one's series went with it
        assert ask(server, **SOME) == expected
        wait_until(lambda: metrics(server)['tandem_requests_total{outcome="length",overlap="1"}'] == 4)

        stubs = psutil.Process(server.pid).children(recursive=True)
        os.kill(server.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(stubs, timeout=10)
        assert alive == []
    assert regions(server) == []


@pytest.mark.timeout(2 * READY_S)
def test_shutdown_drains_then_answers_the_rest(tmp_path: Path) -> None:
    server = TritonServer(MODEL_REPOSITORY, log_path=tmp_path / "server.log", exit_timeout_s=2)
    short = {"text_input": PROMPT, "max_tokens": 20, "sampling_parameters": EXACTLY}
    with server:
        stubs = psutil.Process(server.pid).children(recursive=True)
        expected = ask(server, **short)
        body = {"text_input": PROMPT, "max_tokens": 4000, "ignore_eos": True, "draft": "off", "stream": True}
        with (
            GrpcStream(server.grpc_url) as ending,
            GrpcStream(server.grpc_url) as endless,
            in_background(lambda: post(server.http_url, "generate_stream", body)) as by_http,
        ):
            endless.send(stream=True, **LONG)
            running = endless.responses()
            next(running)
            wait_until(lambda: metrics(server)["tandem_num_active"] >= 2)  # the one over HTTP runs too
            ending.send(stream=True, **short, **FULL_ANSWER)
            answer = ending.responses()
            first = next(answer)
            with in_background(server.stop) as stopped:
                assert Answer([first, *answer]) == expected
                with pytest.raises(InferenceServerException, match=r"\[UNAVAILABLE\] the server is shutting down"):
                    list(running)
                status, events = by_http.get(timeout=20)
                assert status == 200
                assert "[UNAVAILABLE] the server is shutting down" in events[-1]["error"]
                ending.cancel()
                endless.cancel()
                stopped.get(timeout=30)
    assert server.process.returncode == 0
    _, alive = psutil.wait_procs(stubs, timeout=5)
    assert alive == []
    assert regions(server) == []


@pytest.mark.slow
def test_an_idle_stream_costs_a_shutdown_no_state(tmp_path: Path) -> None:
    """Triton server waits for the client to close it, and then ends without unloading a model."""
    repository = tmp_path / "models"
    shutil.copytree(MODEL_REPOSITORY, repository, copy_function=os.symlink)
    config = repository / "tandem" / "config.pbtxt"
    text = config.read_text()
    config.unlink()
    config.write_text(text + f'parameters {{ key: "disk_cache" value {{ string_value: "{tmp_path / "disk"}" }} }}\n')
    server = TritonServer(repository, log_path=tmp_path / "server.log", exit_timeout_s=1)
    with server, GrpcStream(server.grpc_url) as idle:
        idle.send(text_input=PROMPT, max_tokens=2, stream=True)
        assert list(idle.responses())
        server.stop()
    assert [*(tmp_path / "disk").rglob("*.safetensors")]
    assert regions(server) == []


def generates(url: str, timeout_s: float = 30) -> bool:
    """Whether the front, and the engine behind it, answer."""
    try:
        status, _ = post(url, "generate", {"text_input": PROMPT, "max_tokens": 2}, timeout_s)
    except OSError:
        return False
    return status == 200


@pytest.mark.timeout(4 * READY_S)
def test_serve_revives_what_is_dead_or_stuck(tmp_path: Path) -> None:
    repository = small_repository(tmp_path / "models")
    free = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
    command = [TANDEM, "serve", f"--model-repository={repository}", *free, "--heartbeat-timeout=5"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    assert process.stdout is not None
    output = process.stdout
    reader = threading.Thread(target=lambda: [lines.put(line) for line in output], daemon=True)
    reader.start()
    try:
        url = _wait_for(lines, r"\s+HTTP\s+http://(\S+)")
        (server,) = psutil.Process(process.pid).children()
        assert generates(url)

        stub(server.pid, "tandem").kill()
        assert not generates(url, timeout_s=3)
        assert _wait_for(lines, r"tandem: (.*) loaded anew") == "tandem, tandem_generate"
        wait_until(lambda: generates(url), READY_S)

        stub(server.pid, "tandem_generate").send_signal(signal.SIGSTOP)
        assert _wait_for(lines, r"tandem: (.*) loaded anew") == "tandem_generate"
        wait_until(lambda: generates(url), READY_S)

        server.send_signal(signal.SIGSEGV)
        assert _wait_for(lines, r"tandem: Triton server died by signal (\d+)") == str(signal.SIGSEGV.value)
        url = _wait_for(lines, r"\s+HTTP\s+http://(\S+)")
        assert generates(url)
    finally:
        process.terminate()
        process.wait(60)
    assert process.returncode == 0
    assert not list(Path("/dev/shm").glob(f"tandem_{process.pid}_*"))


def _wait_for(lines: "queue.SimpleQueue[str]", pattern: str) -> str:
    """The group of the next line that matches."""
    deadline_s = time.monotonic() + READY_S
    while True:
        line = lines.get(timeout=max(deadline_s - time.monotonic(), 0))
        if match := re.match(pattern, line):
            return match[1]
