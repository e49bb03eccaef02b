# SPDX-License-Identifier: Apache-2.0
"""Requests and responses as plain data, and their gRPC messages. Pure; shared by both transports."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import (
    deserialize_bytes_tensor,
    np_to_triton_dtype,
    serialize_byte_tensor,
    triton_to_np_dtype,
)

from tandem_client.errors import ConnectionFailedError, RequestTimeoutError, ServerError, TandemClientError
from tandem_client.payload import Payload, Tensor, read_json_tensor

SequenceId = int | str

# A proxy before several servers keeps requests of one value together.
SESSION_HEADER = "x-tandem-session"
# What of a prompt decides where it goes: so much that conversations differ in it, and so little that it stays the same
# when one grows.
_NUM_KEY_BYTES = 512
_NUM_KEY_IDS = 128

# gRPC status names that Triton server spells in another way.
_TRITON_CODES = {"INVALID_ARGUMENT": "INVALID_ARG", "UNIMPLEMENTED": "UNSUPPORTED"}


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest:
    """A payload and where it goes: a model, a sequence, and the place in that sequence.

    session: what keeps its turns on one server behind a proxy, where that is not the sequence's id.
    """

    model: str
    request_id: str
    sequence_id: SequenceId
    sequence_start: bool
    sequence_end: bool
    payload: Payload
    session: SequenceId | None = None


@dataclass(frozen=True, slots=True)
class InferResponse:
    """One response: output tensors by name, and whether the server says that it is the request's last."""

    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    is_final: bool = False

    def scalar(self, name: str) -> Any:
        """The first element of output `name`; text is decoded. None where the output is absent or empty."""
        tensor = self.outputs.get(name)
        if tensor is None or tensor.size == 0:
            return None
        value = tensor.reshape(-1)[:1].tolist()[0]
        return value.decode("utf-8") if isinstance(value, bytes) else value

    def json(self, name: str) -> Any:
        """The JSON value in text output `name`; None where it is absent or empty."""
        text = self.scalar(name)
        return json.loads(text) if text else None


def encode(request: InferRequest) -> Any:
    """The ModelInferRequest of `request`; it asks for an empty final response, so that the end is always marked."""
    message = service_pb2.ModelInferRequest(model_name=request.model, id=request.request_id)
    if isinstance(request.sequence_id, str):
        message.parameters["sequence_id"].string_param = request.sequence_id
    else:
        message.parameters["sequence_id"].int64_param = request.sequence_id
    message.parameters["sequence_start"].bool_param = request.sequence_start
    message.parameters["sequence_end"].bool_param = request.sequence_end
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, tensor in request.payload.inputs.items():
        datatype = np_to_triton_dtype(tensor.dtype)
        message.inputs.add(name=name, datatype=datatype, shape=tensor.shape)
        message.raw_input_contents.append(
            serialize_byte_tensor(tensor).item() if datatype == "BYTES" else tensor.tobytes()
        )
    return message


def metadata(request: InferRequest) -> tuple[tuple[str, str], ...]:
    """gRPC metadata of `request`: the session's id, or for a request by itself a hash of how its prompt begins."""
    if request.sequence_start and request.sequence_end:
        return ((SESSION_HEADER, _prompt_key(request.payload)),)
    session = request.sequence_id if request.session is None else request.session
    return ((SESSION_HEADER, quote(str(session), safe="")),)


def conversation_key(messages: Sequence[Any]) -> str:
    """Equal for conversations that begin alike, as do the turns of one that is sent whole each time."""
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    # What comes before it, a system message, is often everybody's.
    end = roles.index("user") + 1 if "user" in roles else 1
    return _key(json.dumps(messages[:end]).encode())


def _prompt_key(payload: Payload) -> str:
    inputs = payload.inputs
    if "messages" in inputs:
        return conversation_key(read_json_tensor(inputs["messages"]))
    if "text_input" in inputs:
        return _key(bytes(inputs["text_input"][0])[:_NUM_KEY_BYTES])
    return _key(inputs["input_ids"][:_NUM_KEY_IDS].tobytes())


def _key(beginning: bytes) -> str:
    return hashlib.sha256(beginning).hexdigest()[:32]


def decode(message: Any) -> InferResponse:
    """The response in a ModelStreamInferResponse. Raises ServerError where it carries an error."""
    if message.error_message:
        raise ServerError.parse(message.error_message)
    response = message.infer_response
    # In one pass: tritonclient's InferResult looks for each output among all.
    outputs = {
        output.name: _tensor(output.datatype, raw).reshape(tuple(output.shape))
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }
    return InferResponse(outputs, is_final=is_last(message))


def _tensor(datatype: str, raw: bytes) -> Tensor:
    return deserialize_bytes_tensor(raw) if datatype == "BYTES" else np.frombuffer(raw, triton_to_np_dtype(datatype))


def is_last(message: Any) -> bool:
    """Whether a ModelStreamInferResponse is its request's last: it carries an error or the FINAL flag."""
    parameters = message.infer_response.parameters
    is_final = "triton_final_response" in parameters and parameters["triton_final_response"].bool_param
    return bool(message.error_message) or is_final


def translate_status(code: str, details: str, url: str) -> TandemClientError:
    """The client's exception for a stream that ended with gRPC status `code` (a name such as UNAVAILABLE)."""
    if code == "DEADLINE_EXCEEDED":
        return RequestTimeoutError("the answer was not complete within timeout_s")
    if code == "UNAVAILABLE" and not details.startswith("["):
        return ConnectionFailedError(f"{url}: {details}")
    return ServerError.parse(details, default_code=_TRITON_CODES.get(code, code))
