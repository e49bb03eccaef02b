# SPDX-License-Identifier: Apache-2.0
"""The endpoints for those who run the gateway: health, metrics, and what the admin may do."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from tandem_client.gateway.errors import ApiError

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> dict[str, str]:
    """200 where the gateway and a model behind it can answer; 503 else."""
    await request.app.state.gateway.backend.names()
    return {"status": "ok"}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """For Prometheus; with the admin token where one is set."""
    gateway = request.app.state.gateway
    if gateway.settings.admin_token is not None:
        gateway.access.check_admin(request.headers)
    return Response(gateway.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/admin/keys")
async def keys(request: Request) -> dict[str, Any]:
    """Every API key's name, limits and running requests."""
    access = request.app.state.gateway.access
    access.check_admin(request.headers)
    return {"keys": access.describe()}


@router.post("/admin/keys/reload")
async def reload_keys(request: Request) -> dict[str, int]:
    """Read the keys file again."""
    access = request.app.state.gateway.access
    access.check_admin(request.headers)
    try:
        return {"num_keys": access.reload()}
    except (OSError, ValueError) as error:
        raise ApiError(500, f"the old keys stay: {error}", code="keys_file") from error
