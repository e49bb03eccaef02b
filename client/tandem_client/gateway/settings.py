# SPDX-License-Identifier: Apache-2.0
"""Settings of the gateway: options of `tandem gateway`, or TANDEM_GATEWAY_* in the environment."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tandem_client.transport import DEFAULT_MODEL, DEFAULT_URL, check_url

ENV_PREFIX = "TANDEM_GATEWAY_"

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
    admin_token: SecretStr | None = Field(None, description="opens /admin and, where set, is asked for at /metrics")
    page: bool = Field(True, description="serve the live page at /")
    cors_origins: tuple[str, ...] = Field((), description="origins whose pages may call the API; off by default")
    max_body_bytes: int = Field(4 << 20, ge=1024, description="largest request body")
    body_timeout_s: Seconds = Field(30.0, description="a body must have come within so long")
    max_requests: int = Field(512, ge=1, description="requests of all callers at once; more get 503")
    heartbeat_s: Seconds = Field(10.0, description="a stream that is silent for so long sends a comment")
    request_timeout_s: Seconds = Field(600.0, description="limit of one answer; then it ends with what it has")
    send_timeout_s: Seconds = Field(60.0, description="a client that takes nothing for so long is dropped")
    drain_s: Seconds = Field(60.0, description="at SIGTERM running answers get so long to end")
    retry_after_s: int = Field(2, ge=1, description="Retry-After of a 503, unless the backend says otherwise")

    @field_validator("backend_url")
    @classmethod
    def _is_host_and_port(cls, value: str) -> str:
        return check_url(value)
