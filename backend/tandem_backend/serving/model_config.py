# SPDX-License-Identifier: Apache-2.0
"""What config.pbtxt must and must not say, and what of it configures the engine."""

from collections.abc import Mapping
from typing import Any

from tandem_backend.config import EngineConfig
from tandem_backend.errors import ConfigError

# Triton server fills it in when the field is absent: far too short for a chat.
TRITON_DEFAULT_IDLE_US = 1_000_000
METRICS_PARAMETER = "REPORT_CUSTOM_METRICS"  # the name that vLLM's backend gave it
SWITCH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def check_model_config(config: Mapping[str, Any]) -> None:
    """Refuse a config.pbtxt of `tandem` under which sequences or streams would not work.

    `config` is Triton's model configuration as JSON. Raises ConfigError naming the field.
    """
    batching = config.get("sequence_batching")
    if not batching or "oldest" not in batching:
        raise ConfigError("config.pbtxt: sequence_batching: must be there with the strategy `oldest`")
    if batching.get("control_input"):
        raise ConfigError(
            "config.pbtxt: sequence_batching.control_input: must be absent; the model reads the sequence id and its "
            "flags from the request, and control inputs fail with text ids"
        )
    if batching["oldest"].get("preserve_ordering"):
        raise ConfigError(
            "config.pbtxt: sequence_batching.oldest.preserve_ordering: must be absent or false; "
            "it makes each sequence wait for all earlier ones"
        )
    if _idle_us(config) in (0, TRITON_DEFAULT_IDLE_US):
        raise ConfigError(
            "config.pbtxt: sequence_batching.max_sequence_idle_microseconds: must be set, and not to Triton server's "
            "default of 1 s, which ends a conversation between two questions; 300000000 is a good value"
        )
    if config.get("max_batch_size"):
        raise ConfigError(
            f"config.pbtxt: max_batch_size: must be 0, got {config['max_batch_size']}; the engine batches by itself"
        )
    if not config.get("model_transaction_policy", {}).get("decoupled"):
        raise ConfigError("config.pbtxt: model_transaction_policy.decoupled: must be true; responses are streamed")


def engine_overrides(config: Mapping[str, Any]) -> dict[str, Any]:
    """The engine.json keys that config.pbtxt sets: `parameters` of their names, and the idle time of sessions."""
    parameters = string_parameters(config)
    if "session_idle_s" in parameters:
        raise ConfigError(
            "config.pbtxt: parameters.session_idle_s: set sequence_batching.max_sequence_idle_microseconds instead, "
            "so that Triton server and the engine agree"
        )
    overrides: dict[str, Any] = {key: value for key, value in parameters.items() if key in EngineConfig.model_fields}
    return overrides | {"session_idle_s": _idle_us(config) / 1e6}


def reports_metrics(config: Mapping[str, Any]) -> bool:
    """Whether REPORT_CUSTOM_METRICS is on, as it is by default. Raises ConfigError for what is neither on nor off."""
    value = string_parameters(config).get(METRICS_PARAMETER, "true")
    if value.lower() not in SWITCH:
        raise ConfigError(f"config.pbtxt: parameters.{METRICS_PARAMETER}: must be true or false, got {value!r}")
    return SWITCH[value.lower()]


def string_parameters(config: Mapping[str, Any]) -> dict[str, str]:
    """`parameters` of config.pbtxt by name."""
    return {key: value["string_value"] for key, value in config.get("parameters", {}).items()}


def _idle_us(config: Mapping[str, Any]) -> int:
    return int(config["sequence_batching"].get("max_sequence_idle_microseconds", 0))
