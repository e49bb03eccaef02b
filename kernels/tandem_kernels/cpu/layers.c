// SPDX-License-Identifier: Apache-2.0
// Whole residual blocks out of the ops, one call each: at one row an op takes a few microseconds, so calling them one by
// one from Python would cost as much as the work. The bits are those of the ops called one after the other.
#include "ops.h"
#include "vec.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct {
    const void *data;
    int64_t is_bf16, n, k;
} packed_weight;

typedef struct {
    const float *norm, *q_norm, *k_norm, *cos, *sin;
    packed_weight input, output;
    int64_t heads, kv_heads, dim, rot, is_gated;
    double eps, scale;
} attention_layer;

typedef struct {
    const float *norm, *out_norm, *conv, *a_log, *dt_bias;
    packed_weight input, output;
    int64_t key_heads, value_heads, dk, dv, taps;
    double eps;
} delta_layer;

typedef struct {
    const float *norm;
    packed_weight gate_up, down;
    double eps;
} mlp_layer;

typedef struct {
    const void *embedding;
    const float *embedding_norm, *hidden_norm, *out_norm;
    const attention_layer *attention;
    const mlp_layer *mlp;
    packed_weight fc, head;
    int64_t embedding_is_bf16;
    double eps;
} mtp_layer;

// Intermediate results of one block. One caller at a time; grown to the largest pass and kept.
static pthread_mutex_t workspace_lock = PTHREAD_MUTEX_INITIALIZER;
static float *workspace = NULL;
static long workspace_floats = 0;

static float *take_workspace(long floats) {
    pthread_mutex_lock(&workspace_lock);
    if (workspace_floats < floats) {
        free(workspace);
        workspace = aligned_alloc(64, (floats * sizeof(float) + 4095) & ~4095L);
        workspace_floats = workspace ? floats : 0;
    }
    if (!workspace) abort();
    return workspace;
}

static void return_workspace(void) { pthread_mutex_unlock(&workspace_lock); }

INLINE void apply(const packed_weight *w, const float *x, const float *residual, float *out, long rows) {
    tandem_linear(x, w->k, w->data, (int)w->is_bf16, residual, out, rows, w->n, w->k);
}

// out = x + attention(norm(x)). x, out [rows, hidden]; keys, values [first_row + rows, kv_heads * dim]: rows before
// first_row are earlier rows of the pass, this call writes the rest. The others as in tandem_attention.
EXPORT void tandem_attention_layer(const attention_layer *l, const float *x, float *keys, float *values, float *out,
                                   long rows, long first_row, const int32_t *positions, const int32_t *parents,
                                   const int32_t *row_seqs, const int32_t *prefix_lens, const int32_t *block_tables,
                                   long table_len, const float *k_cache, const float *v_cache, long block) {
    long hidden = l->input.k, width = l->input.n, q_dim = l->heads * l->dim, kv_dim = l->kv_heads * l->dim;
    long k_at = l->is_gated ? 2 * q_dim : q_dim;
    float *normed = take_workspace(rows * (hidden + width + 2 * q_dim));
    float *projected = normed + rows * hidden, *q = projected + rows * width, *mixed = q + rows * q_dim;
    tandem_rms_norm(x, hidden, l->norm, (float)l->eps, normed, hidden, rows, hidden);
    apply(&l->input, normed, NULL, projected, rows);
    tandem_rope(projected, width, l->q_norm, (float)l->eps, l->cos, l->sin, positions, q, rows, l->heads, l->dim, l->rot);
    tandem_rope(projected + k_at, width, l->k_norm, (float)l->eps, l->cos, l->sin, positions, keys + first_row * kv_dim,
                rows, l->kv_heads, l->dim, l->rot);
    for (long row = 0; row < rows; row++)
        memcpy(values + (first_row + row) * kv_dim, projected + row * width + k_at + kv_dim, kv_dim * sizeof(float));
    tandem_attention(q, keys, values, kv_dim, k_cache, v_cache, block_tables, table_len, prefix_lens, parents, row_seqs,
                     (float)l->scale, mixed, rows, first_row, l->heads, l->kv_heads, l->dim, block);
    if (l->is_gated) tandem_gate_mul(mixed, q_dim, projected + q_dim, width, 0, mixed, rows, q_dim);
    apply(&l->output, mixed, x, out, rows);
    return_workspace();
}

