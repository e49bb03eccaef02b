# SPDX-License-Identifier: Apache-2.0
"""The `lookup` drafter: what followed the last few tokens when they stood in this sequence before.

The idea is prompt lookup decoding with LZ77's overlapping copies; vote shares with an escape come from PPM compression.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from tandem_backend.engine.drafters.base import DraftContext, Proposal
from tandem_backend.engine.suffix_store import SuffixStore

MIN_MATCH = 2  # tokens
MAX_MATCH = 8
MAX_VOTERS = 8  # earlier places that one proposal draws on, and places remembered for an n-gram
BASE = 1.5  # a vote weighs this much more for each further token that its place has in common with the text's end
ESCAPE = (
    3.0  # weight of "something that never followed here"; with it, scores come out as acceptance rates of greedy text
)

Voter = tuple[tuple[int, ...], float]  # (continuation, weight of the places that have it)


class History:
    """The tokens of one sequence and, for each n-gram of 2 to 8 tokens, the latest places after which it stood.

    An n-gram is listed only once the (n - 1)-gram that ends it has stood twice; until then that one's lone place stands
    for both. So a text that never repeats costs one entry a token, any text at most seven.
    """

    __slots__ = ("_ends", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # n-gram -> positions of the token after it, latest last

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens, in constant time each."""
        for token_id in token_ids:
            self._list_grams(len(self.tokens))  # only now are they followed by something
            self.tokens.append(token_id)

    def _list_grams(self, end: int) -> None:
        tokens, listed = self.tokens, self._ends
        for length in range(MIN_MATCH, min(MAX_MATCH, end) + 1):
            gram = tuple(tokens[end - length : end])
            ends = listed.get(gram)
            if ends is None:
                listed[gram] = [end]
                return
            if len(ends) == 1 and length < min(MAX_MATCH, ends[0]):
                lone = ends[0]
                listed[tuple(tokens[lone - length - 1 : lone])] = [lone]
            ends.append(end)
            if len(ends) > MAX_VOTERS:
                del ends[0]

    def has_match(self) -> bool:
        """Whether the text's end stood in it before."""
        return tuple(self.tokens[-MIN_MATCH:]) in self._ends

    def matches(self) -> dict[int, int]:
        """Places that follow the same tokens as the text's end does: {position: number of such tokens}.

        The longest matches come first, the latest first among equals; at most `MAX_VOTERS`, and lengths count up to
        `MAX_MATCH`.
        """
        tokens, found = self.tokens, list[list[int]]()
        for length in range(MIN_MATCH, min(MAX_MATCH, len(tokens)) + 1):
            ends = self._ends.get(tuple(tokens[-length:]))
            if ends is None:
                break
            found.append(ends)
        matches: dict[int, int] = {}
        if found and len(found[-1]) == 1:
            lone = found.pop()[0]
            matches[lone] = self._num_common(lone, MIN_MATCH + len(found))
        for length in range(MIN_MATCH + len(found) - 1, MIN_MATCH - 1, -1):
            for end in reversed(found[length - MIN_MATCH]):
                if len(matches) == MAX_VOTERS:
                    return matches
                matches.setdefault(end, length)
        return matches

    def _num_common(self, end: int, length: int) -> int:
        """Tokens that the places `end` and the text's end have in common; `length` are known to be."""
        tokens = self.tokens
        while length < min(MAX_MATCH, end) and tokens[end - length - 1] == tokens[-length - 1]:
            length += 1
        return length


class LookupDrafter:
    """Proposes the continuations of the text's last tokens as a tree, the likeliest nodes first.

    A place that has n tokens in common with the text's end votes with weight `BASE ** n`. At depth d (1: right after
    the anchor) its n has grown by the d - 1 tokens of the path, so a node's score, given its parent, is

        votes(node) / (votes(parent) + ESCAPE / BASE ** (d - 1))

    which rises with the match's length, the share of the votes, the number of places and the depth. A continuation that
    reaches the end of the text goes on with its own beginning, so a text that loops is drafted as looping.

    Stores hold other texts, of earlier requests or of a corpus; their places vote beside those of the sequence itself.

    A sequence's tokens may only be appended to between `begin` and `end`.
    """

    name = "lookup"

    def __init__(self, stores: Sequence[SuffixStore] = ()) -> None:
        self._stores = tuple(stores)
        self._histories: dict[int, History] = {}

    def begin(self, key: int) -> None:
        self._histories[key] = History()

    def has_proposal(self, key: int, token_ids: Sequence[int]) -> bool:
        return bool(self._stores) or self._history(key, token_ids).has_match()

    def propose(self, contexts: Sequence[DraftContext]) -> list[Proposal]:
        return [self._propose(context) for context in contexts]

    def end(self, key: int) -> None:
        self._histories.pop(key, None)

    def _history(self, key: int, token_ids: Sequence[int]) -> History:
        history = self._histories[key]
        if len(history.tokens) < len(token_ids):
            history.extend(token_ids[len(history.tokens) :])
        return history

    def _propose(self, context: DraftContext) -> Proposal:
        history = self._history(context.key, context.token_ids)
        depth = min(context.max_depth, context.max_nodes)
        votes: dict[tuple[int, ...], float] = {}
        for end, length in history.matches().items():
            text = continuation(history.tokens, end, depth)
            votes[text] = votes.get(text, 0.0) + BASE**length
        for store in self._stores:
            for length, text in store.matches(history.tokens, depth, MAX_VOTERS):
                votes[text] = votes.get(text, 0.0) + BASE**length
        return grow(list(votes.items()), depth, context.max_nodes) if votes else Proposal()


def continuation(tokens: list[int], end: int, depth: int) -> tuple[int, ...]:
    """`depth` tokens from `end` on, over and over if the text ends before."""
    text = tokens[end : end + depth]
    return tuple(text) if len(text) == depth else tuple((text * (depth // len(text) + 1))[:depth])


def grow(voters: list[Voter], max_depth: int, max_nodes: int) -> Proposal:
    """The `max_nodes` nodes of the voters' continuations that are likeliest to be reached."""
    token_ids: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    # (-probability of the path, number that breaks ties: older first, parent, depth, token, score, weight, voters)
    open_nodes: list[tuple[float, int, int, int, int, float, float, list[Voter]]] = []
    num_opened, node, depth, reach, total = 0, -1, 0, -1.0, sum(weight for _, weight in voters)
    while True:
        if depth < max_depth:
            for token_id, (weight, backers) in by_next_token(voters, depth, total).items():
                score = weight / (total + ESCAPE / BASE**depth)
                heappush(open_nodes, (reach * score, num_opened, node, depth + 1, token_id, score, weight, backers))
                num_opened += 1
        if len(token_ids) == max_nodes or not open_nodes:
            return Proposal(token_ids, parents, scores)
        reach, _, parent, depth, token_id, score, total, voters = heappop(open_nodes)
        node = len(token_ids)
        token_ids.append(token_id)
        parents.append(parent)
        scores.append(score)


def by_next_token(voters: list[Voter], depth: int, total: float) -> dict[int, tuple[float, list[Voter]]]:
    """{token at `depth` of a continuation: (weight, voters)}, in the voters' order; `total` is their weight."""
    backers: dict[int, list[Voter]] = {}
    for voter in voters:
        if depth < len(voter[0]):  # a stored text may end here
            backers.setdefault(voter[0][depth], []).append(voter)
    if len(backers) == 1 and len(voters) == 1:
        return {voters[0][0][depth]: (total, voters)}
    return {token_id: (sum(weight for _, weight in group), group) for token_id, group in backers.items()}
