# SPDX-License-Identifier: Apache-2.0
"""Client of Tandem, an exact LLM backend for NVIDIA Triton Inference Server."""

from tandem_client.aio import AsyncGeneration, AsyncSession, AsyncTandemClient
from tandem_client.draft_trees import DraftNode, DraftRound, DraftTrees, ProposedToken
from tandem_client.errors import (
    ConnectionFailedError,
    IncompleteStreamError,
    RequestTimeoutError,
    ServerError,
    TandemClientError,
)
from tandem_client.sync import Generation, Session, TandemClient
from tandem_client.types import Chunk, Completion, DrafterUsage, TokenLogprob, ToolCall, ToolCallDelta, Usage

__all__ = [
    "AsyncGeneration",
    "AsyncSession",
    "AsyncTandemClient",
    "Chunk",
    "Completion",
    "ConnectionFailedError",
    "DraftNode",
    "DraftRound",
    "DraftTrees",
    "DrafterUsage",
    "Generation",
    "IncompleteStreamError",
    "ProposedToken",
    "RequestTimeoutError",
    "ServerError",
    "Session",
    "TandemClient",
    "TandemClientError",
    "TokenLogprob",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
]
