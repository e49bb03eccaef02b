# SPDX-License-Identifier: Apache-2.0
"""The output `draft_trees`: who proposed each token of an answer, and the tree of each round, as JSON."""

import json
from dataclasses import dataclass, field
from typing import Any

from tandem_backend.engine.tokenizer import Tokenizer, TokenTextStream
from tandem_backend.types import RoundTree, StepOutput

SCORE_DIGITS = 4


@dataclass(slots=True)
class DraftTreeWriter:
    """Of one answer; the schema stands in model_repository/README.md. Texts are None without a tokenizer."""

    tokenizer: Tokenizer | None
    _texts: TokenTextStream | None = field(init=False)
    _tokens: list[dict[str, Any]] = field(default_factory=list)  # not taken yet
    _rounds: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._texts = self.tokenizer.stream() if self.tokenizer is not None else None

    def push(self, output: StepOutput) -> None:
        """Take note of the rounds that gave an output; a kept answer's has none, and its tokens are not told."""
        token_ids = iter(output.token_ids)
        for tree in output.rounds:
            for k in range(tree.num_tokens):
                is_draft = k < len(tree.path)
                self._tokens.append(
                    {
                        "token_id": (token_id := next(token_ids)),
                        "text": self._texts.push(token_id) if self._texts is not None else None,
                        "round": tree.index,
                        "drafter": tree.proposers[k] if is_draft else None,
                        "node": tree.path[k] if is_draft else None,
                    }
                )
            self._rounds.append({"round": tree.index, "nodes": self._nodes(tree)})

    def take(self) -> str:
        """The JSON of all that came since the last time."""
        text = json.dumps({"tokens": self._tokens, "rounds": self._rounds}, separators=(",", ":"))
        self._tokens, self._rounds = [], []
        return text

    def _nodes(self, tree: RoundTree) -> list[dict[str, Any]] | None:
        if tree.token_ids is None:
            return None
        accepted = {0, *tree.path}
        return [
            {
                "token_id": token_id,
                "text": self._text(token_id),
                "parent": parent if parent >= 0 else None,
                "drafter": drafter or None,
                "score": round(float(score), SCORE_DIGITS),
                "accepted": node in accepted,
            }
            for node, (token_id, parent, drafter, score) in enumerate(
                zip(tree.token_ids, tree.parents, tree.drafters, tree.scores, strict=True)
            )
        ]

    def _text(self, token_id: int) -> str | None:
        return self.tokenizer.decode([token_id], skip_special_tokens=False) if self.tokenizer is not None else None
