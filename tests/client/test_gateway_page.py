# SPDX-License-Identifier: Apache-2.0
"""The page's files and headers, and the draft trees that chats bring to it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fake_transport import FINAL, AsyncFakeTransport, Script, response
from fastapi.testclient import TestClient
from tandem_client.gateway import live_page
from tandem_client.gateway.app import create_app
from tandem_client.gateway.settings import Settings

FOLDER = Path(live_page.__file__).parent / "page"
TREES = {
    "tokens": [{"token_id": 4, "text": "b", "round": 1, "drafter": "mtp", "node": 1}],
    "rounds": [
        {
            "round": 1,
            "nodes": [
                {"token_id": 3, "text": "a", "parent": None, "drafter": None, "score": 1.0, "accepted": True},
                {"token_id": 4, "text": "b", "parent": 0, "drafter": "mtp", "score": 0.5, "accepted": True},
            ],
        },
        {"round": 2, "nodes": None},
    ],
}
NOTHING: dict[str, Any] = {"tokens": [], "rounds": []}


def gateway(*scripts: Script, **settings: Any) -> TestClient:
    return TestClient(create_app(Settings(**settings), transport=AsyncFakeTransport(*scripts)))  # type: ignore[arg-type]


def test_everything_that_the_page_loads_is_there() -> None:
    with gateway() as client:
        left, found = re.findall(r'(?:src|href)="page/([^"]+)"', client.get("/").text), {}
        while left:
            name = left.pop()
            if name not in found:
                reply = client.get(f"/page/{name}")
                assert reply.status_code == 200
                found[name] = reply.text
                left += re.findall(r'from "\./([^"]+)"', reply.text)
    assert {"app.js", "style.css", "icon.svg", "tree.js"} <= found.keys()
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", "".join(found.values()))
    assert found.keys() == {file.name for file in FOLDER.iterdir()} - {"index.html"}


@pytest.mark.parametrize("path", ["/", "/page/app.js", "/page/style.css", "/page/icon.svg"])
def test_files_come_with_strict_headers_and_once(path: str) -> None:
    with gateway() as client:
        reply = client.get(path)
        again = client.get(path, headers={"If-None-Match": f'"other", W/{reply.headers["ETag"]}'})
        head = client.head(path)
    policy = reply.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert "*" not in policy
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert (again.status_code, again.content, again.headers["Content-Security-Policy"]) == (304, b"", policy)
    assert (head.status_code, head.content, head.headers["Content-Length"]) == (200, b"", str(len(reply.content)))


@pytest.mark.parametrize("path", ["/page/", "/page/nothing.js", "/page/..%2flive_page.py", "/page/%2e%2e/live_page.py"])
def test_nothing_else_can_be_read(path: str) -> None:
    with gateway() as client:
        assert client.get(path).status_code == 404


def test_the_page_can_be_left_out() -> None:
    with gateway(page=False) as client:
        assert [client.get(path).status_code for path in ("/", "/page/app.js")] == [404, 404]


def test_scripts_make_no_markup_of_text() -> None:
    source = "".join(file.read_text(encoding="utf-8") for file in FOLDER.glob("*.js"))
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "DOMParser", "srcdoc"):
        assert name not in source
    index = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"\son[a-z]+=|\sstyle=|javascript:|<script(?![^>]+src=)", index)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tandem", "messages": [{"role": "user", "content": "?"}], **fields}


def test_each_event_has_the_trees_of_its_tokens() -> None:
    script = [
        response("b", [4], draft_trees=json.dumps(TREES).encode()),
        response("", [], "stop", draft_trees=json.dumps(NOTHING).encode()),
        FINAL,
    ]
    with gateway(script) as client:
        text = client.post("/v1/chat/completions", json=chat(stream=True, return_draft_trees=True)).text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: {")]
    _, told, end = [json.loads(line)["choices"][0] for line in lines]
    assert (told["delta"]["content"], told["tandem"]) == ("b", {"draft_trees": TREES})
    assert end["finish_reason"] == "stop"
    assert "draft_trees" not in end["tandem"]


def test_a_whole_answer_has_all_trees() -> None:
    script = [response("b", [4], "stop", draft_trees=json.dumps(TREES).encode()), FINAL]
    with gateway(script) as client:
        (choice,) = client.post("/v1/chat/completions", json=chat(return_draft_trees=True)).json()["choices"]
    assert choice["tandem"]["draft_trees"] == TREES
    assert choice["tandem"]["finish_reason"] == "stop"


def test_trees_are_asked_for_only_where_they_are_wanted() -> None:
    transport = AsyncFakeTransport([response("b", [4], "stop"), FINAL])
    with TestClient(create_app(Settings(), transport=transport)) as client:  # type: ignore[arg-type]
        (choice,) = client.post("/v1/chat/completions", json=chat(return_draft_trees=False)).json()["choices"]
    assert "return_draft_trees" not in transport.requests[0].payload.inputs
    assert "draft_trees" not in choice["tandem"]
