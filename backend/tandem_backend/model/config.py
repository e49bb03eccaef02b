# SPDX-License-Identifier: Apache-2.0
"""ModelConfig: what the decoder needs to know of a checkpoint, read from config.json of any supported family."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tandem_backend.errors import CheckpointError

LayerKind = Literal["attention", "delta"]

MAX_CONV_TAPS = 16  # of the convolution kernels


@dataclass(frozen=True, slots=True)
class Family:
    """What a model_type implies and config.json does not say."""

    layout: Literal["plain", "qwen3_next", "qwen3_5", "qwen3_5_nested"]
    text_key: str | None = None  # config.json's section of the language model
    is_hybrid: bool = False  # some layers are Gated DeltaNet; gated attention; zero-centred norms
    has_qk_norm: bool = False
    default_partial_rotary: float = 1.0


FAMILIES = {
    "llama": Family("plain"),
    "qwen3": Family("plain", has_qk_norm=True),
    "qwen3_next": Family("qwen3_next", is_hybrid=True, has_qk_norm=True, default_partial_rotary=0.25),
    "qwen3_5": Family(
        "qwen3_5_nested", text_key="text_config", is_hybrid=True, has_qk_norm=True, default_partial_rotary=0.25
    ),
    "qwen3_5_text": Family("qwen3_5", is_hybrid=True, has_qk_norm=True, default_partial_rotary=0.25),
}


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Sizes of the Gated DeltaNet layers."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_taps: int

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder, family differences resolved."""

    model_type: str
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_kinds: tuple[LayerKind, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    rotary_dim: int
    rope_scaling: dict[str, float] | None  # Llama 3's numbers
    max_position: int
    tie_embeddings: bool
    delta: DeltaConfig | None
    num_mtp_layers: int
    eos_token_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)


