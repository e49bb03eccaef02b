# SPDX-License-Identifier: Apache-2.0
"""Caches of a real Triton server: what a second request saves, whose caches it sees, and who may clear them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from deployments import unanswered
from running_server import running_server
from small_server import ADMIN_TOKEN, small_repository
from tandem_backend.serving.launcher import TritonServer
from triton_calls import metrics, metrics_page, post, wait_until

TEXT = "The quick brown fox reads a file line by line and counts the words in it. " * 4


def generate(server: Any, **values: Any) -> dict[str, Any]:
    body = {"text_input": TEXT, "max_tokens": 6, "exclude_input_in_output": True, "return_perf_metrics": True, **values}
    status, reply = post(server.http_url, "generate", body)
    assert status == 200, reply
    answer: dict[str, Any] = reply
    return answer


def clear(server: Any, token: str) -> tuple[int, Any]:
    return post(server.http_url, "generate", {"text_input": "", "admin": "clear_caches", "admin_token": token})


def test_a_prompt_is_computed_once_a_tenant_and_an_admin_clears_it(small_server: Any) -> None:
    answers = [generate(small_server, cache_salt=salt) for salt in ("a", "a", "b")]
    cached = [answer["num_cached_tokens"] for answer in answers]
    assert (cached[0], cached[2]) == (0, 0)
    assert cached[1] > 50
    assert len({answer["text_output"] for answer in answers}) == 1
    assert not any(answer["is_cached_response"] for answer in answers)
    wait_until(lambda: metrics(small_server)['tandem_cache_hits_total{cache="prefix"}'] > 0)
    assert metrics(small_server)["tandem_prefix_cache_bytes"] > 0
    status, reply = clear(small_server, "not the token")
    assert status == 400
    assert "[INVALID_ARG] admin_token: is not this model's" in reply["error"]
    status, reply = clear(small_server, ADMIN_TOKEN)
    assert status == 200
    assert json.loads(reply["text_output"])["prefix"] >= 4
    again = generate(small_server, cache_salt="a")
    assert (again["num_cached_tokens"], again["text_output"]) == (0, answers[0]["text_output"])


def test_a_server_without_a_token_takes_no_admin_requests(server: Any) -> None:
    status, reply = clear(server, "")
    assert status == 400
    assert "[INVALID_ARG] admin: this model takes no admin requests" in reply["error"]


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TritonServer, dict[str, Any]]]:
    """A server over the disk cache of one before it, and an answer of that one."""
    folder = tmp_path_factory.mktemp("restarted")
    repository = small_repository(folder / "repository", disk_cache=str(folder / "disk"))
    with TritonServer(repository, log_path=folder / "first.log") as server:
        first = generate(server, cache_salt="a")
    assert list((folder / "disk").glob("*.safetensors"))
    with running_server(repository, log_path=folder / "second.log") as server:
        yield server, first


@pytest.mark.timeout(180)
def test_a_restarted_server_resumes_from_disk(restarted: tuple[TritonServer, dict[str, Any]]) -> None:
    server, first = restarted
    answers = [generate(server, cache_salt=salt) for salt in ("a", "b")]
    assert (first["num_cached_tokens"], answers[1]["num_cached_tokens"]) == (0, 0)
    assert answers[0]["num_cached_tokens"] > 50
    assert [answer["text_output"] for answer in answers] == [first["text_output"]] * 2
    wait_until(lambda: metrics(server)['tandem_cache_hits_total{cache="disk"}'] > 0)
    assert metrics(server)["tandem_disk_cache_bytes"] > 0
    assert metrics(server)["tandem_disk_cache_bad_files_total"] == 0


@pytest.mark.timeout(180)
def test_the_metrics_of_dashboard_and_alerts_are_all_there(restarted: tuple[TritonServer, dict[str, Any]]) -> None:
    """With the labels that they ask for; on this server, because it has a disk cache too."""
    server, _ = restarted
    generate(server, cache_salt="c", max_tokens=64)
    wait_until(lambda: "tandem_accepted_draft_tokens_total{" in metrics_page(server))
    page = metrics_page(server)
    assert unanswered(page) == set()
    assert unanswered(page.replace("tandem_num_queued", "tandem_renamed")) == {"tandem_num_queued[]"}
