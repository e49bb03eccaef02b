# SPDX-License-Identifier: Apache-2.0
"""API keys, limits, body sizes, CORS, the admin's endpoints and metrics of the gateway."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fake_transport import AsyncFakeTransport, answer
from fastapi.testclient import TestClient
from starlette.datastructures import Headers
from tandem_client.gateway.access import Access, add_key, hash_key, read_keys
from tandem_client.gateway.app import create_app
from tandem_client.gateway.command import gateway, gateway_key
from tandem_client.gateway.errors import ApiError
from tandem_client.gateway.options import joined_salt
from tandem_client.gateway.settings import Settings

Open = Callable[..., TestClient]
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "tandem", "messages": [{"role": "user", "content": "Hello?"}]}


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def transport() -> AsyncFakeTransport:
    return AsyncFakeTransport(*[answer("Hi") for _ in range(20)])


@pytest.fixture
def opened(transport: AsyncFakeTransport) -> Iterator[Open]:
    clients: list[TestClient] = []

    def open_gateway(**settings: Any) -> TestClient:
        app = create_app(Settings(**settings), transport=transport)  # type: ignore[arg-type]
        clients.append(TestClient(app))
        return clients[-1].__enter__()

    yield open_gateway
    for client in clients:
        client.__exit__(None, None, None)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def salts(transport: AsyncFakeTransport) -> list[str]:
    values = [json.loads(request.payload.inputs["sampling_parameters"].item()) for request in transport.requests]
    return [value.get("cache_salt", "") for value in values]


def test_a_key_is_asked_for_and_kept_as_a_hash(opened: Open, keys_file: Path, transport: AsyncFakeTransport) -> None:
    key = add_key(keys_file, "alice")
    assert key not in keys_file.read_text()
    assert read_keys(keys_file)[0].sha256 == hash_key(key)
    assert keys_file.stat().st_mode & 0o777 == 0o600
    client = opened(keys_file=keys_file)
    for headers in ({}, bearer("sk-wrong"), {"Authorization": key}, bearer(key + "x")):
        for reply in (client.post(CHAT, json=BODY, headers=headers), client.get("/v1/models", headers=headers)):
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
    assert transport.requests == []
    assert client.post(CHAT, json=BODY, headers=bearer(key)).status_code == 200


def test_each_key_has_its_own_circle_of_cached_prefixes(
    opened: Open, keys_file: Path, transport: AsyncFakeTransport
) -> None:
    names = {"alice": {}, "bob": {}, "carol": {"cache_salt": "team"}, "dave": {"cache_salt": "team"}}
    keys = {name: add_key(keys_file, name, **limits) for name, limits in names.items()}
    client = opened(keys_file=keys_file)
    for name in (*names, "alice"):
        assert client.post(CHAT, json=BODY, headers=bearer(keys[name])).status_code == 200
    alice, bob, carol, dave, alice_again = salts(transport)
    assert alice == alice_again
    assert len({alice, bob, carol}) == 3
    assert carol == dave == "team"
    assert "" not in (alice, bob)


def test_a_requests_own_salt_never_leaves_its_keys_circle() -> None:
    assert joined_salt("a", None) == "a"
    assert joined_salt("a", "x") != joined_salt("b", "x")
    assert joined_salt("a", "bx") != joined_salt("ab", "x")
    assert joined_salt("a", "x") not in ("a", "x", joined_salt("a", "y"))


def test_requests_a_minute_are_limited(opened: Open, keys_file: Path) -> None:
    key, other = add_key(keys_file, "alice", requests_per_minute=2), add_key(keys_file, "bob")
    client = opened(keys_file=keys_file)
    replies = [client.post(CHAT, json=BODY, headers=bearer(key)) for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert replies[2].json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(replies[2].headers["retry-after"]) <= 60
    assert client.post(CHAT, json=BODY, headers=bearer(other)).status_code == 200


def test_requests_at_once_are_limited(keys_file: Path) -> None:
    key = add_key(keys_file, "alice", max_concurrent=1)
    access = Access(Settings(keys_file=keys_file, max_requests=2))
    alice = access.identify(Headers(bearer(key)))
    with access.admitted(alice), pytest.raises(ApiError) as caught, access.admitted(alice):
        pass
    assert (caught.value.status, caught.value.code) == (429, "concurrency_limit_exceeded")
    with access.admitted(alice):
        assert access.describe()[0]["running"] == 1
    assert access.describe()[0]["running"] == 0


def test_a_full_gateway_says_so() -> None:
    access = Access(Settings(max_requests=1))
    with access.admitted(None), pytest.raises(ApiError) as caught, access.admitted(None):
        pass
    assert caught.value.status == 503
    assert caught.value.headers["Retry-After"]


def test_the_admin_reloads_keys_and_sees_metrics(opened: Open, keys_file: Path) -> None:
    add_key(keys_file, "alice", max_concurrent=3)
    client = opened(keys_file=keys_file, admin_token="open sesame")
    admin = bearer("open sesame")
    for path in ("/metrics", "/admin/keys"):
        assert client.get(path).status_code == 401
        assert client.get(path, headers=admin).status_code == 200
    key = add_key(keys_file, "bob")
    assert client.post(CHAT, json=BODY, headers=bearer(key)).status_code == 401
    assert client.post("/admin/keys/reload", headers=admin).json() == {"num_keys": 2}
    assert client.post(CHAT, json=BODY, headers=bearer(key)).status_code == 200
    keys_file.write_text("{")
    assert client.post("/admin/keys/reload", headers=admin).status_code == 500
    assert client.post(CHAT, json=BODY, headers=bearer(key)).status_code == 200
    text = client.get("/metrics", headers=admin).text
    assert 'tandem_gateway_requests_total{path="/v1/chat/completions",status="200"} 2.0' in text
    assert 'tandem_gateway_tokens_total{key="bob",kind="output"} 2.0' in text
    assert "tandem_gateway_running_requests 1.0" in text  # this one


def test_without_a_token_there_is_no_admin(opened: Open) -> None:
    client = opened()
    assert client.get("/admin/keys").status_code == 403
    assert client.get("/metrics").status_code == 200


def test_an_empty_token_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_GATEWAY_ADMIN_TOKEN", "")
    result = CliRunner().invoke(gateway, [])
    assert result.exit_code == 2
    assert "admin_token: " in result.output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"keys": [{"name": "a", "sha256": "abc"}]}', "keys.0.sha256"),
        ('{"keys": [], "more": 1}', "more"),
        (json.dumps({"keys": [{"name": "a", "sha256": digit * 64} for digit in "01"]}), "the name 'a' is there twice"),
        (json.dumps({"keys": [{"name": name, "sha256": "0" * 64} for name in "ab"]}), "the sha256 '0+' is there twice"),
    ],
)
def test_a_wrong_keys_file_is_refused(keys_file: Path, content: str, message: str) -> None:
    keys_file.write_text(content)
    with pytest.raises(ValueError, match=message):
        Access(Settings(keys_file=keys_file))


def test_the_command_makes_keys(keys_file: Path) -> None:
    result = CliRunner().invoke(gateway_key, [str(keys_file), "alice", "--requests-per-minute", "60"])
    assert result.exit_code == 0
    (key,) = read_keys(keys_file)
    assert (key.sha256, key.requests_per_minute) == (hash_key(result.output.strip()), 60)
    assert "taken" in CliRunner().invoke(gateway_key, [str(keys_file), "alice"]).output


@pytest.mark.parametrize("path", [f"{CHAT}/", "/metrics/", "/v1//models", "/nothing", "/v1/models/../../etc/passwd"])
def test_a_path_that_is_none_is_not_found(opened: Open, path: str) -> None:
    for method in ("GET", "POST"):
        reply = opened().request(method, path, headers={"Host": "elsewhere"}, follow_redirects=False)
        assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")


def test_cors_is_off_unless_asked_for(opened: Open) -> None:
    ask = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in opened().options(CHAT, headers=ask).headers
    client = opened(cors_origins=("https://chat.example",))
    assert client.options(CHAT, headers=ask).headers["access-control-allow-origin"] == "https://chat.example"
    reply = client.post(CHAT, json=BODY, headers={"Origin": "https://chat.example"})
    assert reply.headers["access-control-allow-origin"] == "https://chat.example"
    assert "access-control-allow-origin" not in client.post(CHAT, json=BODY, headers={"Origin": "https://x"}).headers


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'{"model": "tandem", "messages": "\xff"}', 400),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, 400),
        (b'{"model": "tandem", "messages": [{"role": "user", "content": "x"}], "tools": [{"a": NaN}]}', 400),
        (b'{"model": "tandem", "messages": ' + b"[" * 300 + b"]" * 300 + b"}", 400),
        (b'{"model": "tandem", "messages": ' + b"[" * 1000 + b"]" * 1000 + b"}", 400),
        (b"1" * 300_000, 400),
        (b'{"model": "' + b"x" * 400_000 + b'"}', 413),
    ],
)
def test_bad_bodies(opened: Open, content: bytes, status: int) -> None:
    client = opened(max_body_bytes=360_000)
    reply = client.post(CHAT, content=content)
    assert reply.status_code == status
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert len(reply.content) < 3000
    chunks = (content[at : at + 1000] for at in range(0, len(content), 1000))
    assert client.post(CHAT, content=chunks).status_code == status


def test_a_lone_surrogate_is_the_clients_mistake(opened: Open) -> None:
    body = b'{"model": "tandem", "messages": [{"role": "user", "content": "x"}], "cache_salt": "\\ud800"}'
    assert opened().post(CHAT, content=body).status_code == 400
    assert opened().post(CHAT, content=body.replace(b"tandem", b"\\ud800")).status_code == 400


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("value", ['"\\ud800"', "[" * 300 + "]" * 300])
def test_what_a_response_sends_back_can_be_written(opened: Open, value: str, stream: str) -> None:
    body = f'{{"model": "tandem", "input": "x", "stream": {stream}, "metadata": {{"a": {value}}}}}'
    reply = opened().post("/v1/responses", content=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_json")


def test_a_body_that_does_not_come_is_not_waited_for(transport: AsyncFakeTransport) -> None:
    async def ask() -> list[Any]:
        app = create_app(Settings(body_timeout_s=0.05), transport=transport)  # type: ignore[arg-type]
        sent: list[Any] = []

        async def receive() -> Any:
            await asyncio.sleep(30)

        async def send(message: Any) -> None:
            sent.append(message)

        async with app.router.lifespan_context(app):
            scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b"", "app": app}
            await app(scope, receive, send)
        return sent

    assert asyncio.run(ask())[0]["status"] == 408
