# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule's step function, and the walk along a path that repeats it.

A program's warp holds columns of one head's state. Eight of its lanes share a column; each has four keys of every 32,
next to each other. A sum over keys is of a lane's own first, ascending by fma, then of the eight lanes: `tl.sum`.
"""

import triton
import triton.language as tl

from tandem_kernels.gpu.language import INTERPRETED

LANES = tl.constexpr(8)


@triton.jit
def _none():
    """A tuple to append to, of a type that only Triton knows."""
    return ()


@triton.jit
def _load_four(place):
    """Four floats side by side of each lane, at 16 bytes and in memory that no one writes: tl.load can't split them.

    Not ld.global.nc, which the compiler moves down to the first use.
    """
    if INTERPRETED:
        return tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)
    else:
        code: tl.constexpr = "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];"
        return tl.inline_asm_elementwise(code, "=f,=f,=f,=f,l", [place], (tl.float32,) * 4, is_pure=True, pack=1)


@triton.jit
def read(state, operands):
    """state: before the row. Returns what the row adds along k, and the row's output."""
    q, k, v, decay, strength, product = operands
    stored, found = state[0] * k[0][:, None], state[0] * q[0][:, None]
    for i in tl.static_range(1, len(state)):
        stored = tl.fma(state[i], tl.broadcast_to(k[i][:, None], state[i].shape), stored)
        found = tl.fma(state[i], tl.broadcast_to(q[i][:, None], state[i].shape), found)
    delta = (v - decay * tl.sum(stored, 0)) * strength
    found = tl.sum(found, 0)
    return delta, tl.fma(found, decay + tl.zeros_like(found), product * delta)


@triton.jit
def _step(state, operands):
    """Returns the state after the row and the row's output."""
    delta, out = read(state, operands)
    after = _none()
    for i in tl.static_range(len(state)):
        k, added = tl.broadcast(operands[1][i][:, None], delta[None, :])
        after += (tl.fma(k, added, state[i] * operands[3]),)
    return after, out


@triton.jit
def _place(i: tl.constexpr, key_stride, columns):
    """Keys of part i of a state, and where it lies."""
    keys = (4 * tl.arange(0, LANES) + (i // 4 * 4 * LANES + i % 4))[:, None]
    return keys, keys * key_stride + columns[None, :]


@triton.jit
def load_state(state, key_stride, columns, dk: tl.constexpr, dv: tl.constexpr, KEYS: tl.constexpr):
    """A head's columns: a part for each key that a lane has."""
    parts = _none()
    for i in tl.static_range(KEYS // LANES):
        keys, place = _place(i, key_stride, columns)
        parts += (tl.load(state + place, mask=(keys < dk) & (columns < dv)[None, :], other=0.0),)
    return parts


@triton.jit
def store_state(state, parts, key_stride, columns, dk: tl.constexpr, dv: tl.constexpr, is_wanted):
    for i in tl.static_range(len(parts)):
        keys, place = _place(i, key_stride, columns)
        tl.store(state + place, parts[i], mask=(keys < dk) & (columns < dv)[None, :] & is_wanted)


@triton.jit
def load_operands(
    rows,
    row,
    width: tl.constexpr,
    head,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    dv: tl.constexpr,
    KEYS: tl.constexpr,
    columns,
):
    """q and k by parts as the state's, v [columns], decay, strength and q.k of one prepared row and head."""
    source = rows + row * width
    key_head = head // (value_heads // key_heads)
    q_place = source + key_head * KEYS + 4 * tl.arange(0, LANES)
    q, k = _none(), _none()
    for start in tl.static_range(0, KEYS, 4 * LANES):
        q += _load_four(q_place + start)
        k += _load_four(q_place + key_heads * KEYS + start)
    values = source + 2 * key_heads * KEYS
    v = tl.load(values + head * dv + columns, mask=columns < dv, other=0.0)
    scalars = values + value_heads * dv
    decay, strength = tl.load(scalars + head), tl.load(scalars + value_heads + head)
    return q, k, v, decay, strength, tl.load(scalars + 2 * value_heads + key_head)


@triton.jit
def store_output(out, row, o, head, value_heads: tl.constexpr, dv: tl.constexpr, columns):
    # Of the state's shape, so that the values are stored by lanes that hold them.
    lanes = tl.arange(0, LANES)[:, None]
    place = out + row * value_heads * dv + head * dv + columns[None, :] + lanes * 0
    tl.store(place, tl.broadcast_to(o[None, :], place.shape), mask=(lanes == 0) & (columns < dv)[None, :])


@triton.jit
def _row(path, root, t, IS_COMMIT: tl.constexpr):
    if IS_COMMIT:
        return tl.load(path + t).to(tl.int64)
    else:
        return tl.where(root >= 0, root + t, tl.load(path + t, mask=root < 0, other=0)).to(tl.int64)


@triton.jit
def walk_path(
    rows,
    state,
    out,
    path,
    root,
    length,
    steps,
    width: tl.constexpr,
    head,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    dv: tl.constexpr,
    KEYS: tl.constexpr,
    columns,
    SETS: tl.constexpr,
    IS_COMMIT: tl.constexpr,
):
    """The state after `steps` rows of a path of `length`.

    While a row is worked on, the operands of the next SETS - 1 are on their way. A turn of the loop is SETS rows, so
    that operands stay in the registers they are loaded to: to copy them is to wait for them. Rows over come first,
    where their operands are waited for together with the state.
    """
    begin = steps % SETS
    numbers, sets = _none(), _none()
    for i in tl.static_range(SETS - 1):
        row = _row(path, root, min(begin + i, length - 1), IS_COMMIT)
        numbers += (row,)
        sets += (load_operands(rows, row, width, head, key_heads, value_heads, dv, KEYS, columns),)
    for t in range(begin):
        row = _row(path, root, t, IS_COMMIT)
        operands = load_operands(rows, row, width, head, key_heads, value_heads, dv, KEYS, columns)
        state, o = _step(state, operands)
        if not IS_COMMIT:
            store_output(out, row, o, head, value_heads, dv, columns)
    for t in range(begin, steps, SETS):
        for i in tl.static_range(SETS):
            row = _row(path, root, min(t + i + SETS - 1, length - 1), IS_COMMIT)
            loaded = load_operands(rows, row, width, head, key_heads, value_heads, dv, KEYS, columns)
            state, o = _step(state, sets[0])
            if not IS_COMMIT:
                store_output(out, numbers[0], o, head, value_heads, dv, columns)
            numbers, sets = numbers[1:], sets[1:]
            numbers += (row,)
            sets += (loaded,)
    return state
