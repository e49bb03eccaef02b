# SPDX-License-Identifier: Apache-2.0
"""The Triton model `tandem` from initialize() to finalize(), on a scripted engine."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.engine import ScriptedEngine, chunk
from fakes.pb_utils import InferenceRequest, Metric, TritonError, TritonModelException
from tandem_backend.config import EngineConfig
from tandem_backend.serving import model as model_module
from tandem_backend.serving.model import TritonPythonModel
from tandem_backend.serving.triton_errors import passed_error
from tandem_backend.types import FinishReason

SCRIPTS = {
    "short": [chunk("Hello "), chunk("world", finish_reason=FinishReason.STOP)],
    "endless": [chunk("a ")],
}


class Engine(ScriptedEngine):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(SCRIPTS)
        self.config = config


def arguments(folder: Path, **config: Any) -> dict[str, str]:
    (folder / "1").mkdir(exist_ok=True)
    (folder / "1" / "engine.json").write_text('{"checkpoint": "weights"}')
    values: dict[str, Any] = {
        "max_batch_size": 0,
        "model_transaction_policy": {"decoupled": True},
        "sequence_batching": {"max_sequence_idle_microseconds": 60_000_000, "oldest": {}},
        "parameters": {"max_active": {"string_value": "3"}},
    }
    return {
        "model_config": json.dumps(values | config),
        "model_repository": str(folder),
        "model_name": "tandem",
        "model_version": "1",
    }


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TritonPythonModel]:
    monkeypatch.setattr(model_module, "Engine", Engine)
    model = TritonPythonModel()
    model.initialize(arguments(tmp_path))
    yield model
    model.finalize()


def test_the_engine_is_configured_from_both_files(model: TritonPythonModel, tmp_path: Path) -> None:
    config = model._engine.config
    assert (config.checkpoint, config.max_active) == (tmp_path / "1" / "weights", 3)
    assert config.session_idle_s == 60.0


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"max_batch_size": 4}, "max_batch_size"),
        ({"parameters": {"max_active": {"string_value": "many"}}}, "max_active"),
        ({"parameters": {"REPORT_CUSTOM_METRICS": {"string_value": "maybe"}}}, "REPORT_CUSTOM_METRICS: .*'maybe'"),
    ],
)
def test_a_wrong_configuration_fails_the_load_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], field: str
) -> None:
    monkeypatch.setattr(model_module, "Engine", Engine)
    model = TritonPythonModel()
    with pytest.raises(TritonModelException, match=rf"\[INVALID_ARG\] .*{field}"):
        model.initialize(arguments(tmp_path, **config))
    model.finalize()


def test_requests_are_answered(model: TritonPythonModel) -> None:
    whole = InferenceRequest.of(text_input="short")
    streamed = InferenceRequest.of(text_input="short", stream=True, sequence_id="s", flags=1)
    model.execute([whole, streamed])
    assert [response.value("text_output") for response in whole.sender.wait()] == [["shortHello world"]]
    streamed.sender.wait()
    assert streamed.sender.text() == "Hello world"
    assert (whole.sender.num_finals, streamed.sender.num_finals) == (1, 1)


def test_draft_trees_are_asked_of_the_engine_and_told(model: TritonPythonModel) -> None:
    asks = InferenceRequest.of(text_input="short", return_draft_trees=True)
    does_not = InferenceRequest.of(text_input="short", return_draft_trees=False)
    model.execute([asks, does_not])
    (told,), (untold,) = asks.sender.wait(), does_not.sender.wait()
    assert json.loads(told.value("draft_trees")[0]) == {"tokens": [], "rounds": []}  # a script has no rounds
    assert untold.value("draft_trees") is None
    assert sorted(request.return_draft_trees for request in model._engine.requests.values()) == [False, True]


def test_clients_may_repeat_their_request_ids(model: TritonPythonModel) -> None:
    requests = [InferenceRequest.of(text_input="short") for _ in range(3)]
    model.execute(requests)
    for request in requests:
        request.sender.wait()
        assert request.sender.text() == "shortHello world"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"text_input": "short", "sampling_parameters": "{"}, "[INVALID_ARG] sampling_parameters: not valid JSON"),
        ({"text_input": ""}, "[INVALID_ARG] text_input: must not be empty"),
        ({}, "[INVALID_ARG] exactly one of"),
        ({"text_input": "short", "sequence_id": "s"}, "[INVALID_ARG] sequence_id: s is not known, send START"),
        ({"stop": True}, "[INVALID_ARG] stop: "),
    ],
)
def test_a_bad_request_gets_an_error_and_final(model: TritonPythonModel, values: dict[str, Any], message: str) -> None:
    request = InferenceRequest.of(**values)
    model.execute([request])
    (response,) = request.sender.wait()
    assert response.error().message().startswith(message)
    assert response.error().code() == "INVALID_ARG"


def admin(**values: Any) -> InferenceRequest:
    return InferenceRequest.of(text_input="", parameters=json.dumps({"admin": "clear_caches", **values}))


def test_an_admin_clears_the_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "Engine", Engine)
    model = TritonPythonModel()
    model.initialize(arguments(tmp_path, parameters={"admin_token": {"string_value": "swordfish"}}))
    right, wrong, none = admin(admin_token="swordfish"), admin(admin_token="swordfisj"), admin()
    model.execute([right, wrong, none])
    (response,) = right.sender.wait()
    assert json.loads(response.value("text_output")[0]) == {"prefix": 3, "response": 1}
    for request in (wrong, none):
        (response,) = request.sender.wait()
        assert response.error().message() == "[INVALID_ARG] admin_token: is not this model's"
    model.finalize()


def test_without_a_token_of_its_own_a_model_takes_no_admin_requests(model: TritonPythonModel) -> None:
    request = admin(admin_token="")
    model.execute([request])
    (response,) = request.sender.wait()
    assert response.error().message().startswith("[INVALID_ARG] admin: this model takes no admin requests")


def test_a_bug_in_front_of_the_engine_is_an_internal_error(
    model: TritonPythonModel, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    monkeypatch.setattr(model._engine, "prepare", lambda request: 1 / 0)
    request = InferenceRequest.of(text_input="short")
    model.execute([request])
    assert request.sender.wait()[0].error().code() == "INTERNAL"
    assert any("ZeroDivisionError" in line for line in log)


def test_unknown_parameters_leave_one_line_in_the_log(model: TritonPythonModel, log: list[str]) -> None:
    request = InferenceRequest.of(text_input="short", parameters='{"sequence_id": 5, "id": 1}')
    model.execute([request])
    request.sender.wait()
    assert log == ["unknown sampling parameters are ignored: sequence_id, id"]


def test_stop_ends_a_running_turn(model: TritonPythonModel) -> None:
    turn = InferenceRequest.of(text_input="endless", return_finish_reason=True, sequence_id=5, flags=1)
    stop = InferenceRequest.of(stop=True, return_finish_reason=True, sequence_id=5, flags=2)
    model.execute([turn])
    model.execute([stop])
    assert turn.sender.wait()[-1].value("finish_reason") == ["cancelled"]
    (answer,) = stop.sender.wait()
    assert (answer.value("text_output"), answer.value("finish_reason")) == ([""], ["cancelled"])


def test_an_error_comes_as_an_output_to_the_front(model: TritonPythonModel) -> None:
    refused = InferenceRequest.of(text_input="", parameters='{"tandem_error_as_output": true}')
    model.execute([refused])
    (response,) = refused.sender.wait()
    assert not response.has_error()
    error = passed_error(response)
    assert error.message() == "[INVALID_ARG] text_input: must not be empty"
    assert error.code() == TritonError.INVALID_ARG


def test_a_refused_turn_ends_its_sequence_all_the_same(model: TritonPythonModel) -> None:
    opened = InferenceRequest.of(text_input="short", sequence_id=7, flags=1)
    model.execute([opened])
    opened.sender.wait()
    refused = InferenceRequest.of(text_input="", sequence_id=7, flags=2)
    model.execute([refused])
    assert refused.sender.wait()[0].has_error()
    deadline = time.monotonic() + 5
    while model._engine.sessions and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not model._engine.sessions


def test_requests_are_counted_by_their_outcome(model: TritonPythonModel, registry: dict[str, Metric]) -> None:
    def count(outcome: str) -> float:
        name = f'tandem_requests_total{{model="tandem",version="1",outcome="{outcome}"}}'
        return registry[name].number if name in registry else -1

    requests = [InferenceRequest.of(text_input="short") for _ in range(3)]
    refused = InferenceRequest.of(text_input="")
    turn = InferenceRequest.of(text_input="endless", sequence_id=5, flags=1)
    stop = InferenceRequest.of(stop=True, sequence_id=5, flags=2)
    model.execute([*requests, refused, turn, stop])
    deadline = time.monotonic() + 10
    expected = {"stop": 3, "error": 1, "cancelled": 1, "length": 0}  # closing a sequence is no generation
    while {outcome: count(outcome) for outcome in expected} != expected:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_metrics_can_be_turned_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: dict[str, Metric]
) -> None:
    monkeypatch.setattr(model_module, "Engine", Engine)
    model = TritonPythonModel()
    model.initialize(arguments(tmp_path, parameters={"REPORT_CUSTOM_METRICS": {"string_value": "false"}}))
    request = InferenceRequest.of(text_input="short")
    model.execute([request])
    request.sender.wait()
    model.finalize()
    assert registry == {}


def test_unloading_answers_live_requests(model: TritonPythonModel) -> None:
    request = InferenceRequest.of(text_input="endless")
    model.execute([request])
    model.finalize()
    assert request.sender.wait()[-1].error().code() == "UNAVAILABLE"
    late = InferenceRequest.of(text_input="short")
    model.execute([late])
    assert late.sender.wait()[-1].error().code() == "UNAVAILABLE"


def test_each_request_is_logged_once_without_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_module, "Engine", Engine)
    model = TritonPythonModel()
    path = tmp_path / "1" / "requests.jsonl"
    model.initialize(arguments(tmp_path, parameters={"request_log": {"string_value": path.name}}))
    fine = InferenceRequest.of(sequence_id=3, flags=3, text_input="short", stream=True)
    refused = InferenceRequest.of(sequence_id=4, flags=3, text_input="short", max_tokens=0)
    model.execute([fine, refused])
    for request in (fine, refused):
        request.sender.wait()
    model.finalize()
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert {(line["sequence_id"], line["stream"], line["outcome"]) for line in lines} == {
        (3, True, "stop"),
        (4, False, "error"),
    }
    assert [line["error_field"] for line in lines if "error_field" in line] == ["max_tokens"]
    assert "short" not in path.read_text(encoding="utf-8")
    assert "outcome" not in capfd.readouterr().out
