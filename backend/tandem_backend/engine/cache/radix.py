# SPDX-License-Identifier: Apache-2.0
"""Radix index: which token prefixes have their KV in which blocks, and where anchors lie on the way. Knows no tensors.

A node is one KV block: full in the inner nodes, maybe partly filled in a leaf. No node's tokens begin a sibling's, so
a prefix has one place. KV rows are a function of the prefix (design, section 1), so any block with a prefix's rows is
as good as another.

The sequence that fills a leaf's block goes on writing behind the leaf's tokens; it is the only one. Whoever else starts
from there copies the rows.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from tandem_backend.engine.cache.anchor import Anchor
from tandem_backend.engine.pools import IndexPool

TokenHash = Callable[[tuple[int, ...]], int]


@dataclass(slots=True, eq=False)
class Node:
    """Tokens [start, end) of a prefix and the block that holds their KV; the index has one reference on it."""

    token_ids: tuple[int, ...]
    start: int
    block: int
    parent: "Node | None"  # None for a root, which has no tokens and no block
    num_drafter_rows: int = 0  # rows from the block's first that hold a block drafter's KV too
    children: dict[int, list["Node"]] = field(default_factory=dict)  # by hash of their tokens
    anchors: dict[int, Anchor] = field(default_factory=dict)  # by position in (start, end]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    def path(self) -> list["Node"]:
        """Nodes from the prefix's first block to this one."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def each_child(self) -> Iterator["Node"]:
        for group in self.children.values():
            yield from group


@dataclass(frozen=True, slots=True)
class Match:
    """Where a request may resume: `position` tokens are known, in the blocks from the root down to `node`."""

    node: Node
    position: int
    anchor: Anchor | None  # None where the model has no recurrent state and needs none

    @property
    def num_shared_blocks(self) -> int:
        """Blocks that a request shares; the last one it copies."""
        return len(self.node.path()) - 1

    def feeds_drafter(self) -> bool:
        """Whether a block drafter can go on from here as well."""
        path = self.node.path()
        last = path.pop()
        rows_left = all(node.num_drafter_rows == len(node.token_ids) for node in path)
        rows_left = rows_left and last.num_drafter_rows >= self.position - last.start - 1
        return rows_left and self.anchor is not None and self.anchor.hidden is not None


