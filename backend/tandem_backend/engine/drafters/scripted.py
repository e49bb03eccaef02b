# SPDX-License-Identifier: Apache-2.0
"""The test drafters `wrong`, `half` and `oracle`: they know plain decoding's output and how often to be right."""

from collections.abc import Callable, Mapping, Sequence
from random import Random

from tandem_backend.engine.drafters.base import DraftContext, Proposal

References = Callable[[Sequence[int]], Sequence[int]] | Mapping[tuple[int, ...], Sequence[int]]

AFTER_THE_END = 0  # taken for the right token where the reference has ended


class ScriptedDrafter:
    """Drafts by a reference: plain decoding's whole output for a prompt.

    `oracle` proposes a chain of right tokens. `wrong` proposes a bushy tree in which no node carries the token that the
    reference has at the node's position. `half` proposes such a tree in which a right token is among the children of a
    node, on the right path and off it, with probability 1/2 and in any place. Shapes and tokens are pseudo-random and
    depend on the drafter and the position alone.

    Args:
        name: `wrong`, `half` or `oracle`.
        references: output token ids by the prompt's token ids, as a mapping or a function.
        others: further outputs by prompt, of requests with other options; a request follows one that begins like it.
        vocab_size: proposed ids are below it; at least 2, so that there is a wrong token.

    Raises ValueError naming the argument.
    """

    def __init__(
        self,
        name: str,
        references: References,
        vocab_size: int,
        others: Mapping[tuple[int, ...], Sequence[Sequence[int]]] | None = None,
    ) -> None:
        if name not in ("wrong", "half", "oracle"):
            raise ValueError(f"name: must be wrong, half or oracle, got {name!r}")
        if vocab_size < 2:
            raise ValueError(f"vocab_size: must be at least 2, got {vocab_size}")
        self.name = name
        self._references = references
        self._vocab_size = vocab_size
        self._others = others or {}

    def begin(self, key: int) -> None:
        """Nothing is kept of a sequence."""

    def propose(self, contexts: Sequence[DraftContext]) -> list[Proposal]:
        """One proposal a context. Raises ValueError if a mapping has no reference for the prompt."""
        return [self._propose(context) for context in contexts]

    def end(self, key: int) -> None:
        """Nothing was kept."""

    def _propose(self, context: DraftContext) -> Proposal:
        right = self._right_tokens(context)
        if self.name == "oracle":
            return Proposal(right, range(-1, len(right) - 1), [1.0] * len(right))
        random = Random(f"{self.name} {len(context.token_ids)}")
        parents = random_tree(random, context.max_nodes, len(right), self._vocab_size - 1)
        right_share = 0.5 if self.name == "half" else 0.0
        token_ids = label(random, parents, right, right_share, self._vocab_size)
        return Proposal(token_ids, parents, [0.5] * len(parents))

    def _right_tokens(self, context: DraftContext) -> list[int]:
        """The reference's tokens from the anchor on, as many as a path may have."""
        prompt = tuple(context.token_ids[: context.num_prompt_tokens])
        if isinstance(self._references, Mapping):
            if prompt not in self._references:
                raise ValueError(f"references: none for a prompt of {len(prompt)} tokens")
            reference = self._references[prompt]
        else:
            reference = self._references(prompt)
        depth = min(context.max_nodes, context.max_depth)
        done = len(context.token_ids) - context.num_prompt_tokens
        output = list(context.token_ids[context.num_prompt_tokens :])
        for other in self._others.get(prompt, ()):
            if list(reference[:done]) != output:
                reference = other
        right = list(reference[done : done + depth])
        return right + [AFTER_THE_END] * (depth - len(right))


def random_tree(random: Random, num_nodes: int, max_depth: int, max_children: int) -> list[int]:
    """The parent of each node (-1: the anchor), parents first; fewer nodes where the limits leave no room."""
    parents: list[int] = []
    depths, num_children = {-1: 0}, {-1: 0}
    open_nodes = [-1]  # may take another child
    for node in range(num_nodes):
        if not open_nodes:
            break
        parent = open_nodes[-1] if random.random() < 0.5 else random.choice(open_nodes)  # deep as well as bushy
        parents.append(parent)
        depths[node], num_children[node] = depths[parent] + 1, 0
        num_children[parent] += 1
        if num_children[parent] == max_children:
            open_nodes.remove(parent)
        if depths[node] < max_depth:
            open_nodes.append(node)
    return parents


def label(
    random: Random, parents: Sequence[int], right: Sequence[int], right_share: float, vocab_size: int
) -> list[int]:
    """A token for each node: siblings differ, and `right[depth - 1]` is among them with probability `right_share`."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    token_ids = [0] * len(parents)
    depths = {-1: 0}
    for parent, siblings in children.items():
        right_token = right[depths[parent]]
        # Sampled from the vocabulary without the right token, then shifted to leave it out.
        tokens = [token + (token >= right_token) for token in random.sample(range(vocab_size - 1), len(siblings))]
        if random.random() < right_share:
            tokens[random.randrange(len(tokens))] = right_token
        for node, token in zip(siblings, tokens, strict=True):
            token_ids[node] = token
            depths[node] = depths[parent] + 1
    return token_ids
