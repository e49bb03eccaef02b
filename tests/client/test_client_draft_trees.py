# SPDX-License-Identifier: Apache-2.0
"""Draft trees on their way from the model's output to chunks and completions."""

import json

from fake_transport import FINAL, FakeTransport, response
from tandem_client import Completion, DraftNode, DraftRound, DraftTrees, ProposedToken, TandemClient
from tandem_client.payload import build_payload

NODE = {"token_id": 3, "text": "a", "parent": None, "drafter": None, "score": 1.0, "accepted": True}
CHILD = {"token_id": 4, "text": "b", "parent": 0, "drafter": "mtp", "score": 0.5, "accepted": True}
FIRST = {
    "tokens": [{"token_id": 3, "text": "a", "round": 0, "drafter": None, "node": None}],
    "rounds": [{"round": 0, "nodes": []}],
}
SECOND = {
    "tokens": [{"token_id": 4, "text": "b", "round": 1, "drafter": "mtp", "node": 1}],
    "rounds": [{"round": 1, "nodes": [NODE, CHILD]}, {"round": 2, "nodes": None}],
}


def outputs(value: object) -> bytes:
    return json.dumps(value).encode()


def test_chunks_have_their_trees_and_a_completion_all() -> None:
    script = [
        response("a", [3], draft_trees=outputs(FIRST)),
        response("b", [4], "stop", draft_trees=outputs(SECOND)),
        FINAL,
    ]
    transport = FakeTransport(script)
    first, second = TandemClient(transport=transport).generate("x", return_draft_trees=True)
    assert transport.requests[0].payload.inputs["return_draft_trees"].tolist() == [True]
    assert first.draft_trees == DraftTrees(
        tokens=(ProposedToken(token_id=3, text="a", round=0, drafter=None, node=None),),
        rounds=(DraftRound(round=0, nodes=()),),
    )
    assert second.draft_trees is not None
    anchor, child = DraftNode(**NODE), DraftNode(**CHILD)  # type: ignore[arg-type]
    assert second.draft_trees.rounds == (DraftRound(round=1, nodes=(anchor, child)), DraftRound(round=2, nodes=None))
    whole = Completion.from_chunks([first, second]).draft_trees
    assert whole is not None
    assert [token.text for token in whole.tokens] == ["a", "b"]
    assert [item.round for item in whole.rounds] == [0, 1, 2]


def test_who_does_not_ask_gets_none() -> None:
    assert "return_draft_trees" not in build_payload("x").inputs
    (chunk,) = TandemClient(transport=FakeTransport([response("a", [3], "stop"), FINAL])).generate("x")
    assert chunk.draft_trees is None
    assert Completion.from_chunks([chunk]).draft_trees is None