// out = x + delta(norm(x)). projected [rows, input.n] and qkv [rows, channels] are kept for commit.
EXPORT void tandem_delta_layer(const delta_layer *l, const float *x, float *projected, float *qkv, float *out, long rows,
                               long num_seqs, const int32_t *parents, const int32_t *row_slots, const int32_t *slots,
                               const int32_t *seq_starts, const float *conv_state, const float *delta_state) {
    long hidden = l->input.k, width = l->input.n, value_dim = l->value_heads * l->dv;
    long channels = 2 * l->key_heads * l->dk + value_dim, ab_at = channels + value_dim;
    float *normed = take_workspace(rows * (hidden + 2 * value_dim));
    float *mixed = normed + rows * hidden, *gated = mixed + rows * value_dim;
    tandem_rms_norm(x, hidden, l->norm, (float)l->eps, normed, hidden, rows, hidden);
    apply(&l->input, normed, NULL, projected, rows);
    tandem_causal_conv(projected, width, conv_state, l->conv, parents, row_slots, qkv, rows, channels, l->taps);
    tandem_gated_delta(qkv, projected + ab_at, width, l->a_log, l->dt_bias, delta_state, slots, seq_starts, parents, mixed,
                       num_seqs, l->key_heads, l->value_heads, l->dk, l->dv);
    tandem_gated_rms_norm(mixed, projected + channels, width, l->out_norm, (float)l->eps, gated, rows, l->value_heads,
                          l->dv);
    apply(&l->output, gated, x, out, rows);
    return_workspace();
}

// out = x + down(silu(gate) * up), gate and up of norm(x). x, out [rows, hidden].
EXPORT void tandem_mlp_layer(const mlp_layer *l, const float *x, float *out, long rows) {
    long hidden = l->gate_up.k, width = l->gate_up.n / 2;
    float *normed = take_workspace(rows * (hidden + 3 * width));
    float *both = normed + rows * hidden, *gated = both + rows * 2 * width;
    tandem_rms_norm(x, hidden, l->norm, (float)l->eps, normed, hidden, rows, hidden);
    apply(&l->gate_up, normed, NULL, both, rows);
    tandem_gate_mul(both + width, 2 * width, both, 2 * width, 1, gated, rows, width);
    apply(&l->down, gated, x, out, rows);
    return_workspace();
}

// out = norm(layer(fc([norm(embed(token)), norm(hidden)]))), all [rows, hidden]; scratch [rows, 4 * hidden]. The others as
// in tandem_attention_layer.
EXPORT void tandem_mtp_layer(const mtp_layer *l, const int64_t *token_ids, const float *hidden, float *keys, float *values,
                             float *scratch, float *out, long rows, long first_row, const int32_t *positions,
                             const int32_t *parents, const int32_t *row_seqs, const int32_t *prefix_lens,
                             const int32_t *block_tables, long table_len, const float *k_cache, const float *v_cache,
                             long block) {
    long dim = l->fc.n;
    float *both = scratch, *x = both + rows * 2 * dim, *y = x + rows * dim;
    tandem_embed(l->embedding, (int)l->embedding_is_bf16, token_ids, x, rows, dim);
    tandem_rms_norm(x, dim, l->embedding_norm, (float)l->eps, both, 2 * dim, rows, dim);
    tandem_rms_norm(hidden, dim, l->hidden_norm, (float)l->eps, both + dim, 2 * dim, rows, dim);
    apply(&l->fc, both, NULL, x, rows);
    tandem_attention_layer(l->attention, x, keys, values, y, rows, first_row, positions, parents, row_seqs, prefix_lens,
                           block_tables, table_len, k_cache, v_cache, block);
    tandem_mlp_layer(l->mlp, y, x, rows);
    tandem_rms_norm(x, dim, l->out_norm, (float)l->eps, out, dim, rows, dim);
}

// The likeliest token of each row of hidden [rows, hidden] and its log-probability; logits [rows, head.n] is scratch.
EXPORT void tandem_mtp_guess(const mtp_layer *l, const float *hidden, float *logits, int32_t *ids, float *logprobs,
                             long rows) {
    apply(&l->head, hidden, NULL, logits, rows);
    tandem_argmax(logits, ids, logprobs, rows, l->head.n);
}
