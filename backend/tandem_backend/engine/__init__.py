# SPDX-License-Identifier: Apache-2.0
"""The engine: scheduling, rounds and sessions. See backend/README.md for a round on one page."""

from tandem_backend.engine.engine import Engine
from tandem_backend.engine.sequence import PreparedRequest

__all__ = ["Engine", "PreparedRequest"]
