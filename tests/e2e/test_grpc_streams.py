# SPDX-License-Identifier: Apache-2.0
"""What gRPC clients may choose: many requests on one stream, no empty last response."""

from collections.abc import Iterator
from typing import Any

import pytest
from triton_calls import EXACTLY, FULL_ANSWER, PROMPT, Answer, GrpcStream, ask
from tritonclient.utils import InferenceServerException


@pytest.fixture
def stream(server: Any) -> Iterator[GrpcStream]:
    with GrpcStream(server.grpc_url) as opened:
        yield opened


def test_requests_of_one_stream_are_told_apart(server: Any, stream: GrpcStream) -> None:
    prompts = {str(n): f"def function_{n}():\n" for n in range(6)}
    for request_id, prompt in prompts.items():
        stream.send(request_id, text_input=prompt, max_tokens=12, stream=True, **FULL_ANSWER)
    answers = {request_id: Answer(list(stream.responses(request_id))) for request_id in reversed(prompts)}
    assert answers == {request_id: ask(server, text_input=text, max_tokens=12) for request_id, text in prompts.items()}


@pytest.mark.parametrize("model", ["tandem", "tandem_generate"])
def test_without_the_empty_final_response(server: Any, stream: GrpcStream, model: str) -> None:
    request = {"text_input": PROMPT, "max_tokens": 12, "sampling_parameters": EXACTLY}
    stream.send(model=model, empty_final=False, stream=True, **request, **FULL_ANSWER)
    responses = []
    while not responses or responses[-1].finish_reason == "None":
        responses += stream.responses_of_one_message()
    assert Answer(responses) == ask(server, **request)
    assert stream.answer(request_id="next", text_input=PROMPT, max_tokens=2).num_output_tokens == 2


def test_an_error_ends_its_request_and_not_the_stream(stream: GrpcStream) -> None:
    stream.send(text_input="")
    with pytest.raises(InferenceServerException) as info:
        list(stream.responses())
    assert info.value.status() is None
    assert stream.answer(request_id="next", text_input=PROMPT, max_tokens=2).num_output_tokens == 2
