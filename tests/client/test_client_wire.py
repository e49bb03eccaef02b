# SPDX-License-Identifier: Apache-2.0
"""gRPC messages and statuses."""

from typing import Any

import numpy as np
import pytest
from tandem_client import ConnectionFailedError, RequestTimeoutError, ServerError
from tandem_client.payload import build_payload
from tandem_client.sequence import SequenceState, one_shot
from tandem_client.transport import check_url
from tandem_client.wire import InferRequest, SequenceId, decode, encode, metadata, translate_status
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor


def request(sequence_id: SequenceId) -> InferRequest:
    return InferRequest(
        model="tandem",
        request_id="r1",
        sequence_id=sequence_id,
        sequence_start=True,
        sequence_end=False,
        payload=build_payload(messages=[{"role": "user", "content": "é"}], enable_thinking=True),
    )


def test_encode_writes_sequence_flags_and_tensors() -> None:
    message = encode(request("s1"))
    assert (message.model_name, message.id) == ("tandem", "r1")
    assert message.parameters["sequence_id"].string_param == "s1"
    assert message.parameters["sequence_start"].bool_param is True
    assert message.parameters["sequence_end"].bool_param is False
    assert message.parameters["triton_enable_empty_final_response"].bool_param is True
    contents = {
        tensor.name: (tensor.datatype, list(tensor.shape), raw)
        for tensor, raw in zip(message.inputs, message.raw_input_contents, strict=True)
    }
    assert contents["enable_thinking"] == ("BOOL", [1], b"\x01")
    datatype, shape, raw = contents["messages"]
    assert (datatype, shape) == ("BYTES", [1])
    assert deserialize_bytes_tensor(raw).tolist() == [b'[{"role": "user", "content": "\\u00e9"}]']


def test_encode_keeps_an_integer_sequence_id_an_integer() -> None:
    assert encode(request(42)).parameters["sequence_id"].int64_param == 42


def test_decode_reads_tensors_and_the_final_mark() -> None:
    message = service_pb2.ModelStreamInferResponse()
    message.infer_response.outputs.add(name="token_ids", datatype="INT32", shape=[2])
    message.infer_response.raw_output_contents.append(np.array([4, 5], dtype=np.int32).tobytes())
    message.infer_response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
    message.infer_response.raw_output_contents.append(b"\x02\x00\x00\x00\xc3\xa9")
    response = decode(message)
    assert response.outputs["token_ids"].tolist() == [4, 5]
    assert response.scalar("text_output") == "é"
    assert response.scalar("absent") is None
    assert not response.is_final
    message.infer_response.parameters["triton_final_response"].bool_param = True
    assert decode(message).is_final


def test_decode_raises_the_error_of_a_response() -> None:
    with pytest.raises(ServerError) as caught:
        decode(service_pb2.ModelStreamInferResponse(error_message="[UNAVAILABLE] queue full\n(2 lines)"))
    assert (caught.value.code, caught.value.message) == ("UNAVAILABLE", "queue full\n(2 lines)")


def test_a_message_without_code_is_unknown() -> None:
    assert ServerError.parse("[sic] no code").code == "UNKNOWN"
    assert str(ServerError.parse("no model")) == "[UNKNOWN] no model"


def test_a_full_queue_says_when_to_retry() -> None:
    full = ServerError.parse("[UNAVAILABLE] the queue is full (2 waiting, 2 running); retry after 12 s")
    assert (full.code, full.retry_after_s) == ("UNAVAILABLE", 12)
    assert ServerError.parse("[UNAVAILABLE] the model is being unloaded").retry_after_s is None


def test_statuses_become_exceptions() -> None:
    lost = translate_status("UNAVAILABLE", "Socket closed", "host:1")
    assert isinstance(lost, ConnectionFailedError)
    assert str(lost) == "host:1: Socket closed"
    assert isinstance(translate_status("DEADLINE_EXCEEDED", "", "host:1"), TimeoutError)
    assert isinstance(translate_status("DEADLINE_EXCEEDED", "", "host:1"), RequestTimeoutError)
    refused = translate_status("INVALID_ARGUMENT", "bad shape", "host:1")
    assert isinstance(refused, ServerError)
    assert refused.code == "INVALID_ARG"
    full = translate_status("UNAVAILABLE", "[UNAVAILABLE] queue full", "host:1")
    assert isinstance(full, ServerError)
    assert full.message == "queue full"


@pytest.mark.parametrize("url", ["127.0.0.1:8001", "host.example:1", "[::1]:8001"])
def test_a_good_url(url: str) -> None:
    assert check_url(url) == url


@pytest.mark.parametrize("url", ["http://127.0.0.1:8001", "localhost", ":8001", "host:", "host:x", ""])
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="url: must be host:port"):
        check_url(url)


def _header(request: InferRequest) -> str:
    ((name, value),) = metadata(request)
    assert name == "x-tandem-session"
    assert value.isascii()
    return value


def _alone(**prompt: Any) -> str:
    return _header(one_shot("tandem", build_payload(**prompt)))


def test_the_session_header_is_the_sequence_s_id() -> None:
    payload = build_payload("x")
    assert _header(SequenceState("tandem", "chat-1").turn(payload)) == "chat-1"
    assert _header(SequenceState("tandem", 7).turn(payload)) == "7"
    assert _header(SequenceState("tandem", "Größe/1\n").turn(payload)) == "Gr%C3%B6%C3%9Fe%2F1%0A"
    turned = SequenceState("tandem", "chat-1")
    turned.turn(payload)
    end = turned.end()
    assert end is not None
    assert _header(end) == "chat-1"
    assert _header(SequenceState("tandem", "chat-1", route="here").turn(payload)) == "here"


def test_requests_by_themselves_go_together_when_their_prompts_begin_alike() -> None:
    system, question = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a tuple?"}
    later = [{"role": "assistant", "content": "A sequence."}, {"role": "user", "content": "And a list?"}]
    first = _alone(messages=[system, question])
    assert _alone(messages=[system, question, *later]) == first
    assert _alone(messages=[system, {"role": "user", "content": "What is a list?"}]) != first
    assert _alone(messages=[{"role": "system", "content": "x"}]) != _alone(messages=[])
    text = "def read_lines(path):\n" * 40
    assert _alone(prompt=text) == _alone(prompt=text + "more")
    assert _alone(prompt=text) != _alone(prompt="# " + text)
    ids = list(range(200))
    assert _alone(input_ids=ids) == _alone(input_ids=[*ids, 5])
    assert _alone(input_ids=ids) != _alone(input_ids=[5, *ids])
