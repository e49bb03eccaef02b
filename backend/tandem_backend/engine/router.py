# SPDX-License-Identifier: Apache-2.0
"""Router: which draft nodes are worth their rows. It spends one row budget over all sequences of a joint round.

Kept is the set that maximises (sequences + sum of q) / (verify(rows) + draft + commit), q being the probability that a
node's whole path is accepted; what rows add to verify is charged with a margin. A path's q only falls with depth, so
the best set of any size is the best nodes first.
"""

import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tandem_backend.engine.proposal_tree import ProposalTree
from tandem_backend.errors import ConfigError

# Measured with the bundled model on two cores with AVX2 (tandem bench verify-curve); a machine's speed is learned.
DEFAULT_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
DEFAULT_MS = (1.23, 1.34, 1.44, 1.67, 2.38, 2.44, 3.34, 4.22, 6.15, 7.92, 11.64, 14.40)


# A row or a call must promise more than it costs: what it brings is an estimate, and the host works for it too.
MARGIN = 1.3


@dataclass(slots=True)
class VerifyCurve:
    """The staircase verify(rows): milliseconds of a pass measured at some row counts, and how this machine compares."""

    rows: tuple[int, ...] = DEFAULT_ROWS
    milliseconds: tuple[float, ...] = DEFAULT_MS
    scale: float = 1.0
    shape: dict[int, float] = field(default_factory=dict, repr=False)  # what was asked for before

    def cost(self, rows: int) -> float:
        return self.scale * self._at(rows)

    def learn(self, rows: int, milliseconds: float) -> None:
        """Follow the measured passes slowly, so that one stall does not count."""
        ratio = milliseconds / self._at(rows)
        self.scale += 0.02 * (min(ratio, 4.0 * self.scale) - self.scale)

    def _at(self, rows: int) -> float:
        known = self.shape.get(rows)
        if known is None:
            known = self.shape[rows] = self._interpolated(rows)
        return known

    def _interpolated(self, rows: int) -> float:
        xs, ys = self.rows, self.milliseconds
        i = 1
        while i < len(xs) - 1 and xs[i] < rows:
            i += 1
        slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
        return max(ys[i - 1] + slope * (rows - xs[i - 1]), ys[0])


def load_verify_curve(path: Path | None, measured: Sequence[tuple[int, float]] = ()) -> VerifyCurve:
    """The table that `tandem bench verify-curve` wrote, else what was measured at load, else the built-in one.

    measured: row counts and milliseconds. Raises ConfigError naming the file.
    """
    if path is None:
        return VerifyCurve(*zip(*measured, strict=True)) if len(measured) > 1 else VerifyCurve()  # type: ignore[arg-type]
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        rows, milliseconds = zip(
            *((int(row["rows"]), float(row["milliseconds"])) for row in table["rows"]), strict=True
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"verify_curve: {path} is no table of tandem bench verify-curve: {error!r}") from error
    if len(rows) < 2 or any(b <= a for a, b in pairwise(rows)) or min(milliseconds) <= 0:
        raise ConfigError(f"verify_curve: {path} needs two or more ascending row counts with positive times")
    return VerifyCurve(rows, milliseconds)


@dataclass(slots=True)
class Calibration:
    """Learns, by drafter and raw score, how often a node is taken once its parent was. Old evidence fades."""

    counts: dict[tuple[str, int], list[float]] = field(default_factory=dict)

    PRIOR_WEIGHT = 8.0
    MEMORY = 400.0  # trials after which half of the evidence is dropped

    def probability(self, drafter: str, score: float) -> float:
        taken, tried = self.counts.get((drafter, _bucket(score)), (0.0, 0.0))
        return (taken + self.PRIOR_WEIGHT * score) / (tried + self.PRIOR_WEIGHT)

    def learn(self, drafter: str, score: float, *, taken: bool) -> None:
        count = self.counts.setdefault((drafter, _bucket(score)), [0.0, 0.0])
        count[0] += taken
        count[1] += 1.0
        if count[1] >= self.MEMORY:
            count[0], count[1] = count[0] / 2, count[1] / 2


def _bucket(score: float) -> int:
    """Finer towards 1, where drafts are long."""
    if score >= 0.9:
        return 9 + min(int((score - 0.9) * 50), 4)
    return int(score * 10)


@dataclass(frozen=True, slots=True)
class Prices:
    token_ms: float  # what a token costs in a round that drafts nothing
    row_ms: float  # what a draft row adds to the pass


@dataclass(slots=True)
class Router:
    """Cuts proposals. `always` keeps every node that fits the budget: for checks, not for speed."""

    curve: VerifyCurve
    row_budget: int
    always: bool = False

    def prices(self, num_sequences: int, num_other_rows: int, commit_ms: float) -> Prices:
        """num_other_rows: anchors and prompt rows of the round."""
        plain = self.curve.cost(num_other_rows)
        return Prices(
            token_ms=(plain + commit_ms) / max(num_sequences, 1),
            row_ms=MARGIN * (self.curve.cost(num_other_rows + 4) - plain) / 4,
        )

    def cut(self, trees: Sequence[ProposalTree], num_other_rows: int, fixed_ms: float) -> list[set[int]]:
        """The nodes to keep of each tree.

        num_other_rows: anchors and prompt rows of the round; fixed_ms: drafting and commit, whatever is kept.
        """
        kept: list[set[int]] = [set() for _ in trees]
        if not any(tree.token_ids for tree in trees):
            return kept
        heap = [(-tree.paths[node], i, node) for i, tree in enumerate(trees) for node in tree.children[-1]]
        heapq.heapify(heap)
        order: list[tuple[int, int, float]] = []
        num_taken = [0] * len(trees)
        budget = self.row_budget - len(trees)
        while heap and len(order) < budget:
            negative_q, i, node = heapq.heappop(heap)
            if num_taken[i] == trees[i].max_nodes:
                continue
            num_taken[i] += 1
            order.append((i, node, -negative_q))
            for child in trees[i].children[node]:
                heapq.heappush(heap, (-trees[i].paths[child], i, child))
        count = self._best_count(len(trees), [q for _, _, q in order], num_other_rows, fixed_ms)
        for i, node, _ in order[:count]:
            kept[i].add(node)
        return kept

    def _best_count(self, num_sequences: int, gains: Sequence[float], num_other_rows: int, fixed_ms: float) -> int:
        if self.always:
            return len(gains)
        expected, plain_ms = float(num_sequences), self.curve.cost(num_other_rows)
        best, best_rate = 0, expected / (plain_ms + fixed_ms)
        for n, gain in enumerate(gains, start=1):
            expected += gain
            added_ms = self.curve.cost(num_other_rows + n) - plain_ms
            rate = expected / (plain_ms + MARGIN * added_ms + fixed_ms)
            if rate > best_rate:
                best, best_rate = n, rate
        return best
