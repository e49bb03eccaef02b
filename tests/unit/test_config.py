# SPDX-License-Identifier: Apache-2.0
"""engine.json: what is not exactly of a key's type and range is refused by its name."""

import json
from pathlib import Path
from typing import Any

import pytest
from tandem_backend.config import load_engine_config
from tandem_backend.errors import ConfigError


def load(folder: Path, overrides: dict[str, Any] | None = None, **values: Any) -> Any:
    path = folder / "engine.json"
    path.write_text(json.dumps({"checkpoint": "weights"} | values))
    return load_engine_config(path, overrides)


def test_paths_are_of_the_folder_and_lists_become_tuples(tmp_path: Path) -> None:
    config = load(tmp_path, drafters=["lookup"], session_idle_s=60, draft_model="/models/draft")
    assert config.checkpoint == tmp_path / "weights"
    assert (config.drafters, config.session_idle_s) == (("lookup",), 60.0)
    assert config.draft_model == Path("/models/draft")


def test_parameters_of_config_pbtxt_are_text(tmp_path: Path) -> None:
    assert load(tmp_path, {"max_active": "3", "router": "always"}).max_active == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_active": True}, "max_active: .*integer.*, got True"),
        ({"max_active": "16"}, "max_active: .*integer.*, got '16'"),
        ({"max_active": 16.0}, "max_active: .*integer.*, got 16.0"),
        ({"max_active": 0}, "max_active: .*greater than or equal to 1, got 0"),
        ({"session_idle_s": True}, "session_idle_s: .*number.*, got True"),
        ({"session_idle_s": "5"}, "session_idle_s: .*number.*, got '5'"),
        ({"queue_timeout_s": -1}, "queue_timeout_s: .*greater than or equal to 0, got -1"),
        ({"drafters": "lookup"}, "drafters: .*got 'lookup'"),
        ({"checkpoint": 5}, "checkpoint: .*got 5"),
        ({"max_activ": 5}, "max_activ: unknown key; allowed are checkpoint, "),
        ({"max_active": 0, "max_queued": "x"}, "max_active: .*; max_queued: "),
    ],
)
def test_wrong_values_are_refused_by_name(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{tmp_path}/engine.json: {message}"):
        load(tmp_path, **values)


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("[]", "must be a JSON object, got list")])
def test_what_is_no_object_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "engine.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_engine_config(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.json: can't be read"):
        load_engine_config(tmp_path / "engine.json")