class _Reader:
    """Typed access to a section of config.json; errors name the file and the key."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values, self.path = values, path

    def number(self, key: str, default: float | None = None, minimum: float = 0) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value < minimum:
            raise CheckpointError(f"{self.path}: {key} must be a number of at least {minimum}, got {value!r}")
        return value

    def count(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.number(key, default, minimum)
        if not isinstance(value, int):
            raise CheckpointError(f"{self.path}: {key} must be an integer, got {value!r}")
        return value

    def section(self, key: str) -> Mapping[str, Any]:
        """An object inside this one; empty when absent."""
        value = self.values.get(key) or {}
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self.path}: {key} must be an object, got {value!r}")
        return value

    def entries(self, key: str, kind: type) -> list[Any]:
        """A list of `kind`; empty when absent."""
        value = self.values.get(key) or []
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise CheckpointError(f"{self.path}: {key} must be a list of {kind.__name__}, got {value!r}")
        return value

    def refuse(self, key: str, allowed: tuple[Any, ...]) -> None:
        value = self.values.get(key, allowed[0])
        if value not in allowed:
            listed = ", ".join(repr(item) for item in allowed)
            raise CheckpointError(f"{self.path}: {key} {value!r} is not supported; supported: {listed}")


def load_model_config(checkpoint: Path) -> ModelConfig:
    """Read config.json of a Hugging Face directory. Raises CheckpointError naming the key and what is supported."""
    path = checkpoint / "config.json"
    values = read_json(path)
    model_type = values.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise CheckpointError(f"{path}: model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    if family.text_key is not None:
        nested = values.get(family.text_key)
        if not isinstance(nested, Mapping):
            raise CheckpointError(f"{path}: {family.text_key} must be an object")
        values = {"tie_word_embeddings": values.get("tie_word_embeddings", False), **values, **nested}
    return _parse(_Reader(values, path), str(model_type), family, checkpoint)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a checkpoint's file. Raises CheckpointError naming the file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: must be a JSON object")
    return values


def _parse(reader: _Reader, model_type: str, family: Family, checkpoint: Path) -> ModelConfig:
    reader.refuse("hidden_act", ("silu",))
    reader.refuse("attention_bias", (False, None))
    reader.refuse("mlp_bias", (False, None))
    reader.refuse("use_sliding_window", (False, None))
    reader.refuse("attn_output_gate", (True,) if family.is_hybrid else (False, None))
    if model_type == "qwen3_next":
        _refuse_experts(reader)
    num_layers, num_heads = reader.count("num_hidden_layers"), reader.count("num_attention_heads")
    hidden_size = reader.count("hidden_size")
    num_kv_heads = reader.count("num_key_value_heads", num_heads)
    head_dim = reader.count("head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(f"{reader.path}: num_attention_heads must be a multiple of num_key_value_heads")
    kinds = _layer_kinds(reader, family, num_layers)
    theta, rotary_dim, scaling = _parse_rope(reader, family, head_dim)
    return ModelConfig(
        model_type=model_type,
        family=family,
        vocab_size=reader.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.count("intermediate_size"),
        layer_kinds=kinds,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_eps=reader.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rotary_dim=rotary_dim,
        rope_scaling=scaling,
        max_position=reader.count("max_position_embeddings"),
        tie_embeddings=bool(reader.values.get("tie_word_embeddings", False)),
        delta=_parse_delta(reader) if "delta" in kinds else None,
        num_mtp_layers=reader.count("mtp_num_hidden_layers", 0, minimum=0) if family.is_hybrid else 0,
        eos_token_ids=_eos_token_ids(reader, checkpoint),
    )


def _refuse_experts(reader: _Reader) -> None:
    layers = set(range(reader.count("num_hidden_layers")))
    dense = set(reader.entries("mlp_only_layers", int))
    if reader.values.get("num_experts", 512) and not layers <= dense:
        raise CheckpointError(
            f"{reader.path}: num_experts {reader.values.get('num_experts', 512)}: mixture-of-experts layers are not "
            "supported; qwen3_next must be dense (num_experts 0, or every layer in mlp_only_layers)"
        )


def _layer_kinds(reader: _Reader, family: Family, num_layers: int) -> tuple[LayerKind, ...]:
    if not family.is_hybrid:
        types = reader.entries("layer_types", str) or ["full_attention"] * num_layers
        allowed: dict[str, LayerKind] = {"full_attention": "attention"}
    else:
        interval = reader.count("full_attention_interval", 4)
        default = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(num_layers)]
        types = reader.entries("layer_types", str) or default
        allowed = {"full_attention": "attention", "linear_attention": "delta"}
    if len(types) != num_layers:
        raise CheckpointError(f"{reader.path}: layer_types has {len(types)} entries for {num_layers} layers")
    unknown = sorted(set(types) - set(allowed))
    if unknown:
        raise CheckpointError(
            f"{reader.path}: layer_types {unknown[0]!r} is not supported; supported: {', '.join(allowed)}"
        )
    return tuple(allowed[item] for item in types)


def _parse_rope(reader: _Reader, family: Family, head_dim: int) -> tuple[float, int, dict[str, float] | None]:
    """theta, rotated dims and Llama 3's scaling, from `rope_parameters` (transformers 5) or the older keys."""
    rope = {**reader.section("rope_scaling"), **reader.section("rope_parameters")}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise CheckpointError(f"{reader.path}: rope_type {rope_type!r} is not supported; supported: default, llama3")
    section = _Reader({**reader.values, **rope}, reader.path)
    partial = section.number("partial_rotary_factor", family.default_partial_rotary)
    if partial != 1.0 and not family.is_hybrid:
        raise CheckpointError(f"{reader.path}: partial_rotary_factor {partial} is not supported for this model_type")
    rotary_dim = int(head_dim * partial)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise CheckpointError(f"{reader.path}: partial_rotary_factor {partial} of head_dim {head_dim} must be even")
    scaling = None
    if rope_type == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        scaling = {key: float(section.number(key)) for key in keys}
    return float(section.number("rope_theta", 10000.0)), rotary_dim, scaling


def _parse_delta(reader: _Reader) -> DeltaConfig:
    delta = DeltaConfig(
        key_heads=reader.count("linear_num_key_heads"),
        value_heads=reader.count("linear_num_value_heads"),
        key_dim=reader.count("linear_key_head_dim"),
        value_dim=reader.count("linear_value_head_dim"),
        conv_taps=reader.count("linear_conv_kernel_dim", minimum=2),
    )
    if delta.value_heads % delta.key_heads:
        raise CheckpointError(f"{reader.path}: linear_num_value_heads must be a multiple of linear_num_key_heads")
    if delta.conv_taps > MAX_CONV_TAPS:
        raise CheckpointError(f"{reader.path}: linear_conv_kernel_dim must be at most {MAX_CONV_TAPS}")
    return delta


def _eos_token_ids(reader: _Reader, checkpoint: Path) -> tuple[int, ...]:
    """The stop tokens: generation_config.json's where it has them, else config.json's."""
    generation = checkpoint / "generation_config.json"
    value = read_json(generation).get("eos_token_id") if generation.exists() else None
    value = reader.values.get("eos_token_id") if value is None else value
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) for item in ids):
        raise CheckpointError(f"{reader.path}: eos_token_id must be an integer or a list of integers, got {value!r}")
    return tuple(ids)
