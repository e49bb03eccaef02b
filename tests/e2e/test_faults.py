# SPDX-License-Identifier: Apache-2.0
"""Rounds that fail inside a real Triton server: who is told what, what goes on, and when the model is unready."""

import http.client
from typing import Any

import pytest
from small_server import FAULT, LIMITS
from triton_calls import EXACTLY, PROMPT, GrpcStream, ask, post, wait_until, wait_until_free
from tritonclient.utils import InferenceServerException

LONG = {"text_input": PROMPT, "max_tokens": 4000, "sampling_parameters": EXACTLY}
LOAD_S = 120.0
BAD = {"input_ids": [50, FAULT, 51], "max_tokens": 2}


def http_status(server: Any, path: str) -> int:
    connection = http.client.HTTPConnection(server.http_url, timeout=60)
    connection.request("GET", path)
    status = connection.getresponse().status
    connection.close()
    return status


def test_a_failed_round_ends_its_requests_and_the_next_one_is_fine(small_server: Any) -> None:
    expected = ask(small_server, text_input=PROMPT, max_tokens=8)
    pattern = r"\[INTERNAL\] the round failed: the fault that was asked for"
    with GrpcStream(small_server.grpc_url) as mate:
        mate.send(sequence=("mate", "S"), stream=True, **LONG)
        responses = mate.responses()
        next(responses)
        mate.send("queued", sequence=("mate", ""), text_input="more", max_tokens=2)
        with pytest.raises(InferenceServerException, match=pattern):
            ask(small_server, **BAD)
        for _ in range(2):  # the mate's and its queued turn's, in either order
            with pytest.raises(InferenceServerException, match=r"\[INTERNAL\] .*the round failed"):
                list(responses) or list(mate.responses("queued"))
        with pytest.raises(InferenceServerException, match=r"\[INVALID_ARG\] sequence_id: no open sequence"):
            ask(small_server, text_input="more", sequence=("mate", "E"))
    wait_until_free(small_server)
    assert ask(small_server, text_input=PROMPT, max_tokens=8) == expected
    status, reply = post(small_server.http_url, "generate", BAD)
    assert (status, "[INTERNAL] the round failed" in reply["error"]) == (400, True)
    assert ask(small_server, text_input=PROMPT, max_tokens=8) == expected


def test_failures_in_a_row_make_the_model_unready_and_a_load_cures_it(reloaded_server: Any) -> None:
    expected = ask(reloaded_server, text_input=PROMPT, max_tokens=8)
    for _ in range(LIMITS["max_failed_rounds"]):
        with pytest.raises(InferenceServerException, match=r"\[INTERNAL\] the round failed"):
            ask(reloaded_server, **BAD)
    wait_until(lambda: http_status(reloaded_server, "/v2/models/tandem/ready") == 400)
    with pytest.raises(InferenceServerException):
        ask(reloaded_server, text_input=PROMPT, max_tokens=8)
    status, _ = post(reloaded_server.http_url, "generate", {"text_input": PROMPT})
    assert status == 400
    reloaded_server.api.load("tandem", LOAD_S)
    assert ask(reloaded_server, text_input=PROMPT, max_tokens=8) == expected
