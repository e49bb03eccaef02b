# SPDX-License-Identifier: Apache-2.0
"""What a real Triton server tells about a request and about itself; and that drafting can be turned off."""

import http.client
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from triton_calls import EXACTLY, FULL_ANSWER, PROMPT, Answer, GrpcStream, ask, post
from tritonclient.utils import InferenceServerException

NUM_AT_ONCE = 72


@pytest.fixture
def stream(server: Any) -> Iterator[GrpcStream]:
    with GrpcStream(server.grpc_url) as opened:
        yield opened


def test_a_request_tells_what_it_cost(stream: GrpcStream) -> None:
    request = {"max_tokens": 24, "sampling_parameters": EXACTLY, "return_perf_metrics": True}
    for model in ("tandem", "tandem_generate"):
        prompt = f"def cost_of_{model}(request):\n"  # which nothing else has brought into the prefix cache
        stream.send(model, model=model, text_input=prompt, **request, **FULL_ANSWER)
        (answer,) = stream.responses(model)
        assert 1 <= answer.num_rounds <= 24
        assert 1 <= answer.acceptance_length <= 24
        assert answer.num_cached_tokens == 0
        drafters = json.loads(answer.drafter_statistics)
        assert sum(item["drafted"] for item in drafters.values()) == answer.total_draft_tokens
        assert sum(item["accepted"] for item in drafters.values()) == answer.total_accepted_draft_tokens


def test_draft_off_drafts_nothing_and_gives_the_same_text(server: Any) -> None:
    body = {"text_input": PROMPT, "max_tokens": 24, "ignore_eos": True, "return_perf_metrics": True}
    status, plain = post(server.http_url, "generate", body | {"draft": False})
    assert status == 200
    assert (plain["total_draft_tokens"], plain["acceptance_length"], plain["drafter_statistics"]) == (0, 1.0, "{}")
    drafted = post(server.http_url, "generate", body | {"draft": "on"})[1]
    assert drafted["text_output"] == plain["text_output"]
    status, refused = post(server.http_url, "generate", body | {"draft": "off", "drafter": "lookup"})
    assert (status, "draft: is off, but drafter is 'lookup'" in refused["error"]) == (400, True)


def test_a_stop_token_outside_the_vocabulary_harms_nobody(server: Any) -> None:
    request = {"text_input": PROMPT, "max_tokens": 40, "sampling_parameters": EXACTLY}
    expected = ask(server, **request)
    with GrpcStream(server.grpc_url) as neighbour:
        neighbour.send(stream=True, **request, **FULL_ANSWER)
        responses = neighbour.responses()
        first = next(responses)
        bad = json.dumps({"stop_token_ids": [10**7], "min_tokens": 10})
        with pytest.raises(InferenceServerException, match=r"stop_token_ids: .*got 10000000"):
            ask(server, text_input=PROMPT, max_tokens=20, sampling_parameters=bad)
        assert Answer([first, *responses]) == expected


def _metrics_text(server: Any) -> str:
    connection = http.client.HTTPConnection(server.metrics_url, timeout=10)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return text


def _metrics(server: Any) -> dict[str, float]:
    """Our metrics of the model `tandem` as "name" or "name value" of the label that goes beyond model and version."""
    found = {}
    for name, labels, value in re.findall(r"^(tandem_\w+)\{(.*)\} (\S+)$", _metrics_text(server), re.MULTILINE):
        values = dict(re.findall(r'(\w+)="(.*?)"', labels))
        model = values.pop("model")
        assert values.pop("version") == "1"
        if model == "tandem_generate":
            assert name == "tandem_heartbeat_timestamp_seconds"  # all that the front has
            continue
        assert model == "tandem"
        found[" ".join([name, *values.values()])] = float(value)
    return found


