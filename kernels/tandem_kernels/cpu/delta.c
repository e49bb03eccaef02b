// SPDX-License-Identifier: Apache-2.0
// The gated delta rule. One step function serves decode, verify, prefill and commit:
//   kv = sum_i S[i] k[i];  so = sum_i S[i] q[i];  d = (v - e kv) beta;  o = fma(so, e, (k.q) d);  S = fma(k, d, S e)
// with S [dk, dv] float, the sums over i ascending. A node starts from its parent's state.
#include "ops.h"
#include "pool.h"
#include "vec.h"

#include <math.h>

typedef struct {
    const float *qkv, *ab, *a_log, *dt_bias;
    float *state, *out;
    const int32_t *seq_starts, *parents, *slots, *path_rows;
    long ldab, key_heads, value_heads, dk, dv;
} delta_args;

typedef struct {
    const float *v;
    float *q, *k;
    float e, beta, kq;
} delta_row;

// Writes x / sqrt(sum x^2 + 1e-6) * scale.
INLINE void l2_normalize(const float *x, float scale, float *y, long n) {
    float inverse = 1.0f / __builtin_sqrtf(dot(x, x, n) + 1e-6f);
    for (long i = 0; i < n; i++) y[i] = x[i] * inverse * scale;
}

// Gates go through double and are rounded once, so that the C library's version does not show.
INLINE void prepare_row(const delta_args *a, long row, long head, delta_row *r) {
    long group = a->value_heads / a->key_heads, key_dim = a->key_heads * a->dk;
    const float *qkv = a->qkv + row * (2 * key_dim + a->value_heads * a->dv);
    const float *ab = a->ab + row * a->ldab;
    l2_normalize(qkv + head / group * a->dk, (float)(1.0 / sqrt((double)a->dk)), r->q, a->dk);
    l2_normalize(qkv + key_dim + head / group * a->dk, 1.0f, r->k, a->dk);
    r->v = qkv + 2 * key_dim + head * a->dv;
    double t = (double)ab[head] + a->dt_bias[head];
    double softplus = t > 20.0 ? t : log1p(exp(t));
    r->e = (float)exp(-exp((double)a->a_log[head]) * softplus);
    r->beta = (float)(1.0 / (1.0 + exp(-(double)ab[a->value_heads + head])));
    r->kq = dot(r->k, r->q, a->dk);
}

// n columns (1..64) from column j; vecs covers them. Columns are independent: their width can't change a bit.
INLINE void step_columns(const delta_row *r, const float *src, float *dst, float *o, long dk, long dv, long j, long n,
                         int vecs) {
    v16 kv[4] = {}, so[4] = {}, d[4];
    for (long i = 0; i < dk; i++) {
        for (int v = 0; v < vecs; v++) {
            v16 s = load_first(src + i * dv + j + v * LANES, n - v * LANES);
            kv[v] = fma16(s, splat(r->k[i]), kv[v]);
            so[v] = fma16(s, splat(r->q[i]), so[v]);
        }
    }
    for (int v = 0; v < vecs; v++) {
        long left = n - v * LANES;
        d[v] = (load_first(r->v + j + v * LANES, left) - splat(r->e) * kv[v]) * splat(r->beta);
        if (o) store_first(o + j + v * LANES, fma16(so[v], splat(r->e), splat(r->kq) * d[v]), left);
    }
    for (long i = 0; i < dk; i++) {
        for (int v = 0; v < vecs; v++) {
            long at = i * dv + j + v * LANES, left = n - v * LANES;
            store_first(dst + at, fma16(splat(r->k[i]), d[v], load_first(src + at, left) * splat(r->e)), left);
        }
    }
}

INLINE void step(const delta_row *r, const float *src, float *dst, float *o, long dk, long dv) {
    long j = 0;
    for (; j + 64 <= dv; j += 64) step_columns(r, src, dst, o, dk, dv, j, 64, 4);
    for (; j < dv; j += LANES) step_columns(r, src, dst, o, dk, dv, j, min_long(dv - j, LANES), 1);
}

// Walks one sequence's tree in pre-order. The last child of a node continues in its parent's buffer, an earlier child
// copies into the next one; since a subtree is contiguous, the buffers of its ancestors stay untouched meanwhile.
static void walk_tree(void *context, long task, int thread) {
    const delta_args *a = context;
    long seq = task / a->value_heads, head = task % a->value_heads;
    long start = a->seq_starts[seq], n = a->seq_starts[seq + 1] - start, size = a->dk * a->dv;
    const float *committed = a->state + (a->slots[seq] * a->value_heads + head) * size;
    int32_t last_child[n], buffer[n], deepest = 0;
    for (long i = 1; i < n; i++) last_child[a->parents[start + i] - start] = i;
    buffer[0] = 0;
    for (long i = 1; i < n; i++) {
        long parent = a->parents[start + i] - start;
        buffer[i] = buffer[parent] + (last_child[parent] != i);
        deepest = buffer[i] > deepest ? buffer[i] : deepest;
    }
    long header = (2 * a->dk * sizeof(float) + 63) & ~63L;
    char *memory = thread_scratch(thread, header + (deepest + 1) * size * sizeof(float));
    float *q = (float *)memory, *buffers = (float *)(memory + header);
    delta_row r = {.q = q, .k = q + a->dk};
    for (long i = 0; i < n; i++) {
        long row = start + i, parent = a->parents[row];
        const float *src = parent < 0 ? committed : buffers + buffer[parent - start] * size;
        prepare_row(a, row, head, &r);
        step(&r, src, buffers + buffer[i] * size, a->out + (row * a->value_heads + head) * a->dv, a->dk, a->dv);
    }
}

