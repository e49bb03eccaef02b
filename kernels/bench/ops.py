# SPDX-License-Identifier: Apache-2.0
"""Times the ops that cost the most at 1 to 64 rows, in the sizes of the bundled model.

An op is timed only if its rows have the bits that they have when each is computed in a call of its own. Run it with the
Python that the kernels are installed for: `python kernels/bench/ops.py [--threads N] [--repeats N]`.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import tandem_kernels as kernels
import torch
from torch import Tensor

ROWS = (1, 2, 4, 8, 16, 32, 64)
HIDDEN, MLP, VOCAB = 384, 640, 8192
HEADS, KV_HEADS, HEAD_DIM, BLOCK, PREFIX_LEN = 6, 2, 64, 64, 256
KEY_HEADS, VALUE_HEADS, DELTA_DIM = 3, 6, 64
NUM_WARM_UPS = 5


@dataclass(frozen=True)
class Op:
    """`run(n)` computes the first n rows in one call, `walk(n)` the same rows in n calls; both [n, outputs]."""

    name: str
    run: Callable[[int], Tensor]
    walk: Callable[[int], Tensor]


def chain(start: int, end: int) -> Tensor:
    """Parents of rows that follow each other."""
    return torch.arange(-1, end - start - 1, dtype=torch.int32)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def linear_op(name: str, outputs: int, inputs: int, generator: torch.Generator) -> Op:
    weight = kernels.pack_weight(torch.randn(outputs, inputs, generator=generator).bfloat16())
    x = torch.randn(max(ROWS), inputs, generator=generator)
    return Op(
        name,
        lambda n: kernels.linear(x[:n], weight),
        lambda n: torch.cat([kernels.linear(x[i : i + 1], weight) for i in range(n)]),
    )


def attention_op(generator: torch.Generator) -> Op:
    """A chain after PREFIX_LEN positions; the walk stores each row's keys and values before the next."""
    num_blocks = (PREFIX_LEN + max(ROWS) + BLOCK - 1) // BLOCK
    cache = [torch.randn(num_blocks, KV_HEADS, BLOCK, HEAD_DIM, generator=generator) for _ in range(2)]
    q = torch.randn(max(ROWS), HEADS, HEAD_DIM, generator=generator)
    k = torch.randn(max(ROWS), KV_HEADS, HEAD_DIM, generator=generator)
    v = torch.randn(max(ROWS), KV_HEADS * HEAD_DIM, generator=generator)
    table = torch.arange(num_blocks, dtype=torch.int32)[None]

    def attend(start: int, end: int, keys: Tensor, values: Tensor) -> Tensor:
        rows = slice(start, end)
        seqs = torch.zeros(end - start, dtype=torch.int32)
        prefix, parents, scale = ints(PREFIX_LEN + start), chain(start, end), HEAD_DIM**-0.5
        return kernels.attention(q[rows], k[rows], v[rows], keys, values, table, prefix, parents, seqs, scale)

    def walk(n: int) -> Tensor:
        keys, values = (part.clone() for part in cache)
        outputs = []
        for i in range(n):
            outputs.append(attend(i, i + 1, keys, values))
            kernels.store_kv(k[i : i + 1], v[i : i + 1], keys, values, ints(0), torch.tensor([PREFIX_LEN + i]))
        return torch.cat(outputs)

    return Op("attention", lambda n: attend(0, n, *cache), walk)


def delta_op(generator: torch.Generator) -> Op:
    """A chain from a state of noise; the walk commits each row before the next."""
    channels = (2 * KEY_HEADS + VALUE_HEADS) * DELTA_DIM
    qkv = torch.randn(max(ROWS), channels, generator=generator)
    ab = torch.randn(max(ROWS), 2 * VALUE_HEADS, generator=generator)
    a_log, dt_bias = torch.randn(2, VALUE_HEADS, generator=generator) - 1
    entry = torch.randn(1, VALUE_HEADS, DELTA_DIM, DELTA_DIM, generator=generator)

    def step(start: int, end: int, state: Tensor) -> Tensor:
        rows, starts = slice(start, end), ints(0, end - start)
        parents = chain(start, end)
        return kernels.gated_delta(qkv[rows], ab[rows], a_log, dt_bias, state, ints(0), starts, parents, KEY_HEADS)

    def walk(n: int) -> Tensor:
        state, outputs = entry.clone(), []
        for i in range(n):
            outputs.append(step(i, i + 1, state))
            row = slice(i, i + 1)
            kernels.gated_delta_commit(
                qkv[row], ab[row], a_log, dt_bias, state, ints(0), ints(0, 1), ints(0), KEY_HEADS
            )
        return torch.cat(outputs)

    return Op("gated_delta", lambda n: step(0, n, entry), walk)


def all_ops() -> list[Op]:
    generator = torch.Generator().manual_seed(1)
    return [
        linear_op(f"linear {HIDDEN}->{2 * MLP}", 2 * MLP, HIDDEN, generator),
        linear_op(f"linear {MLP}->{HIDDEN}", HIDDEN, MLP, generator),
        linear_op(f"linear {HIDDEN}->{VOCAB}", VOCAB, HIDDEN, generator),
        attention_op(generator),
        delta_op(generator),
    ]


def first_wrong_row(op: Op, num_rows: int) -> int | None:
    """The first row whose bits depend on the rows beside it."""
    together, alone = (out.contiguous().view(torch.int32) for out in (op.run(num_rows), op.walk(num_rows)))
    wrong = (together != alone).any(-1).nonzero()
    return int(wrong[0]) if len(wrong) else None


def median_us(op: Op, num_rows: int, repeats: int) -> float:
    times = []
    for _ in range(NUM_WARM_UPS + repeats):
        begun = time.perf_counter()
        op.run(num_rows)
        times.append(1e6 * (time.perf_counter() - begun))
    return statistics.median(times[NUM_WARM_UPS:])


def measure(ops: list[Op], repeats: int) -> dict[str, dict[int, float]]:
    """Microseconds by op and rows. Raises ValueError naming the op whose rows depend on each other's presence."""
    figures: dict[str, dict[int, float]] = {}
    for op in ops:
        for num_rows in ROWS:
            wrong = first_wrong_row(op, num_rows)
            if wrong is not None:
                raise ValueError(f"{op.name}: row {wrong} of {num_rows} has other bits than alone; not timed")
        figures[op.name] = {num_rows: median_us(op, num_rows, repeats) for num_rows in ROWS}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: usable cores")
    parser.add_argument("--repeats", type=int, default=200, help="figures are medians; default: %(default)s")
    options = parser.parse_args()
    num_threads = kernels.set_num_threads(options.threads)
    try:
        figures = measure(all_ops(), options.repeats)
    except ValueError as error:
        sys.exit(str(error))
    print("microseconds".ljust(18) + "".join(f"{n:>9}" for n in ROWS))
    for name, by_rows in figures.items():
        print(name.ljust(18) + "".join(f"{us:9.1f}" for us in by_rows.values()))
    print(json.dumps({"benchmark": "ops", "threads": num_threads, "microseconds": figures}))


if __name__ == "__main__":
    main()
