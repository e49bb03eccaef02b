# SPDX-License-Identifier: Apache-2.0
"""priority and timeout_ms of a request, and the protocol's own timeout."""

import json
from typing import Any

import pytest
from fakes.pb_utils import InferenceRequest
from tandem_backend.errors import InvalidRequestError
from tandem_backend.serving.request import parse_request
from tandem_backend.types import Request


def parse(timeout_us: int = 0, **sampling: Any) -> Request:
    values = {"text_input": "x", "sampling_parameters": json.dumps(sampling)}
    request = parse_request(InferenceRequest.of(timeout_us=timeout_us, **values), "1").request
    assert request is not None
    return request


def test_without_a_word_a_request_has_middle_priority_and_no_deadline() -> None:
    assert (parse().priority, parse().timeout_ms) == (5, None)


def test_both_may_be_text_and_come_as_request_parameters() -> None:
    assert (parse(priority="1").priority, parse(timeout_ms="250").timeout_ms) == (1, 250)
    http = InferenceRequest.of(text_input="x", parameters='{"priority": 9, "timeout_ms": 5}')
    parsed = parse_request(http, "1")
    assert parsed.request is not None
    assert (parsed.request.priority, parsed.request.timeout_ms, parsed.ignored) == (9, 5, ())


def test_priority_0_is_the_default_as_in_triton_server() -> None:
    assert parse(priority=0).priority == 5


def test_the_protocols_timeout_is_one_unless_the_request_names_its_own() -> None:
    assert parse(timeout_us=1500).timeout_ms == 2
    assert parse(timeout_us=1500, timeout_ms=70).timeout_ms == 70
    assert parse(timeout_us=1 << 62).timeout_ms == 86_400_000


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"priority": 10}, "priority: .*less than or equal to 9, got 10"),
        ({"priority": -1}, "priority: .*greater than or equal to 0, got -1"),
        ({"priority": True}, "priority: must be a number, got True"),
        ({"timeout_ms": 0}, "timeout_ms: .*greater than or equal to 1, got 0"),
        ({"timeout_ms": 1.5}, "timeout_ms: .*integer.*, got 1.5"),
        ({"timeout_ms": 1 << 40}, "timeout_ms: .*less than or equal to 86400000"),
    ],
)
def test_wrong_values_are_refused_by_name(sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse(**sampling)
