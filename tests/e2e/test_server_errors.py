# SPDX-License-Identifier: Apache-2.0
"""What a real Triton server with our models answers to requests that are wrong."""

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from triton_calls import CONTEXT_LEN, EXACTLY, FULL_ANSWER, PROMPT, Answer, GrpcStream, ask, post
from tritonclient.utils import InferenceServerException


@pytest.fixture
def stream(server: Any) -> Iterator[GrpcStream]:
    with GrpcStream(server.grpc_url) as opened:
        yield opened


BAD_REQUESTS = [
    ({"text_input": ""}, "INVALID_ARG", "text_input"),
    ({"input_ids": [40] * (CONTEXT_LEN + 1)}, "INVALID_ARG", str(CONTEXT_LEN)),
    ({"max_tokens": 5}, "INVALID_ARG", "exactly one of text_input, messages, input_ids"),
    ({"text_input": "x", "messages": "[]"}, "INVALID_ARG", "got text_input and messages"),
    ({"text_input": "x", "max_tokens": 0}, "INVALID_ARG", "max_tokens: "),
    ({"text_input": "x", "sampling_parameters": '{"max_tokens": 5'}, "INVALID_ARG", "sampling_parameters: not valid"),
    ({"text_input": "x", "sampling_parameters": '{"temperature": -0.7}'}, "INVALID_ARG", "temperature: must be 0"),
    ({"text_input": "x", "sampling_parameters": '{"drafter": "no-such"}'}, "INVALID_ARG", "drafter"),
    ({"text_input": "x", "stream": True, "exclude_input_in_output": False}, "INVALID_ARG", "exclude_input_in_output"),
    ({"input_ids": [99_999_999]}, "INVALID_ARG", "input_ids"),
    ({"messages": '[{"role": "user"'}, "INVALID_ARG", "messages: not valid JSON"),
    ({"text_input": b"\xff"}, "INVALID_ARG", "text_input: must be UTF-8"),
]


@pytest.mark.parametrize(("inputs", "code", "text"), BAD_REQUESTS)
def test_a_bad_request_says_what_is_wrong(server: Any, inputs: dict[str, Any], code: str, text: str) -> None:
    pattern = rf"\[{code}\] .*{re.escape(text)}"
    with GrpcStream(server.grpc_url) as stream:
        stream.send(**inputs)
        with pytest.raises(InferenceServerException, match=pattern):
            list(stream.responses())
        assert stream.answer(text_input=PROMPT, max_tokens=2).num_output_tokens == 2  # the stream lives on
    if any(isinstance(value, bytes) for value in inputs.values()):
        return  # JSON can't carry it
    for path in ("generate", "generate_stream"):
        status, reply = post(server.http_url, path, inputs)
        assert status == 400
        assert re.search(pattern, reply["error"] if path == "generate" else reply[0]["error"])


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ({"text_input": "x", "max_tokens": np.array([5])}, "INT64"),  # declared INT32
        ({"text_input": ["a", "b"]}, "shape"),
        ({"text_input": "x", "no_such_input": "y"}, "no_such_input"),
        ({"text_input": "x", "sequence": ("never started", "")}, "START"),
        ({"stop": True, "sequence": (0, "")}, "correlation ID"),
    ],
)
def test_what_triton_server_itself_refuses(stream: GrpcStream, request_: dict[str, Any], text: str) -> None:
    stream.send(**request_)
    with pytest.raises(InferenceServerException, match=text):
        list(stream.responses())


def test_errors_beside_a_stream_do_not_touch_it(server: Any) -> None:
    expected = ask(server, text_input=PROMPT, max_tokens=100, sampling_parameters=EXACTLY)
    with GrpcStream(server.grpc_url) as stream:
        stream.send(text_input=PROMPT, max_tokens=100, sampling_parameters=EXACTLY, stream=True, **FULL_ANSWER)
        responses = stream.responses()
        first = next(responses)
        for inputs, _, _ in BAD_REQUESTS:
            with pytest.raises(InferenceServerException):
                ask(server, **inputs)
        assert Answer([first, *responses]) == expected


def test_refusals_by_http_beside_many_streams(server: Any) -> None:
    """Error responses over BLS beside other streams once crashed Triton server within a few dozen of them."""
    url, deadline = server.http_url, time.monotonic() + 6
    results: list[tuple[int, Any]] = []

    def repeat(body: dict[str, Any]) -> None:
        while time.monotonic() < deadline:
            results.append(post(url, "generate", body))

    bodies = [{"text_input": ""}, *[{"text_input": PROMPT, "max_tokens": n} for n in (1, 2, 5, 20)]]
    threads = [threading.Thread(target=repeat, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [answer for status, answer in results if status == 400]
    assert len(refused) > 50
    assert all("[INVALID_ARG] text_input: must not be empty" in str(answer) for answer in refused)
    assert {status for status, _ in results} == {200, 400}
