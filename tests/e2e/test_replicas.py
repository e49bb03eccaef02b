# SPDX-License-Identifier: Apache-2.0
"""Two Triton servers behind Envoy with docker/envoy/envoy.yaml: sessions keep their replica, and survive it."""

import http.client
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from gateway_process import GatewayProcess, running_gateway
from tandem_backend.benchmarks.replicas import ReplicaBench, render_replicas
from tandem_backend.commands.new_model import new_model
from tandem_backend.serving.envoy import Envoy
from tandem_backend.serving.launcher import TritonServer, choose_ports
from tandem_backend.serving.supervisor import Supervisor
from tandem_backend.types import Prompt
from tandem_backend.verification.prompts import NamedPrompt
from tandem_client import Session, TandemClient, TandemClientError
from triton_calls import MODEL_REPOSITORY, GrpcStream, post, wait_until
from tritonclient.utils import InferenceServerException

CONFIG = Path(__file__).parents[2] / "docker" / "envoy" / "envoy.yaml"
CHECKPOINT = MODEL_REPOSITORY / "tandem" / "1" / "tandem-pydoc"
SETTINGS = {"num_threads": 1, "self_test_rows": 0, "kv_cache_bytes": 64 << 20}
TURNS = ("What is a tuple?", "And a list?", "How do I sort one?")
NUM_TRIES = 64  # the ring depends on the ports: so many keys all fall on one of two replicas once in 2**63
LIMIT_S = 60.0  # of what would hang for ever

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[TritonServer]]:
    folder = tmp_path_factory.mktemp("replicas")
    shared = {"disk_cache": folder / "disk"}
    settings = [part for key, value in {**SETTINGS, **shared}.items() for part in ("--set", f"{key}={value}")]
    command = [str(folder / "repository" / "tandem"), "--target", str(CHECKPOINT), "--link", *settings]
    result = CliRunner().invoke(new_model, command)
    assert result.exit_code == 0, result.output
    ports = choose_ports("127.0.0.1", {f"{n} {name}": 0 for n in range(2) for name in ("http", "grpc", "metrics")})
    servers = [
        TritonServer(
            folder / "repository",
            http_port=ports[f"{n} http"],
            grpc_port=ports[f"{n} grpc"],
            metrics_port=ports[f"{n} metrics"],
            exit_timeout_s=10,
        )
        for n in range(2)
    ]
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(TritonServer.start, servers))
        yield servers
    finally:
        for server in servers:
            server.kill()


@pytest.fixture(scope="module")
def envoy(replicas: list[TritonServer]) -> Iterator[Envoy]:
    with Envoy(CONFIG, replicas) as running:
        yield running


@pytest.fixture
def client(envoy: Envoy, replicas: list[TritonServer]) -> Iterator[TandemClient]:
    """Of the proxy; both replicas serve when a test begins."""
    for replica in replicas:
        if replica.process.poll() is not None:
            replica.start()
    wait_until(lambda: len(envoy.healthy()) == 2)
    with TandemClient(envoy.grpc_url) as made:
        yield made


def place(envoy: Envoy, replicas: list[TritonServer], call: Callable[[], object]) -> TritonServer:
    """The replica that `call`, one request, went to."""
    before = envoy.num_requests()
    call()
    after = envoy.num_requests()
    (used,) = [replica for replica in replicas if after[replica.grpc_url] > before[replica.grpc_url]]
    return used


def prompt_for(client: TandemClient, envoy: Envoy, replicas: list[TritonServer], replica: TritonServer) -> str:
    """A prompt whose requests go to `replica`."""
    for n in range(NUM_TRIES):
        prompt = f"# {n}\nimport os\n"
        if place(envoy, replicas, lambda prompt=prompt: client.complete(prompt, max_tokens=1)) is replica:
            return prompt
    raise AssertionError("all requests go to one replica")


def session_at(client: TandemClient, envoy: Envoy, replicas: list[TritonServer], replica: TritonServer) -> Session:
    """A session of `replica` that resumes; nothing was said in it yet."""
    for _ in range(NUM_TRIES):
        session = client.session(resume=True)
        if place(envoy, replicas, lambda session=session: say(session, "Hello")) is replica:
            session.close()
            return session
        session.close()
    raise AssertionError("all sessions go to one replica")


def say(session: Session, text: str) -> str:
    return session.complete(messages=[{"role": "user", "content": text}], max_tokens=12).text


def stub(replica: TritonServer) -> psutil.Process:
    """The process of the model `tandem`."""
    children = psutil.Process(replica.pid).children(recursive=True)
    (found,) = [child for child in children if any(part.endswith("/tandem/1/model.py") for part in child.cmdline())]
    return found


