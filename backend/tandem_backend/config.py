# SPDX-License-Identifier: Apache-2.0
"""EngineConfig: the validated content of a model's engine.json. Unknown keys, wrong types and ranges are refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tandem_backend.errors import ConfigError

MIB = 1024 * 1024


class EngineConfig(BaseModel):
    """Every key is described in backend/README.md; relative paths start from the folder of engine.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    checkpoint: Path = Field(description="Hugging Face directory of the target")
    device: Literal["cpu", "cuda", "auto"] = Field(
        default="auto", description="where the kernels run; auto: on CUDA where there is a device, else on the CPU"
    )
    num_threads: int = Field(default=0, ge=0, le=512, description="CPU kernel threads; 0: one per usable core")
    max_context_len: int = Field(
        default=0, ge=0, description="tokens of a sequence; 0: as many as the checkpoint allows"
    )
    max_active: int = Field(default=32, ge=1, le=1024, description="requests decoded together in one round")
    max_queued: int = Field(default=256, ge=0, description="requests that wait; more are answered UNAVAILABLE")
    queue_timeout_s: float = Field(
        default=300.0,
        ge=0,
        le=1e9,
        description="a request that waited so long is answered UNAVAILABLE; 0: no limit",
    )
    priority_aging_s: float = Field(
        default=10.0,
        ge=0,
        le=1e6,
        description="a request of the next lower priority goes first if it came so much earlier",
    )
    max_sessions: int = Field(
        default=256, ge=1, le=65536, description="sequences whose state is kept between their turns"
    )
    session_idle_s: float = Field(default=300.0, gt=0, le=1e9, description="a session unused for so long is dropped")
    kv_cache_bytes: int = Field(default=512 * MIB, ge=MIB, description="memory of the KV block pool")
    prefix_cache_bytes: int = Field(
        default=256 * MIB,
        ge=0,
        description="prefixes kept for later requests: anchors, and KV blocks out of kv_cache_bytes; 0: off",
    )
    anchor_grid: int = Field(
        default=512,
        ge=0,
        description="tokens between anchors within prompts and answers; 0: only where prompts and answers end",
    )
    disk_cache: Path | None = Field(
        default=None,
        description="directory where cached prefixes go for which there is no memory, and all at a shutdown; a restart "
        "resumes from it",
    )
    disk_cache_bytes: int = Field(
        default=4096 * MIB, ge=MIB, description="size of its files; the least recently used go for it"
    )
    disk_cache_ttl_s: float = Field(
        default=604800.0, gt=0, le=1e9, description="its files that were not used for so long are removed"
    )
    response_cache_bytes: int = Field(
        default=0,
        ge=0,
        description="memory of whole answers to greedy and seeded requests that are no turns of a session; 0: off",
    )
    response_cache_ttl_s: float = Field(default=600.0, gt=0, le=1e9, description="an answer is given again for so long")
    admin_token: str | None = Field(
        default=None, min_length=8, repr=False, description="what admin requests must bring; null: they are refused"
    )
    max_prefill_rows: int = Field(default=256, ge=1, le=8192, description="prompt rows in one round")
    joint_prefill_rows: int = Field(default=64, ge=1, le=8192, description="the same while other requests are decoding")
    default_max_tokens: int = Field(default=256, ge=1, description="max_tokens of a request that names none")
    stream_interval_ms: float = Field(
        default=20.0,
        ge=0,
        le=10000,
        description="least time between two responses of a stream, first and last excepted; up to five times that "
        "where the responses of all streams would slow the engine; 0: one a round",
    )
    max_failed_rounds: int = Field(
        default=3, ge=1, le=1000, description="so many rounds that fail one after another make the model unready"
    )
    drafters: tuple[str, ...] = Field(
        default=("auto",),
        description="who drafts for requests that name nobody: lookup, mtp, draft_model; auto: lookup, and mtp where "
        "the checkpoint carries it; empty: plain decoding",
    )
    lookup_store: Path | None = Field(
        default=None,
        description="directory of the suffix store: texts that the lookup drafter remembers over requests and restarts",
    )
    lookup_store_scope: Literal["outputs", "all"] = Field(
        default="outputs",
        description="what it remembers of a request: what was generated, or its new prompt tokens too",
    )
    lookup_store_bytes: int = Field(
        default=256 * MIB, ge=MIB, description="size of its files; the oldest texts are forgotten for it"
    )
    lookup_store_read_only: bool = Field(default=False, description="look up, but remember nothing new")
    lookup_corpora: tuple[Path, ...] = Field(
        default=(), description="directories of tandem corpus build that the lookup drafter draws on too"
    )
    draft_model: Path | None = Field(default=None, description="checkpoint directory of the draft_model drafter")
    draft_vocab_size: int = Field(default=0, ge=0, description="the mtp drafter drafts token ids below this; 0: all")
    mtp_width: int = Field(default=1, ge=1, le=16, description="nodes of a depth that the mtp drafter looks beyond")
    mtp_top_k: int = Field(
        default=1, ge=1, le=16, description="tokens it proposes after a node; 1 and width 1: a chain"
    )
    max_draft_tokens: int = Field(default=16, ge=1, le=63, description="draft nodes of one sequence in a round")
    row_budget: int = Field(
        default=32, ge=1, le=1024, description="rows of a joint round, shared by anchors and draft nodes"
    )
    router: Literal["adaptive", "always"] = Field(
        default="adaptive",
        description="adaptive: verify the nodes that pay; always: all within the budget (for checks)",
    )
    verify_curve: Path | None = Field(default=None, description="file of tandem bench verify-curve; null: built in")
    request_log: Literal["off", "stdout"] | Path = Field(
        default="stdout",
        description="where one JSON line a request goes: off, stdout (Triton server's), or a file",
    )
    log_prompts: bool = Field(default=False, description="the request log tells prompts and whole error messages too")
    max_graph_rows: int = Field(
        default=256, ge=0, le=8192, description="CUDA: rows of the largest pass captured as a graph; 0: no graphs"
    )
    graph_capture_s: float = Field(
        default=300.0, gt=0, le=1e6, description="CUDA: time for capturing graphs at load; passes left out are launched"
    )
    allow_relaxed_acceptance: bool = Field(
        default=False, description="requests may set relax_tau, which breaks exactness: for measurements only"
    )
    prefill_linear: Literal["exact", "cublas"] = Field(
        default="exact",
        description="CUDA: linear layers of prompt passes; cublas: by cuBLAS, where it is shown to give our bits",
    )
    draft_graphs: bool = Field(default=True, description="CUDA: capture the passes of the mtp drafter as graphs too")
    self_test_rows: int = Field(default=96, ge=0, le=4096, description="rows of the exactness self-test; 0: skip it")


def load_engine_config(path: Path, overrides: Mapping[str, Any] | None = None) -> EngineConfig:
    """Read engine.json and lay `overrides` over it (text values as in config.pbtxt's parameters are parsed as JSON).

    Raises ConfigError naming the file, the key and what is allowed.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must be a JSON object, got {type(values).__name__}")
    for key, value in (overrides or {}).items():
        values[key] = _parse_override(value)
    try:
        # By JSON's types, so that no text, bool or fraction passes for a whole number.
        config = EngineConfig.model_validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_explain(error)}") from error
    values = {key: getattr(config, key) for key in EngineConfig.model_fields}
    paths = {key: value for key, value in values.items() if isinstance(value, Path)}
    return config.model_copy(update={key: (path.parent / value).resolve() for key, value in paths.items()})


def _parse_override(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _explain(error: ValidationError) -> str:
    problems = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            problems.append(f"{key}: unknown key; allowed are {', '.join(EngineConfig.model_fields)}")
        else:
            problems.append(f"{key}: {item['msg']}, got {item['input']!r}")
    return "; ".join(problems)
