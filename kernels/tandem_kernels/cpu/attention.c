// SPDX-License-Identifier: Apache-2.0
// Attention of each row over its committed prefix (paged blocks) and its own root-to-node path (rows of this pass).
// Keys are visited by absolute position in blocks of `block` positions: softmax partials per block, merged in block
// order. Whether a key lies in a cache page or in this pass can't show: both are read through the same pointer list.
#include "ops.h"
#include "pool.h"
#include "vec.h"

typedef struct {
    const float *q, *k_new, *v_new, *k_cache, *v_cache;
    const int32_t *block_tables, *prefix_lens, *parents, *row_seqs;
    float *out;
    long ldv, table_len, first_row, heads, kv_heads, dim, block;
    float scale;
} attention_args;

// n values from dimension `first`, each summed over the keys in order; vecs covers them.
INLINE void weigh_values(const float *weights, const float *const *values, long count, long first, long n, int vecs,
                         float *partial) {
    v16 y[4] = {};
    for (long j = 0; j < count; j++)
        for (int v = 0; v < vecs; v++)
            y[v] = fma16(splat(weights[j]), load_first(values[j] + first + v * LANES, n - v * LANES), y[v]);
    for (int v = 0; v < vecs; v++) store_first(partial + first + v * LANES, y[v], n - v * LANES);
}

// Partial softmax of one block of `count` keys: scores, maximum, weights, sum, weighted values; merged into the running
// (top, sum, acc). Lanes past `count` have score -inf and weight exactly 0.
INLINE void attend_block(const float *q, const float *const *keys, const float *const *values, long count, long dim,
                         float scale, float *weights, float *partial, float *top, float *sum, float *acc) {
    long padded = (count + LANES - 1) / LANES * LANES;
    for (long j = 0; j < count; j++) weights[j] = dot(q, keys[j], dim) * scale;
    for (long j = count; j < padded; j++) weights[j] = -__builtin_inff();
    v16 best = load16(weights);
    for (long j = LANES; j < padded; j += LANES) {
        v16 s = load16(weights + j);
        best = select16(s > best, s, best);
    }
    float block_top = max16(best);
    v16 total = {};
    for (long j = 0; j < padded; j += LANES) {
        v16 p = exp16(load16(weights + j) - splat(block_top));
        store16(weights + j, p);
        total += p;
    }
    long i = 0;
    for (; i + 4 * LANES <= dim; i += 4 * LANES) weigh_values(weights, values, count, i, 4 * LANES, 4, partial);
    for (; i < dim; i += LANES) weigh_values(weights, values, count, i, min_long(dim - i, LANES), 1, partial);
    float new_top = block_top > *top ? block_top : *top;
    v16 keep = exp16(splat(*top - new_top)), add = exp16(splat(block_top - new_top));
    *sum = __builtin_fmaf(*sum, keep[0], sum16(total) * add[0]);
    for (long i = 0; i < dim; i += LANES) {
        long n = dim - i;
        store_first(acc + i, fma16(load_first(acc + i, n), keep, load_first(partial + i, n) * add), n);
    }
    *top = new_top;
}

static void attend_row(void *context, long task, int thread) {
    const attention_args *a = context;
    long query = task / a->kv_heads, row = a->first_row + query;
    long kv_head = task % a->kv_heads, group = a->heads / a->kv_heads;
    long seq = a->row_seqs[row], prefix = a->prefix_lens[seq], depth = 0;
    for (long r = row; r >= 0; r = a->parents[r]) depth++;
    long length = prefix + depth, weights_len = a->block + LANES;
    long bytes = depth * sizeof(int32_t) + 64 + 2 * a->block * sizeof(float *) +
                 (weights_len + a->dim + group * (a->dim + 2)) * sizeof(float);
    char *memory = thread_scratch(thread, bytes);
    const float **keys = (const float **)memory, **values = keys + a->block;
    float *weights = (float *)(values + a->block), *partial = weights + weights_len, *acc = partial + a->dim;
    float *top = acc + group * a->dim, *sum = top + group;
    int32_t *path = (int32_t *)(sum + group);
    for (long r = row, i = depth; r >= 0; r = a->parents[r]) path[--i] = r;
    memset(acc, 0, group * a->dim * sizeof(float));
    for (long g = 0; g < group; g++) { top[g] = -__builtin_inff(); sum[g] = 0.0f; }

    for (long first = 0; first < length; first += a->block) {
        long count = min_long(a->block, length - first);
        for (long j = 0; j < count; j++) {
            long position = first + j;
            if (position < prefix) {
                long page = a->block_tables[seq * a->table_len + first / a->block];
                long at = ((page * a->kv_heads + kv_head) * a->block + j) * a->dim;
                keys[j] = a->k_cache + at;
                values[j] = a->v_cache + at;
            } else {
                long r = path[position - prefix];
                keys[j] = a->k_new + (r * a->kv_heads + kv_head) * a->dim;
                values[j] = a->v_new + r * a->ldv + kv_head * a->dim;
            }
        }
        for (long g = 0; g < group; g++)
            attend_block(a->q + (query * a->heads + kv_head * group + g) * a->dim, keys, values, count, a->dim, a->scale,
                         weights, partial, top + g, sum + g, acc + g * a->dim);
    }
    for (long g = 0; g < group; g++) {
        float *out = a->out + (query * a->heads + kv_head * group + g) * a->dim;
        for (long i = 0; i < a->dim; i++) out[i] = acc[g * a->dim + i] / sum[g];
    }
}

// q [queries, heads, dim]: those of rows [first_row, first_row + queries); the rows before are only read as ancestors.
// k_new [rows, kv_heads, dim]; v_new [rows, kv_heads * dim] with row stride ldv;
// k_cache, v_cache [blocks, kv_heads, block, dim]; block_tables [seqs, table_len]; prefix_lens [seqs];
// parents, row_seqs [rows]; out [queries, heads * dim]. Only positions below a sequence's prefix length are read.
EXPORT void tandem_attention(const float *q, const float *k_new, const float *v_new, long ldv, const float *k_cache,
                             const float *v_cache, const int32_t *block_tables, long table_len,
                             const int32_t *prefix_lens, const int32_t *parents, const int32_t *row_seqs, float scale,
                             float *out, long queries, long first_row, long heads, long kv_heads, long dim,
                             long block) {
    attention_args a = {q, k_new, v_new, k_cache, v_cache, block_tables, prefix_lens, parents, row_seqs,
                        out, ldv, table_len, first_row, heads, kv_heads, dim, block, scale};
    parallel_for(queries * kv_heads, 1, attend_row, &a);
}

// Copies rows into cache places: place = block index * block + offset, below 0: nowhere. n pairs of (row, place).
EXPORT void tandem_store_kv(const float *k_new, const float *v_new, long ldv, float *k_cache, float *v_cache,
                            const int32_t *rows, const int64_t *places, long n, long kv_heads, long dim, long block) {
    for (long i = 0; i < n; i++) {
        if (places[i] < 0) continue;
        for (long h = 0; h < kv_heads; h++) {
            long at = ((places[i] / block * kv_heads + h) * block + places[i] % block) * dim;
            memcpy(k_cache + at, k_new + (rows[i] * kv_heads + h) * dim, dim * sizeof(float));
            memcpy(v_cache + at, v_new + rows[i] * ldv + h * dim, dim * sizeof(float));
        }
    }
}
