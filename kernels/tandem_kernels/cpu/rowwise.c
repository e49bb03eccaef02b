// SPDX-License-Identifier: Apache-2.0
// Ops whose row depends on that row alone (and, for the convolution, on its ancestors). One task a row.
#include "ops.h"
#include "pool.h"
#include "vec.h"

// Rows of one claim: about as many as are worth waking a thread for.
INLINE long row_grain(long elements_per_row) { return 1 + 16384 / elements_per_row; }

typedef struct {
    const float *x, *weight, *gate, *cos, *sin;
    const int32_t *positions;
    float *out;
    long ldx, ldo, ldg, heads, dim, rot;
    float eps;
} norm_args;

INLINE float inverse_rms(const float *x, long dim, float eps) {
    return 1.0f / __builtin_sqrtf(dot(x, x, dim) / (float)dim + eps);
}

INLINE void scale_row(const float *x, float scale, const float *weight, float *y, long dim) {
    for (long i = 0; i < dim; i += LANES) {
        long n = dim - i;
        store_first(y + i, load_first(x + i, n) * splat(scale) * load_first(weight + i, n), n);
    }
}

static void rms_norm_row(void *context, long row, int thread) {
    (void)thread;
    const norm_args *a = context;
    const float *x = a->x + row * a->ldx;
    scale_row(x, inverse_rms(x, a->dim, a->eps), a->weight, a->out + row * a->ldo, a->dim);
}

// out [rows, dim] with row stride ldo = x / rms(x) * weight.
EXPORT void tandem_rms_norm(const float *x, long ldx, const float *weight, float eps, float *out, long ldo, long rows,
                            long dim) {
    norm_args a = {.x = x, .weight = weight, .out = out, .ldx = ldx, .ldo = ldo, .dim = dim, .eps = eps};
    parallel_for(rows, row_grain(dim), rms_norm_row, &a);
}

static void gated_norm_row(void *context, long row, int thread) {
    (void)thread;
    const norm_args *a = context;
    for (long h = 0; h < a->heads; h++) {
        const float *x = a->x + (row * a->heads + h) * a->dim, *gate = a->gate + row * a->ldg + h * a->dim;
        float *y = a->out + (row * a->heads + h) * a->dim;
        scale_row(x, inverse_rms(x, a->dim, a->eps), a->weight, y, a->dim);
        for (long i = 0; i < a->dim; i += LANES) {
            long n = a->dim - i;
            v16 g = load_first(gate + i, n);
            store_first(y + i, load_first(y + i, n) * (g * sigmoid16(g)), n);
        }
    }
}

// out [rows, heads, dim] = x / rms(x) * weight * silu(gate); gate [rows, heads * dim] with row stride ldg.
EXPORT void tandem_gated_rms_norm(const float *x, const float *gate, long ldg, const float *weight, float eps, float *out,
                                  long rows, long heads, long dim) {
    norm_args a = {.x = x, .gate = gate, .ldg = ldg, .weight = weight, .out = out, .heads = heads, .dim = dim, .eps = eps};
    parallel_for(rows, row_grain(heads * dim), gated_norm_row, &a);
}

static void rope_row(void *context, long row, int thread) {
    (void)thread;
    const norm_args *a = context;
    long half = a->rot / 2;
    const float *cos = a->cos + a->positions[row] * half, *sin = a->sin + a->positions[row] * half;
    for (long h = 0; h < a->heads; h++) {
        const float *x = a->x + row * a->ldx + h * a->dim;
        float *y = a->out + (row * a->heads + h) * a->dim;
        if (a->weight) scale_row(x, inverse_rms(x, a->dim, a->eps), a->weight, y, a->dim);
        else memcpy(y, x, a->dim * sizeof(float));
        for (long i = 0; i < half; i++) {
            float lower = y[i], upper = y[i + half];
            y[i] = lower * cos[i] - upper * sin[i];
            y[i + half] = upper * cos[i] + lower * sin[i];
        }
    }
}

// Per head: RMS norm (weight NULL: none), then rotation of the first `rot` dims by the row's position.
// x [rows, heads * dim] with row stride ldx; cos, sin [positions, rot / 2]; out [rows, heads, dim].
EXPORT void tandem_rope(const float *x, long ldx, const float *weight, float eps, const float *cos, const float *sin,
                        const int32_t *positions, float *out, long rows, long heads, long dim, long rot) {
    norm_args a = {.x = x, .weight = weight, .cos = cos, .sin = sin, .positions = positions, .out = out,
                   .ldx = ldx, .heads = heads, .dim = dim, .rot = rot, .eps = eps};
    parallel_for(rows, row_grain(heads * dim), rope_row, &a);
}

