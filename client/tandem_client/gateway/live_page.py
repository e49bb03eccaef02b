# SPDX-License-Identifier: Apache-2.0
"""The live page at `/`: plain files out of the package, with headers that let nothing else run."""

import hashlib
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem_client.gateway.errors import ApiError

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = "index.html"
# Own files and the own API alone. Trusted types keep text from becoming markup even if the page tried.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked about each time, sent again only where it has changed
}

router = APIRouter(include_in_schema=False)


def _load() -> dict[str, tuple[bytes, str, str]]:
    """Content, media type and ETag by file name."""
    found = {}
    for file in files("tandem_client.gateway").joinpath("page").iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix in MEDIA_TYPES:
            content = file.read_bytes()
            found[file.name] = (content, MEDIA_TYPES[suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return found


FILES = _load()


@router.api_route("/", methods=["GET", "HEAD"])
def index(request: Request) -> Response:
    """The page."""
    return _file(request, INDEX)


@router.api_route("/page/{name}", methods=["GET", "HEAD"])
def part(request: Request, name: str) -> Response:
    """A file that the page loads."""
    if name not in FILES:
        raise ApiError(404, "there is no such file")
    return _file(request, name)


def _file(request: Request, name: str) -> Response:
    content, media_type, tag = FILES[name]
    headers = {**HEADERS, "ETag": tag}
    known = [item.strip().removeprefix("W/") for item in request.headers.get("If-None-Match", "").split(",")]
    if tag in known:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=media_type)
