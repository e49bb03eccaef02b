# SPDX-License-Identifier: Apache-2.0
"""Settings of the gateway: options of `tandem gateway`, or TANDEM_GATEWAY_* in the environment."""

import json
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tandem_client.gateway.sampling_settings import SamplingSettings
from tandem_client.transport import DEFAULT_MODEL, DEFAULT_URL, check_url

ENV_PREFIX = "TANDEM_GATEWAY_"

Sampling = Annotated[
    SamplingSettings, BeforeValidator(lambda value: json.loads(value) if isinstance(value, str) else value)
]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Settings(BaseSettings):
    """Lists and objects in the environment are JSON."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(9000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    backend_url: str = Field(DEFAULT_URL, description="host:port of Triton server's gRPC service")
    models: tuple[str, ...] = Field((DEFAULT_MODEL,), min_length=1, description="the backend's models to serve")
    model_aliases: dict[str, str] = Field({}, description="further names of the backend's models, by alias")
    keys_file: Path | None = Field(None, description="file of `tandem gateway-key`; without one no key is asked for")
    admin_token: Annotated[SecretStr, Field(min_length=1)] | None = Field(
        None, description="opens /admin and, where set, is asked for at /metrics"
    )
    page: bool = Field(True, description="serve the live page at /")
    cors_origins: tuple[str, ...] = Field((), description="origins whose pages may call the API; off by default")
    max_body_bytes: int = Field(4 << 20, ge=1024, description="largest request body")
    head_timeout_s: Seconds = Field(10.0, description="a request's line and headers must have come within so long")
    body_timeout_s: Seconds = Field(30.0, description="a body must have come within so long")
    max_requests: int = Field(512, ge=1, description="requests of all callers at once; more get 503")
    heartbeat_s: Seconds = Field(10.0, description="a stream that is silent for so long sends a comment")
    request_timeout_s: Seconds = Field(600.0, description="limit of one answer; then it ends with what it has")
    stall_s: Seconds = Field(20.0, description="an answer that goes silent for so long ends with an error")
    send_timeout_s: Seconds = Field(60.0, description="a client that takes nothing for so long is dropped")
    drain_s: Seconds = Field(60.0, description="at SIGTERM running answers get so long to end")
    max_sequences: int = Field(
        128, ge=0, description="conversations with a sequence of their own in the backend; 0: none"
    )
    sequence_idle_s: Seconds = Field(300.0, description="the backend's max_sequence_idle_microseconds, in seconds")
    regenerate: bool = Field(True, description="sample the answer to a conversation that is sent again")
    regenerate_window_s: Seconds = Field(3600.0, description="so long after its answer a conversation counts as known")
    regenerate_sampling: Sampling = Field(SamplingSettings(temperature=0.7, top_p=0.95), description="with what; JSON")
    loop_escape: bool = Field(True, description="sample the turns of an agent that makes one call over and over")
    loop_turns: int = Field(3, ge=2, description="so many turns in a row with one same call are a loop")
    generation_config: Path | None = Field(None, description="generation_config.json to escape loops with")
    journal: Path | None = Field(None, description="SQLite file that gets a row a request; see `tandem journal`")
    journal_days: float = Field(30.0, gt=0, allow_inf_nan=False, description="rows are kept for so long")
    journal_rows: int = Field(1_000_000, ge=1, description="and about so many of them")
    journal_text: bool = Field(False, description="the journal keeps prompts and answers too")
    retry_after_s: int = Field(2, ge=1, description="Retry-After of a 503, unless the backend says otherwise")

    @field_validator("backend_url")
    @classmethod
    def _is_host_and_port(cls, value: str) -> str:
        return check_url(value)
