# SPDX-License-Identifier: Apache-2.0
"""TreeTeller: tells a request that asks for them the draft trees of its rounds. It only looks on."""

from dataclasses import dataclass, replace

from tandem_backend.engine.draft_tree import Accepted, DraftTree
from tandem_backend.types import RoundTree

# Draft nodes that one request is told, anchors not counted: about 1 MB of JSON.
MAX_TOLD_NODES = 16_384


@dataclass(slots=True)
class TreeTeller:
    """Of one request. Every round is told, its nodes only as long as MAX_TOLD_NODES last."""

    num_told: int = 0

    def tell(self, index: int, tree: DraftTree | None, accepted: Accepted, num_kept: int) -> tuple[RoundTree, ...]:
        """The round `index`, of whose tokens the request kept so many; `tree` None: the pass over the prompt."""
        # Token k stands at the walk's node k + 1, where the walk went on to one; also the token that ends the answer.
        path = tuple(accepted.path[1 : num_kept + 1])
        told = RoundTree(index=index, num_tokens=num_kept, path=path)
        if tree is None:
            return (told,)
        told = replace(told, proposers=tuple(tree.drafters[node] for node in path), token_ids=None)
        if self.num_told + tree.num_nodes - 1 > MAX_TOLD_NODES:
            self.num_told = MAX_TOLD_NODES  # and no later, smaller tree either
            return (told,)
        self.num_told += tree.num_nodes - 1
        return (
            replace(told, token_ids=tree.token_ids, parents=tree.parents, scores=tree.scores, drafters=tree.drafters),
        )
