# SPDX-License-Identifier: Apache-2.0
"""Which anchor goes first: GreedyDual-Size (Cao and Irani 1997) over recency, cost to recompute and bytes.

An anchor's priority is, when it is made or used, the clock plus the tokens its loss would cost per MiB that it frees;
the clock is the priority of the last one that went. So what was not used for long goes, and of two equally old ones the
one that is cheaper to compute again; where that is equal too, the one that was used before the other.
"""

from collections.abc import Collection, Iterator
from itertools import islice

from tandem_backend.config import MIB
from tandem_backend.engine.cache.anchor import Anchor
from tandem_backend.engine.cache.radix import Node
from tandem_backend.engine.pools import IndexPool

NUM_NEWEST = 2  # anchors at a conversation's end that its older ones go before: its last prompt's and its last answer's


def benefit(anchor: Anchor, block_bytes: int) -> float:
    """Tokens that its loss would cost, by MiB that it frees."""
    before = next(anchors_above(anchor), None)
    num_lost = anchor.position - (before.position if before is not None else 0)
    num_bytes = anchor.num_bytes + block_bytes * len(freed_nodes(anchor))
    return num_lost * MIB / max(num_bytes, 1)


def to_save_bytes(anchors: Collection[Anchor]) -> Anchor | None:
    """The anchor to let go for its bytes; None where nothing would come free."""
    candidates = [anchor for anchor in anchors if anchor.num_bytes or _is_last(anchor)]
    if not candidates:
        return None
    chosen = min(candidates, key=lambda anchor: anchor.priority)
    if chosen.num_bytes and _is_newest(chosen):
        older = [anchor for anchor in _own_anchors_above(chosen) if not _is_newest(anchor)]
        return min(older, key=lambda anchor: anchor.priority, default=chosen)
    return chosen


def to_free_blocks(anchors: Collection[Anchor], blocks: IndexPool, kept: Node | None) -> Anchor | None:
    """The anchor to let go for blocks that nobody else has, without touching the node `kept`; None where all do.

    Where no block comes free at once, it is one that stands in the way.
    """
    in_the_way = None
    for anchor in sorted((anchor for anchor in anchors if _is_last(anchor)), key=lambda anchor: anchor.priority):
        nodes = freed_nodes(anchor)
        if kept in nodes:
            continue
        if any(blocks.num_references(node.block) == 1 for node in nodes):
            return anchor
        in_the_way = in_the_way or anchor
    return in_the_way


def freed_nodes(anchor: Anchor) -> list[Node]:
    """The nodes that lead to this anchor alone, or to it and those before it in its own node."""
    nodes: list[Node] = []
    if not _is_last(anchor):
        return nodes
    node: Node | None = anchor.node
    while node is not None and node.parent is not None:
        nodes.append(node)
        node = node.parent
        if node.anchors or len(list(islice(node.each_child(), 2))) > 1:
            break
    return nodes


def anchors_above(anchor: Anchor) -> Iterator[Anchor]:
    """Anchors of the same prefix before this one, the nearest first."""
    node: Node | None = anchor.node
    while node is not None:
        for position in sorted(node.anchors, reverse=True):
            if position < anchor.position:
                yield node.anchors[position]
        node = node.parent


def _own_anchors_above(anchor: Anchor) -> Iterator[Anchor]:
    """The same, as far as no other conversation goes on from them."""
    for above in anchors_above(anchor):
        if len(list(islice(above.node.each_child(), 2))) > 1:
            return
        yield above


def _is_last(anchor: Anchor) -> bool:
    """Whether no anchor lies behind it: then blocks come free with it, or with those in its block that go next."""
    return not anchor.node.children and anchor.position == max(anchor.node.anchors)


def _is_newest(anchor: Anchor) -> bool:
    return len(list(islice(_anchors_below(anchor), NUM_NEWEST))) < NUM_NEWEST


def _anchors_below(anchor: Anchor) -> Iterator[Anchor]:
    """All anchors that lie behind this one, of any conversation."""
    return (other for other in anchors_from(anchor.node) if other.position > anchor.position)


def anchors_from(node: Node) -> Iterator[Anchor]:
    """All anchors in the node and the nodes below it; there is one, else the node would have gone."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield from node.anchors.values()
        stack.extend(node.each_child())
