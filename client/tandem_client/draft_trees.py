# SPDX-License-Identifier: Apache-2.0
"""Who proposed each token of an answer, and the draft trees of the rounds that gave them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedToken:
    """A token of the answer. Texts joined are the answer before stop strings, reasoning and tool calls were cut."""

    token_id: int
    text: str | None  # what it added; None where the model has no tokenizer
    round: int
    drafter: str | None  # who proposed it; None: no draft had it, it is the target's own
    node: int | None  # in the round's tree


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNode:
    """A node of a draft tree; node 0 is the anchor, the token before the round."""

    token_id: int
    text: str | None
    parent: int | None  # a lower index; None for the anchor
    drafter: str | None  # who proposed it first; None for the anchor
    score: float  # the drafter's guess that the target takes the node after its parent
    accepted: bool  # its token is in the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRound:
    """A round that gave tokens; 0 is the pass over the prompt, which has no nodes."""

    round: int
    nodes: tuple[DraftNode, ...] | None  # in depth-first pre-order; None: left out, many were told before


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTrees:
    """Of a chunk's tokens, or of an answer's; both empty where the answer came out of the response cache."""

    tokens: tuple[ProposedToken, ...] = ()
    rounds: tuple[DraftRound, ...] = ()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Out of the model's output `draft_trees`."""
        return cls(
            tokens=tuple(ProposedToken(**token) for token in value["tokens"]),
            rounds=tuple(DraftRound(round=item["round"], nodes=_nodes(item["nodes"])) for item in value["rounds"]),
        )

    @classmethod
    def joined(cls, parts: "Iterable[DraftTrees | None]") -> Self | None:
        """Those of the chunks one after the other; None where no chunk has any."""
        found = [part for part in parts if part is not None]
        if not found:
            return None
        return cls(
            tokens=tuple(token for part in found for token in part.tokens),
            rounds=tuple(item for part in found for item in part.rounds),
        )


def _nodes(nodes: Iterable[Mapping[str, Any]] | None) -> tuple[DraftNode, ...] | None:
    return None if nodes is None else tuple(DraftNode(**node) for node in nodes)
