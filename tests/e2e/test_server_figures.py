# SPDX-License-Identifier: Apache-2.0
"""What a real Triton server tells about a request and about itself; and that drafting can be turned off."""

import http.client
import json
import re
import time
from collections.abc import Callable, Iterator
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
    request = {"text_input": PROMPT, "max_tokens": 24, "sampling_parameters": EXACTLY, "return_perf_metrics": True}
    for model in ("tandem", "tandem_generate"):
        stream.send(model, model=model, **request, **FULL_ANSWER)
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


def _metrics(server: Any) -> dict[str, float]:
    """Our metrics of the model `tandem` as "name" or "name value" of the label that goes beyond model and version."""
    connection = http.client.HTTPConnection(server.metrics_url, timeout=10)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    found = {}
    for name, labels, value in re.findall(r"^(tandem_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        values = dict(re.findall(r'(\w+)="(.*?)"', labels))
        assert (values.pop("model"), values.pop("version")) == ("tandem", "1")
        found[" ".join([name, *values.values()])] = float(value)
    return found


def _metrics_when(server: Any, condition: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    deadline_s = time.monotonic() + 10
    while not condition(metrics := _metrics(server)):
        assert time.monotonic() < deadline_s, metrics
        time.sleep(0.05)
    return metrics


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
    errors = "tandem_requests_total error"
    with pytest.raises(InferenceServerException, match="input_ids"):
        ask(server, input_ids=[-1], max_tokens=2)
    _metrics_when(server, lambda metrics: metrics[errors] > before[errors])


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