def _metrics_when(server: Any, condition: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """The page after the first for which it holds: that one may have been read while its metrics were written."""
    deadline_s = time.monotonic() + 10
    while not condition(metrics := _metrics(server)):
        assert time.monotonic() < deadline_s, metrics
        time.sleep(0.05)
    return _metrics(server)


def test_metrics_show_the_engine_and_its_work(server: Any) -> None:
    length = "tandem_requests_total length"
    before = _metrics_when(server, lambda metrics: bool(metrics) and metrics["tandem_num_active"] == 0)
    time.sleep(0.3)  # ends of earlier tests are reported
    before = _metrics(server)
    ask(server, text_input=PROMPT, max_tokens=40, sampling_parameters=EXACTLY)
    after = _metrics_when(server, lambda metrics: metrics[length] > before[length])
    assert after["tandem_self_test_passed"] == 1
    assert after["tandem_self_test_rows"] >= 90
    assert 0 < after["tandem_num_free_blocks"] <= after["tandem_num_blocks"]
    assert after["tandem_num_active"] == after["tandem_num_queued"] == 0
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown[length] == 1
    assert grown["tandem_output_tokens_total"] == 40
    assert 1 < grown["tandem_rounds_total"] <= 41
    for drafter in ("lookup", "mtp"):
        drafted, accepted = (grown[f"tandem_{kind}draft_tokens_total {drafter}"] for kind in ("", "accepted_"))
        assert 0 <= accepted <= drafted
    assert grown["tandem_inter_token_seconds_count"] == 39
    assert grown["tandem_acceptance_length_tokens_sum"] == 39
    assert grown["tandem_round_seconds_count"] == grown["tandem_rounds_total"]
    for name in ("time_to_first_token_seconds", "queue_seconds", "request_seconds", "request_output_tokens"):
        assert grown[f"tandem_{name}_count"] == grown[f"tandem_{name}_bucket +Inf"] == 1
    assert after["tandem_heartbeat_timestamp_seconds"] == pytest.approx(time.time(), abs=20)
    errors = "tandem_requests_total error"
    with pytest.raises(InferenceServerException, match="input_ids"):
        ask(server, input_ids=[-1], max_tokens=2)
    _metrics_when(server, lambda metrics: metrics[errors] > before[errors])


def test_dashboards_of_other_servers_find_their_names(server: Any) -> None:
    ask(server, text_input=PROMPT, max_tokens=8, sampling_parameters=EXACTLY)
    count = "vllm:request_generation_tokens_count"
    text = _metrics_text(server)
    while f"{count}{{" not in text:
        time.sleep(0.05)
        text = _metrics_text(server)
    names = ("prompt_tokens_total", "generation_tokens_total", "num_requests_running", "kv_cache_usage_perc")
    families = ("time_to_first_token_seconds", "time_per_output_token_seconds", "e2e_request_latency_seconds")
    for name in (*names, *(f"{family}_bucket" for family in families)):
        assert re.search(rf'^vllm:{name}{{.*model="tandem".*}} \S+$', text, re.MULTILINE), name
    blocks = dict(re.findall(r'^nv_trt_llm_kv_cache_block_metrics{.*type="(\w+)".*} (\S+)$', text, re.MULTILINE))
    assert set(blocks) == {"used", "free", "max", "tokens_per", "fraction"}
    assert float(blocks["used"]) + float(blocks["free"]) == float(blocks["max"]) > 0


def test_every_request_is_logged_once(server: Any, server_log: Path) -> None:
    ask(server, text_input=PROMPT, max_tokens=5, sampling_parameters=EXACTLY, request_id="to be logged")
    deadline_s = time.monotonic() + 10
    while not (lines := _logged(server_log, "to be logged")):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    (entry,) = lines
    assert (entry["outcome"], entry["num_output_tokens"], entry["stream"]) == ("length", 5, True)
    assert "read_lines" not in json.dumps(entry)


def _logged(path: Path, request_id: str) -> list[dict[str, Any]]:
    entries = re.findall(r'^\{"time": .*\}$', path.read_text(encoding="utf-8"), re.MULTILINE)
    return [entry for entry in map(json.loads, entries) if entry["request_id"] == request_id]


def test_the_engine_sees_all_requests_of_the_front_at_once(server: Any) -> None:
    """It runs 32; as many again would be forwarded by the server's own number of threads."""
    connections = []
    body = {"text_input": PROMPT, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    for _ in range(NUM_AT_ONCE):
        connection = http.client.HTTPConnection(server.http_url, timeout=30)
        connection.request("POST", "/v2/models/tandem_generate/generate_stream", json.dumps(body))
        connections.append(connection)
    try:
        _metrics_when(server, lambda m: m["tandem_num_active"] + m["tandem_num_queued"] == NUM_AT_ONCE)
    finally:
        for connection in connections:
            connection.close()
    _metrics_when(server, lambda m: m["tandem_num_active"] + m["tandem_num_queued"] == 0)
