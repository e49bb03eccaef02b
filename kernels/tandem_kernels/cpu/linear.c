// SPDX-License-Identifier: Apache-2.0
// out[r][n] = sum over k of x[r][k] * w[n][k]: one accumulator per output, k ascending, one fma per term. Neither the
// row count nor the tile shape can enter, so any mix of rows gives each row the same bits. Weights are packed into
// panels of LANES outputs, each read from end to end: float panels [K][LANES]; bfloat16 panels [ceil(K/2)][LANES] of
// words that hold k (low half) and k+1 (high half).
#include "ops.h"
#include "pool.h"
#include "vec.h"

#define TASK_PANELS 4 // panels are padded to a multiple of it
#define MAX_VECS 4
#define UNROLL _Pragma("unroll")
// A tile's sums, its weights and an input fill the registers without a spill: 32 of 16 lanes, or 16 of 8.
#if defined(__AVX512F__)
#define TILE_ROWS 6
#define TILE_VECS(rows) 4
#else
#define TILE_ROWS 5
#define TILE_VECS(rows) ((rows) > 1 ? 1 : 2)
#endif

typedef struct {
    const float *x, *residual;
    const void *weight;
    float *out;
    long rows, n, k, ldx;
    int is_bf16;
} linear_args;

INLINE long panel_words(const linear_args *a) { return (a->is_bf16 ? (a->k + 1) / 2 : a->k) * LANES; }

INLINE void multiply_row(v16 *acc, const v16 *w, float x, int vecs) {
    UNROLL for (int v = 0; v < vecs; v++) acc[v] = fma16(splat(x), w[v], acc[v]);
}

// `next` is what the thread reads after these panels, fetched `stride` bytes a step.
INLINE void tile(const linear_args *a, const char *panels, long row, long col, int rows, int vecs, const char *next,
                 long stride) {
    v16 acc[TILE_ROWS][MAX_VECS] = {};
    v16 w[MAX_VECS];
    const float *x = a->x + row * a->ldx;
    const long length = panel_words(a);
    if (a->is_bf16) {
        const uint32_t *words = (const uint32_t *)panels;
        for (long k = 0; k < a->k; k += 2, words += LANES, next += stride) {
            UNROLL for (int v = 0; v < vecs; v++) __builtin_prefetch(next + v * length * sizeof(uint32_t), 0, 2);
            UNROLL for (int v = 0; v < vecs; v++) w[v] = (v16)(*(const u16_unaligned *)(words + v * length) << 16);
            UNROLL for (int r = 0; r < rows; r++) multiply_row(acc[r], w, x[r * a->ldx + k], vecs);
            if (k + 1 == a->k) break;
            UNROLL for (int v = 0; v < vecs; v++) w[v] = (v16)(*(const u16_unaligned *)(words + v * length) & 0xffff0000u);
            UNROLL for (int r = 0; r < rows; r++) multiply_row(acc[r], w, x[r * a->ldx + k + 1], vecs);
        }
    } else {
        const float *values = (const float *)panels;
        for (long k = 0; k < a->k; k++, values += LANES) {
            UNROLL for (int v = 0; v < vecs; v++) w[v] = load16(values + v * length);
            UNROLL for (int r = 0; r < rows; r++) multiply_row(acc[r], w, x[r * a->ldx + k], vecs);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        UNROLL for (int v = 0; v < vecs; v++) {
            long first = col + v * LANES, count = min_long(a->n - first, LANES);
            if (count <= 0) break;
            v16 y = acc[r][v];
            if (a->residual) y += load_first(a->residual + (row + r) * a->n + first, count);
            store_first(a->out + (row + r) * a->n + first, y, count);
        }
    }
}

static void run_panels(void *context, long task, int thread) {
    (void)thread;
    const linear_args *a = context;
    long panel_bytes = panel_words(a) * sizeof(uint32_t);
    // Tiles of nearly equal height: a low last tile would read the panel again for little work.
    long num_tiles = (a->rows + TILE_ROWS - 1) / TILE_ROWS;
    long stride = LANES * sizeof(uint32_t) / num_tiles;
    int vecs = TILE_VECS(a->rows);
    for (int v = 0; v < TASK_PANELS; v += vecs) {
        long first = task * TASK_PANELS + v;
        const char *panels = (const char *)a->weight + first * panel_bytes;
        for (long i = 0; i < num_tiles; i++) {
            long row = a->rows * i / num_tiles, height = a->rows * (i + 1) / num_tiles - row;
            // Each tile fetches its share of the next panels: all at once would wait for the memory.
            const char *next = panels + vecs * panel_bytes + panel_bytes * i / num_tiles;
            switch (height) {
#if TILE_ROWS > 5
                case 6: tile(a, panels, row, first * LANES, 6, TILE_VECS(6), next, stride); break;
#endif
                case 5: tile(a, panels, row, first * LANES, 5, TILE_VECS(5), next, stride); break;
                case 4: tile(a, panels, row, first * LANES, 4, TILE_VECS(4), next, stride); break;
                case 3: tile(a, panels, row, first * LANES, 3, TILE_VECS(3), next, stride); break;
                case 2: tile(a, panels, row, first * LANES, 2, TILE_VECS(2), next, stride); break;
                default: tile(a, panels, row, first * LANES, 1, TILE_VECS(1), next, stride); break;
            }
        }
    }
}

// x [rows, k] with row stride ldx; residual NULL or [rows, n], added to the finished sum; out [rows, n].
EXPORT void tandem_linear(const float *x, long ldx, const void *weight, int is_bf16, const float *residual, float *out,
                          long rows, long n, long k) {
    linear_args a = {x, residual, weight, out, rows, n, k, ldx, is_bf16};
    if (rows) parallel_for((n + TASK_PANELS * LANES - 1) / (TASK_PANELS * LANES), 1, run_panels, &a);
}

// Packs rows [0, n) of a row-major weight; the padding columns of the last panels are zero.
EXPORT void tandem_pack_bf16(const uint16_t *weight, uint32_t *packed, long n, long k) {
    long words = (k + 1) / 2;
    for (long col = 0; col < n; col++) {
        uint32_t *panel = packed + (col / LANES) * words * LANES + col % LANES;
        for (long i = 0; i < words; i++) {
            uint32_t high = 2 * i + 1 < k ? weight[col * k + 2 * i + 1] : 0;
            panel[i * LANES] = weight[col * k + 2 * i] | high << 16;
        }
    }
}

EXPORT void tandem_pack_f32(const float *weight, float *packed, long n, long k) {
    for (long col = 0; col < n; col++) {
        float *panel = packed + (col / LANES) * k * LANES + col % LANES;
        for (long i = 0; i < k; i++) panel[i * LANES] = weight[col * k + i];
    }
}