@contextmanager
def stopped(replicas: list[TritonServer]) -> Iterator[None]:
    """No engine does anything meanwhile."""
    engines = [stub(replica) for replica in replicas]
    for engine in engines:
        engine.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for engine in engines:
            engine.send_signal(signal.SIGCONT)


def outcome(call: Callable[[], Any]) -> Any:
    """What the call gives, or the client's error that it raises."""
    try:
        return call()
    except TandemClientError as error:
        return error


def in_background(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread, and where its outcome will be."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(outcome(call)))
    thread.start()
    return thread, results


def refuse_until_unhealthy(client: TandemClient, envoy: Envoy, prompt: str) -> None:
    """Ask what goes to a replica that goes, until the proxy knows: till then it answers or says why it does not.

    Errors come in responses, which no proxy sees as such.
    """
    while len(envoy.healthy()) == 2:
        found = outcome(lambda: client.complete(prompt, max_tokens=12, timeout_s=LIMIT_S).token_ids)
        if isinstance(found, TandemClientError):
            assert re.search(r"no available versions|is not healthy|^\[UNAVAILABLE\]", str(found))


def test_a_session_keeps_its_replica_and_all_replicas_are_used(
    client: TandemClient, envoy: Envoy, replicas: list[TritonServer]
) -> None:
    used: dict[str, list[Session]] = {replica.grpc_url: [] for replica in replicas}
    for n in range(NUM_TRIES):
        session = client.session(f"chat-{n}")
        used[place(envoy, replicas, lambda session=session: say(session, TURNS[0])).grpc_url].append(session)
        if min(map(len, used.values())) >= 2:
            break
    assert min(map(len, used.values())) >= 2
    for text in TURNS[1:]:
        for url, sessions in used.items():
            for session in sessions:  # a turn that comes to another replica is an error: these sessions don't resume
                assert place(envoy, replicas, lambda s=session, t=text: say(s, t)).grpc_url == url
    for sessions in used.values():
        for session in sessions:
            session.close()


def test_a_conversation_over_the_gateway_keeps_its_replica_from_the_first_turn(
    client: TandemClient, envoy: Envoy, replicas: list[TritonServer]
) -> None:
    with running_gateway(envoy.grpc_url, "--no-regenerate") as gateway:
        for n in range(4):
            messages = [{"role": "user", "content": f"{n}: {TURNS[0]}"}]
            used, cached = set(), []
            for text in (*TURNS[1:], ""):
                used.add(place(envoy, replicas, lambda m=messages, c=cached: c.append(chat(gateway, m))).grpc_url)
                messages.append({"role": "user", "content": text})
            assert len(used) == 1
            assert cached[0] == 0 < cached[1] < cached[2]


def chat(gateway: GatewayProcess, messages: list[dict[str, str]]) -> int:
    """Adds the answer to `messages`; how much of the prompt did not have to be computed."""
    connection = http.client.HTTPConnection(gateway.address, timeout=LIMIT_S)
    content = json.dumps({"model": "tandem", "messages": messages, "max_tokens": 4})
    connection.request("POST", "/v1/chat/completions", content, {"content-type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    messages.append(answer["choices"][0]["message"])
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_streams_http_and_refusals_pass_through(client: TandemClient, envoy: Envoy) -> None:
    chunks = list(client.generate("import os\n", max_tokens=200, sampling={"ignore_eos": True}))
    assert len(chunks) > 2
    with pytest.raises(TandemClientError, match=r"\[INVALID_ARG\] max_tokens"):
        client.complete("x", max_tokens=0)
    status, reply = post(envoy.http_url, "generate", {"text_input": "import ", "max_tokens": 4})
    assert (status, bool(reply["text_output"])) == (200, True)
    status, events = post(envoy.http_url, "generate_stream", {"text_input": "import ", "max_tokens": 4, "stream": True})
    assert (status, len(events) >= 1) == (200, True)
    connection = http.client.HTTPConnection(envoy.http_url, timeout=10)
    connection.request("POST", "/v2/repository/models/tandem/unload", json.dumps({}))
    assert connection.getresponse().status == 403
    connection.close()


def test_a_header_that_crashes_servers_does_not_reach_them(client: TandemClient, envoy: Envoy) -> None:
    """With it errors end the stream with a status; here they come as responses, and the stream serves on."""
    with GrpcStream(envoy.grpc_url, headers={"triton_grpc_error": "true", "x-tandem-session": "any"}) as stream:
        for _ in range(2):
            stream.send(text_input="")
            with pytest.raises(InferenceServerException, match="text_input") as info:
                list(stream.responses())
            assert info.value.status() is None


def test_the_bench_compares_like_with_like(envoy: Envoy, client: TandemClient, replicas: list[TritonServer]) -> None:
    prompts = [NamedPrompt(str(n), Prompt(text=f"def read_{n}(path):\n")) for n in range(3)]
    with Envoy(CONFIG, replicas[1:]) as one:
        rows = ReplicaBench((one, envoy), prompts, 8, streams=2).run(1, lambda text: None)
        assert [row["replicas"] for row in rows] == [1, 2]
        assert rows[0]["ratio"] == rows[0]["largest_share"] == 1
        assert all(row["tokens_per_s"] > 0 for row in rows)
        assert "largest share" in render_replicas({"rows": rows})


def sends_elsewhere(envoy: Envoy) -> bool:
    """Whether it asks clients not to come again over this connection."""
    connection = http.client.HTTPConnection(envoy.http_url, timeout=10)
    connection.request("GET", "/v2/health/live")
    reply = connection.getresponse()
    connection.close()
    return reply.getheader("connection") == "close"


def test_an_envoy_that_drains_ends_its_streams_first(replicas: list[TritonServer], client: TandemClient) -> None:
    """docker/envoy/drain.sh, which deployments run before they stop Envoy; a second one need not wait."""
    with Envoy(CONFIG, replicas) as stops, TandemClient(stops.grpc_url) as own:
        drain = [CONFIG.parent / "drain.sh", str(int(LIMIT_S)), stops.admin_url.rpartition(":")[2]]
        with stopped(replicas):  # the stream lasts until the drain is seen, however quick the machine is
            thread, results = in_background(lambda: own.complete("import os\n", max_tokens=40, timeout_s=LIMIT_S))
            wait_until(lambda: sum(stops.num_requests().values()) > 0)
            draining = subprocess.Popen(drain, env={**os.environ, "SECONDS": str(int(LIMIT_S))})
            wait_until(lambda: sends_elsewhere(stops))
            assert draining.poll() is None
        thread.join()
        assert results[0].token_ids == client.complete("import os\n", max_tokens=40).token_ids
        assert draining.wait() == 0
        assert subprocess.run([*drain[:1], "0", *drain[2:]]).returncode == 0
    assert subprocess.run(drain).returncode == 0  # there is no Envoy any more


def test_a_killed_replica_s_sessions_and_requests_go_on_elsewhere(
    client: TandemClient, envoy: Envoy, replicas: list[TritonServer]
) -> None:
    dies, lives = replicas
    with TandemClient(lives.grpc_url) as direct, direct.session() as undisturbed:
        expected = [say(undisturbed, text) for text in TURNS]
        waiting, begun = (prompt_for(client, envoy, replicas, dies) for _ in range(2))
        answer = direct.complete(waiting, max_tokens=12).token_ids
    everyone = [session_at(client, envoy, replicas, replica) for replica in (dies, dies, lives, lives)]
    for turn in (0, 1):
        assert [say(session, TURNS[turn]) for session in everyone] == [expected[turn]] * 4

    stream = client.generate(begun, max_tokens=3000, sampling={"ignore_eos": True}, timeout_s=LIMIT_S)
    next(stream)
    engine = stub(dies)
    engine.send_signal(signal.SIGSTOP)  # so that no first token comes before the end
    before = envoy.num_requests()[dies.grpc_url]
    thread, results = in_background(lambda: client.complete(waiting, max_tokens=12, timeout_s=LIMIT_S).token_ids)
    wait_until(lambda: envoy.num_requests()[dies.grpc_url] > before)
    dies.kill()
    with pytest.raises(TandemClientError):  # its beginning was given out: it is not sent again
        list(stream)
    thread.join()
    assert results == [answer]
    assert [say(session, TURNS[2]) for session in everyone] == [expected[2]] * 4
    for session in everyone:
        session.close()
    wait_until(lambda: envoy.healthy() == {lives.grpc_url})


@pytest.mark.slow
def test_a_replica_that_drains_ends_its_streams_and_gets_nothing_new(
    client: TandemClient, envoy: Envoy, replicas: list[TritonServer]
) -> None:
    drains, other = replicas
    prompt = prompt_for(client, envoy, replicas, drains)
    stream = client.generate(prompt, max_tokens=3000, sampling={"ignore_eos": True}, timeout_s=LIMIT_S)
    chunks = [next(stream)]
    thread = threading.Thread(target=drains.stop)
    thread.start()
    refuse_until_unhealthy(client, envoy, prompt)
    assert envoy.healthy() == {other.grpc_url}
    for _ in range(5):
        assert client.complete(prompt, max_tokens=4, timeout_s=LIMIT_S).token_ids
    chunks += list(stream)
    assert chunks[-1].finish_reason == "length"
    assert sum(len(chunk.token_ids) for chunk in chunks) == 3000
    thread.join()


def writes_to_disk(replica: TritonServer) -> bool:
    """Whether it owns the disk cache that the replicas share: it alone holds the lock's file open."""
    return any(Path(file.path).name == "lock" for file in stub(replica).open_files())


@pytest.mark.slow
def test_a_stopped_replica_s_conversations_come_back_from_the_shared_disk(
    client: TandemClient, envoy: Envoy, replicas: list[TritonServer]
) -> None:
    wait_until(lambda: any(map(writes_to_disk, replicas)))  # the owner before may have gone
    stops, other = sorted(replicas, key=writes_to_disk, reverse=True)
    assert [writes_to_disk(stops), writes_to_disk(other)] == [True, False]
    turns = ("Write a class that counts words. " * 8, "And lines?", "How would you test it?")
    with TandemClient(stops.grpc_url) as direct, direct.session() as undisturbed:
        expected = [say(undisturbed, text) for text in turns]
    session = session_at(client, envoy, replicas, stops)
    assert [say(session, text) for text in turns[:2]] == expected[:2]
    stops.stop()
    wait_until(lambda: writes_to_disk(other))
    answer = session.complete(messages=[{"role": "user", "content": turns[2]}], max_tokens=12)
    assert answer.text == expected[2]
    assert answer.usage.num_cached_tokens > answer.usage.num_input_tokens // 2
    session.close()


@pytest.fixture
def hasty_envoy(client: TandemClient, replicas: list[TritonServer], tmp_path: Path) -> Iterator[Envoy]:
    """Another proxy, which waits no five minutes for a silent replica."""
    config = CONFIG.read_text()
    assert config.count("per_try_idle_timeout: 310s") == 2
    path = tmp_path / "envoy.yaml"
    path.write_text(config.replace("per_try_idle_timeout: 310s", "per_try_idle_timeout: 8s"))
    with Envoy(path, replicas) as running:
        yield running


@pytest.mark.slow
def test_a_dead_model_is_noticed_and_comes_back(hasty_envoy: Envoy, replicas: list[TritonServer]) -> None:
    """Triton server says that it is ready all the time; the supervisor of `tandem serve` is the one to notice."""
    with TandemClient(hasty_envoy.grpc_url) as client:
        _kill_model(client, hasty_envoy, replicas)


def _kill_model(client: TandemClient, envoy: Envoy, replicas: list[TritonServer]) -> None:
    dies, lives = replicas
    prompt = prompt_for(client, envoy, replicas, dies)
    with TandemClient(lives.grpc_url) as direct:
        expected = direct.complete(prompt, max_tokens=12).token_ids
    said: list[str] = []
    supervisor = Supervisor(dies, 3, load_timeout_s=60, say=said.append)
    supervising = threading.Thread(target=supervisor.run, daemon=True)
    supervising.start()
    wait_until(lambda: "tandem" in dies.api.heartbeats())
    stream = client.generate(prompt, max_tokens=3000, sampling={"ignore_eos": True}, timeout_s=LIMIT_S)
    next(stream)
    engine = stub(dies)
    engine.send_signal(signal.SIGSTOP)
    before = envoy.num_requests()[dies.grpc_url]
    thread, results = in_background(lambda: client.complete(prompt, max_tokens=12, timeout_s=LIMIT_S).token_ids)
    wait_until(lambda: envoy.num_requests()[dies.grpc_url] > before)
    engine.kill()
    refuse_until_unhealthy(client, envoy, prompt)
    assert client.complete(prompt, max_tokens=12, timeout_s=LIMIT_S).token_ids == expected
    with pytest.raises(TandemClientError, match=r"(?s)^(?!.*timeout_s).*$"):  # cut off, not given up by the client
        list(stream)
    thread.join()
    assert results == [expected] or "is not healthy" in str(results[0])
    wait_until(lambda: any("loaded anew" in line for line in said), LIMIT_S)
    wait_until(lambda: len(envoy.healthy()) == 2)
    assert place(envoy, replicas, lambda: client.complete(prompt, max_tokens=1)) is dies
    dies.stop()  # by itself, so that the supervisor ends
    supervising.join(LIMIT_S)
    assert not supervising.is_alive()  # it would start what the fixture kills