typedef struct {
    const float *x, *gate;
    float *out;
    long ldx, ldg, dim;
} gate_args;

static void silu_mul_row(void *context, long row, int thread) {
    (void)thread;
    const gate_args *a = context;
    for (long i = 0; i < a->dim; i += LANES) {
        long n = a->dim - i;
        v16 g = load_first(a->gate + row * a->ldg + i, n), x = load_first(a->x + row * a->ldx + i, n);
        store_first(a->out + row * a->dim + i, g * sigmoid16(g) * x, n);
    }
}

static void sigmoid_mul_row(void *context, long row, int thread) {
    (void)thread;
    const gate_args *a = context;
    for (long i = 0; i < a->dim; i += LANES) {
        long n = a->dim - i;
        v16 g = load_first(a->gate + row * a->ldg + i, n), x = load_first(a->x + row * a->ldx + i, n);
        store_first(a->out + row * a->dim + i, x * sigmoid16(g), n);
    }
}

// out [rows, dim] = x * silu(gate) (is_silu) or x * sigmoid(gate).
EXPORT void tandem_gate_mul(const float *x, long ldx, const float *gate, long ldg, int is_silu, float *out, long rows,
                            long dim) {
    gate_args a = {x, gate, out, ldx, ldg, dim};
    parallel_for(rows, row_grain(dim), is_silu ? silu_mul_row : sigmoid_mul_row, &a);
}

typedef struct {
    const float *x, *state, *weight;
    const int32_t *parents, *row_slots;
    float *out;
    long ldx, channels, taps;
} conv_args;

static void conv_row(void *context, long row, int thread) {
    (void)thread;
    const conv_args *a = context;
    const float *source[16];
    // Newest first: the row itself, its ancestors, then the sequence's kept inputs (stored oldest first).
    const float *kept = a->state + (long)a->row_slots[row] * (a->taps - 1) * a->channels;
    long ancestor = row, num_kept = a->taps - 1;
    for (long tap = a->taps - 1; tap >= 0; tap--) {
        if (ancestor >= 0) {
            source[tap] = a->x + ancestor * a->ldx;
            ancestor = a->parents[ancestor];
        } else {
            source[tap] = kept + --num_kept * a->channels;
        }
    }
    for (long c = 0; c < a->channels; c += LANES) {
        long n = a->channels - c;
        v16 acc = {};
        for (long tap = 0; tap < a->taps; tap++)
            acc = fma16(load_first(source[tap] + c, n), load_first(a->weight + tap * a->channels + c, n), acc);
        store_first(a->out + row * a->channels + c, acc * sigmoid16(acc), n);
    }
}

// Depthwise causal convolution over each row's root-to-node path, then silu; at most 16 taps.
// x [rows, channels] with row stride ldx; state [slots, taps - 1, channels]; weight [taps, channels], oldest tap first.
EXPORT void tandem_causal_conv(const float *x, long ldx, const float *state, const float *weight, const int32_t *parents,
                               const int32_t *row_slots, float *out, long rows, long channels, long taps) {
    conv_args a = {x, state, weight, parents, row_slots, out, ldx, channels, taps};
    parallel_for(rows, row_grain(taps * channels), conv_row, &a);
}

// Keeps the newest taps - 1 inputs after each sequence's accepted rows: state [slots, taps - 1, channels] in place.
// path_rows of sequence s lie in [path_starts[s], path_starts[s + 1]), root first.
EXPORT void tandem_update_conv_state(const float *x, long ldx, float *state, const int32_t *slots,
                                     const int32_t *path_starts, const int32_t *path_rows, long num_seqs, long channels,
                                     long taps) {
    for (long s = 0; s < num_seqs; s++) {
        float *kept = state + slots[s] * (taps - 1) * channels;
        long n = path_starts[s + 1] - path_starts[s];
        for (long t = 0; t < taps - 1; t++) {
            long from_path = n - (taps - 1) + t;
            const float *source = from_path < 0 ? kept + (t + n) * channels
                                                : x + path_rows[path_starts[s] + from_path] * ldx;
            memcpy(kept + t * channels, source, channels * sizeof(float));
        }
    }
}

// out [rows, dim]: rows of a float or bfloat16 table.
EXPORT void tandem_embed(const void *table, int is_bf16, const int64_t *token_ids, float *out, long rows, long dim) {
    for (long row = 0; row < rows; row++) {
        if (!is_bf16) {
            memcpy(out + row * dim, (const float *)table + token_ids[row] * dim, dim * sizeof(float));
            continue;
        }
        const uint16_t *source = (const uint16_t *)table + token_ids[row] * dim;
        uint32_t *target = (uint32_t *)(out + row * dim);
        for (long i = 0; i < dim; i++) target[i] = (uint32_t)source[i] << 16;
    }
}
