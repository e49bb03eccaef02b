# SPDX-License-Identifier: Apache-2.0
"""A config.pbtxt that breaks sequences or streams is refused by the name of its field."""

from typing import Any

import pytest
from tandem_backend.errors import ConfigError
from tandem_backend.serving.model_config import check_model_config, engine_overrides


def config(**batching: Any) -> dict[str, Any]:
    """What Triton server hands to the model for our config.pbtxt, as far as it matters."""
    return {
        "max_batch_size": 0,
        "model_transaction_policy": {"decoupled": True},
        "sequence_batching": {
            "max_sequence_idle_microseconds": 300_000_000,
            "control_input": [],
            "oldest": {"max_candidate_sequences": 256, "preserve_ordering": False},
            **batching,
        },
        "parameters": {},
    }


def test_ours_is_accepted() -> None:
    check_model_config(config())


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"max_batch_size": 8}, "max_batch_size: must be 0, got 8"),
        ({"model_transaction_policy": {"decoupled": False}}, "model_transaction_policy.decoupled"),
        ({"sequence_batching": None}, "sequence_batching: .*oldest"),
        ({"sequence_batching": {"direct": {}}}, "sequence_batching: .*oldest"),
        (config(control_input=[{"name": "START"}]), "sequence_batching.control_input"),
        (config(oldest={"preserve_ordering": True}), "sequence_batching.oldest.preserve_ordering"),
        (config(max_sequence_idle_microseconds=1_000_000), "sequence_batching.max_sequence_idle_microseconds"),
        (config(max_sequence_idle_microseconds=0), "sequence_batching.max_sequence_idle_microseconds"),
    ],
)
def test_a_harmful_setting_is_refused(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"config\.pbtxt: {field}"):
        check_model_config(config() | changed)


def test_parameters_of_engine_keys_and_the_idle_time_override_engine_json() -> None:
    parameters = {"max_active": {"string_value": "16"}, "FORCE_CPU_ONLY_INPUT_TENSORS": {"string_value": "yes"}}
    assert engine_overrides(config() | {"parameters": parameters}) == {"max_active": "16", "session_idle_s": 300.0}


def test_the_idle_time_has_one_place() -> None:
    parameters = {"session_idle_s": {"string_value": "60"}}
    with pytest.raises(ConfigError, match=r"parameters\.session_idle_s: set .*max_sequence_idle_microseconds"):
        engine_overrides(config() | {"parameters": parameters})
