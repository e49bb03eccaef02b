# SPDX-License-Identifier: Apache-2.0
"""Draft trees from a real server, by gRPC and through the front: they tell the answer's tokens, and change none."""

import pytest
from tandem_backend.serving.launcher import TritonServer
from tandem_client import TandemClient

PROMPT = 'def bisect_left(a, x, lo=0, hi=None):\n    """Return the index'


@pytest.mark.parametrize("model", ["tandem", "tandem_generate"])
def test_trees_tell_the_answers_tokens(server: TritonServer, model: str) -> None:
    with TandemClient(server.grpc_url, model) as client:
        plain = client.complete(PROMPT, max_tokens=48, sampling={"draft": False})
        answer = client.complete(PROMPT, max_tokens=48, return_draft_trees=True)
    assert plain.draft_trees is None
    assert (answer.text, answer.token_ids) == (plain.text, plain.token_ids)
    trees = answer.draft_trees
    assert trees is not None
    assert tuple(token.token_id for token in trees.tokens) == answer.token_ids
    assert "".join(token.text or "" for token in trees.tokens) == answer.text
    proposed = [token for token in trees.tokens if token.drafter is not None]
    assert {token.drafter for token in proposed} <= answer.usage.drafters.keys()
    assert len(proposed) == answer.usage.num_accepted_tokens
    assert sum(max(len(item.nodes or ()) - 1, 0) for item in trees.rounds) == answer.usage.num_draft_tokens