// Replays one sequence's accepted rows from the committed state, in place.
static void commit_path(void *context, long task, int thread) {
    const delta_args *a = context;
    long seq = task / a->value_heads, head = task % a->value_heads;
    float *state = a->state + (a->slots[seq] * a->value_heads + head) * a->dk * a->dv;
    float *q = thread_scratch(thread, 2 * a->dk * sizeof(float));
    delta_row r = {.q = q, .k = q + a->dk};
    for (long i = a->seq_starts[seq]; i < a->seq_starts[seq + 1]; i++) {
        prepare_row(a, a->path_rows[i], head, &r);
        step(&r, state, state, NULL, a->dk, a->dv);
    }
}

typedef struct {
    const delta_args *layers;
    long num_layers;
} delta_layers_args;

// Layers vary fastest: each thread gets the heads that it walked in the forward pass, whose state its cache holds.
static void commit_layer_path(void *context, long task, int thread) {
    const delta_layers_args *a = context;
    commit_path((void *)(a->layers + task % a->num_layers), task / a->num_layers, thread);
}

// qkv [rows, 2 * key_heads * dk + value_heads * dv] after the convolution; ab [rows, 2 * value_heads] with row stride
// ldab: decay input a, then write-strength input b. state [slots, value_heads, dk, dv] is read only.
// seq_starts [num_seqs + 1] are row offsets, no sequence is empty; parents [rows] are row indices, -1 for a sequence's
// first row and only there; out [rows, value_heads * dv].
EXPORT void tandem_gated_delta(const float *qkv, const float *ab, long ldab, const float *a_log, const float *dt_bias,
                               const float *state, const int32_t *slots, const int32_t *seq_starts,
                               const int32_t *parents, float *out, long num_seqs, long key_heads, long value_heads,
                               long dk, long dv) {
    delta_args a = {.qkv = qkv, .ab = ab, .a_log = a_log, .dt_bias = dt_bias, .state = (float *)state, .out = out,
                    .seq_starts = seq_starts, .parents = parents, .slots = slots, .ldab = ldab,
                    .key_heads = key_heads, .value_heads = value_heads, .dk = dk, .dv = dv};
    parallel_for(num_seqs * value_heads, 1, walk_tree, &a);
}

// Advances state by the accepted rows: path_rows [path_starts[num_seqs]], those of sequence s in
// [path_starts[s], path_starts[s + 1]), root first.
EXPORT void tandem_gated_delta_commit(const float *qkv, const float *ab, long ldab, const float *a_log,
                                      const float *dt_bias, float *state, const int32_t *slots,
                                      const int32_t *path_starts, const int32_t *path_rows, long num_seqs,
                                      long key_heads, long value_heads, long dk, long dv) {
    delta_args a = {.qkv = qkv, .ab = ab, .a_log = a_log, .dt_bias = dt_bias, .state = state,
                    .seq_starts = path_starts, .path_rows = path_rows, .slots = slots, .ldab = ldab,
                    .key_heads = key_heads, .value_heads = value_heads, .dk = dk, .dv = dv};
    parallel_for(num_seqs * value_heads, 1, commit_path, &a);
}

// The same for num_layers layers of equal sizes: pointers by layer.
EXPORT void tandem_gated_delta_commit_layers(long num_layers, const float *const *qkv, const float *const *ab, long ldab,
                                             const float *const *a_log, const float *const *dt_bias, float *const *state,
                                             const int32_t *slots, const int32_t *path_starts, const int32_t *path_rows,
                                             long num_seqs, long key_heads, long value_heads, long dk, long dv) {
    delta_args layers[num_layers];
    for (long i = 0; i < num_layers; i++)
        layers[i] = (delta_args){.qkv = qkv[i], .ab = ab[i], .a_log = a_log[i], .dt_bias = dt_bias[i], .state = state[i],
                                 .seq_starts = path_starts, .path_rows = path_rows, .slots = slots, .ldab = ldab,
                                 .key_heads = key_heads, .value_heads = value_heads, .dk = dk, .dv = dv};
    delta_layers_args a = {layers, num_layers};
    parallel_for(num_layers * num_seqs * value_heads, 1, commit_layer_path, &a);
}