class RadixIndex:
    """One tree a tenant. `anywhere`: every position is usable, not only anchors (no layer has recurrent state)."""

    def __init__(self, block: int, blocks: IndexPool, *, anywhere: bool, hash_tokens: TokenHash = hash) -> None:
        self.block, self.blocks, self.anywhere = block, blocks, anywhere
        self.block_ids: set[int] = set()  # of all nodes
        self._hash = hash_tokens
        self._roots: dict[Hashable, Node] = {}

    @property
    def num_nodes(self) -> int:
        return len(self.block_ids)

    def match(
        self, tenant: Hashable, token_ids: Sequence[int], limit: int, *, with_drafter: bool = False
    ) -> Match | None:
        """The longest usable prefix of token_ids[:limit]; None where there is none.

        with_drafter: only what a block drafter can resume from too.
        """
        root = self._roots.get(tenant)
        if root is None:
            return None
        path = [root]
        # Until the first node without a block drafter's rows: below it that drafter could not go on.
        while (child := self._full_child(path[-1], token_ids, limit)) is not None:
            if with_drafter and child.num_drafter_rows < self.block:
                break
            path.append(child)
        for node in reversed(path):
            found = self._best_of_children(node, token_ids, limit, with_drafter=with_drafter)
            if found is not None:
                return found
        return None

    def _full_child(self, node: Node, token_ids: Sequence[int], limit: int) -> Node | None:
        """The child that is full and whose tokens all are the next ones."""
        if node.end + self.block > limit:
            return None
        return self._child(node, tuple(token_ids[node.end : node.end + self.block]))

    def _child(self, node: Node, token_ids: tuple[int, ...]) -> Node | None:
        # The hash only says where to look: tokens are compared one by one.
        group = node.children.get(self._hash(token_ids), ())
        return next((child for child in group if child.token_ids == token_ids), None)

    def _best_of_children(
        self, node: Node, token_ids: Sequence[int], limit: int, *, with_drafter: bool
    ) -> Match | None:
        """The longest usable prefix that ends within a child of `node`."""
        following = tuple(token_ids[node.end : min(node.end + self.block, limit)])
        best: Match | None = None
        for child in node.each_child():
            end = child.start + _num_common(child.token_ids, following)
            if with_drafter:
                # The last row is computed anew from the anchor's hidden state.
                end = min(end, child.start + child.num_drafter_rows + 1)
            if end <= (best.position if best is not None else child.start):
                continue
            if self.anywhere and not with_drafter:
                best = Match(child, end, None)
                continue
            usable = [
                a for a in child.anchors.values() if a.position <= end and (a.hidden is not None or not with_drafter)
            ]
            anchor = max(usable, key=lambda a: a.position, default=None)
            if anchor is not None and (best is None or anchor.position > best.position):
                best = Match(child, anchor.position, anchor)
        return best

    def insert(self, tenant: Hashable, token_ids: Sequence[int], blocks: Sequence[int], num_drafter_rows: int) -> Node:
        """Take in a prefix (at least one token) whose KV lies in `blocks`; returns the node of its last token.

        num_drafter_rows: rows from the prefix's first for which a block drafter's KV is there too.
        """
        root = self._roots.get(tenant)
        if root is None:
            root = self._roots[tenant] = Node((), 0, -1, None)
        node = root
        for start in range(0, len(token_ids), self.block):
            own = tuple(token_ids[start : start + self.block])
            rows = min(max(num_drafter_rows - start, 0), len(own))
            node = self._insert_block(node, own, blocks[start // self.block], rows)
        return node

    def _insert_block(self, parent: Node, token_ids: tuple[int, ...], block: int, num_drafter_rows: int) -> Node:
        found = self._child(parent, token_ids)
        if found is None:
            found = next((child for child in parent.each_child() if _is_prefix(token_ids, child.token_ids)), None)
        if found is not None:
            # Ours may have what a block drafter needs, where the known one has not.
            if len(found.token_ids) == len(token_ids) and found.num_drafter_rows < num_drafter_rows:
                self._use_block(found, block)
                found.num_drafter_rows = num_drafter_rows
            return found
        shorter = next((child for child in parent.each_child() if _is_prefix(child.token_ids, token_ids)), None)
        if shorter is not None:
            self._unlink(shorter)
            self._use_block(shorter, block)
            shorter.token_ids, shorter.num_drafter_rows = token_ids, num_drafter_rows
            self._link(shorter)
            return shorter
        node = Node(token_ids, parent.end, block, parent, num_drafter_rows)
        self.blocks.share(block)
        self.block_ids.add(block)
        self._link(node)
        return node

    def _use_block(self, node: Node, block: int) -> None:
        if node.block != block:
            self.blocks.share(block)
            self.block_ids.add(block)
            self._let_go(node.block)
            node.block = block

    def _let_go(self, block: int) -> None:
        self.block_ids.remove(block)
        self.blocks.release(block)

    def _link(self, node: Node) -> None:
        assert node.parent is not None
        node.parent.children.setdefault(self._hash(node.token_ids), []).append(node)

    def _unlink(self, node: Node) -> None:
        assert node.parent is not None
        key = self._hash(node.token_ids)
        group = node.parent.children[key]
        group.remove(node)
        if not group:
            del node.parent.children[key]

    def prune(self, node: Node) -> None:
        """Let go of `node` and the nodes above it that lead to no anchor any more."""
        while node.parent is not None and not node.anchors and not node.children:
            self._unlink(node)
            self._let_go(node.block)
            node = node.parent
        if node.parent is None and not node.children:
            self._roots = {tenant: root for tenant, root in self._roots.items() if root is not node}

    def nodes(self) -> Iterator[Node]:
        """All nodes that hold a block, parents first."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.each_child())

    def check_integrity(self) -> None:
        """Raises AssertionError where a rule of the tree is broken."""
        nodes = list(self.nodes())
        assert len(nodes) == self.num_nodes, "a block stands in two nodes"
        assert {node.block for node in nodes} == self.block_ids, "blocks in the tree and in the books differ"
        for node in nodes:
            assert node.parent is not None
            assert node.anchors or node.children, "a node leads to no anchor"
            assert not node.children or len(node.token_ids) == self.block, "a partly filled node has children"
            assert all(node.start < position <= node.end for position in node.anchors), "an anchor outside its node"
            siblings = [n for n in node.parent.each_child() if n is not node]
            assert not any(_is_prefix(node.token_ids, n.token_ids) for n in siblings), "a node begins its sibling"


def _num_common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Tokens that both begin with."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def _is_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return len(a) <= len(b) and b[: len(a)] == a
