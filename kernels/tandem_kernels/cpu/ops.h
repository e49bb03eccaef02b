// SPDX-License-Identifier: Apache-2.0
// Ops that layers.c puts together; their meaning stands at the definitions.
#pragma once

#include <stdint.h>

void tandem_linear(const float *x, long ldx, const void *weight, int is_bf16, const float *residual, float *out, long rows,
                   long n, long k);
void tandem_rms_norm(const float *x, long ldx, const float *weight, float eps, float *out, long ldo, long rows, long dim);
void tandem_gated_rms_norm(const float *x, const float *gate, long ldg, const float *weight, float eps, float *out,
                           long rows, long heads, long dim);
void tandem_rope(const float *x, long ldx, const float *weight, float eps, const float *cos, const float *sin,
                 const int32_t *positions, float *out, long rows, long heads, long dim, long rot);
void tandem_gate_mul(const float *x, long ldx, const float *gate, long ldg, int is_silu, float *out, long rows, long dim);
void tandem_causal_conv(const float *x, long ldx, const float *state, const float *weight, const int32_t *parents,
                        const int32_t *row_slots, float *out, long rows, long channels, long taps);
void tandem_gated_delta(const float *qkv, const float *ab, long ldab, const float *a_log, const float *dt_bias,
                        const float *state, const int32_t *slots, const int32_t *seq_starts, const int32_t *parents,
                        float *out, long num_seqs, long key_heads, long value_heads, long dk, long dv);
void tandem_embed(const void *table, int is_bf16, const int64_t *token_ids, float *out, long rows, long dim);
void tandem_argmax(const float *logits, int32_t *ids, float *logprobs, long rows, long vocab);
void tandem_attention(const float *q, const float *k_new, const float *v_new, long ldv, const float *k_cache,
                      const float *v_cache, const int32_t *block_tables, long table_len, const int32_t *prefix_lens,
                      const int32_t *parents, const int32_t *row_seqs, float scale, float *out, long queries,
                      long first_row, long heads, long kv_heads, long dim, long block);
