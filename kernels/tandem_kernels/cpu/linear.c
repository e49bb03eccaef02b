// SPDX-License-Identifier: Apache-2.0
// out[r][n] = sum over k of x[r][k] * w[n][k]: one accumulator per output, k ascending, one fma per term. Neither the
// row count nor the tile shape can enter, so any mix of rows gives each row the same bits. Weights are packed into
// panels of PANEL outputs: float panels [K][PANEL]; bfloat16 panels [ceil(K/2)][PANEL] of words that hold k (low half)
// and k+1 (high half).
#include "ops.h"
#include "pool.h"
#include "vec.h"

#define PANEL 64
#define MAX_VECS 4
#define UNROLL _Pragma("unroll")
// A tile's sums, its weights and an input fill the registers without a spill: 32 of 16 lanes, or 16 of 8.
#if defined(__AVX512F__)
#define TILE_ROWS 6
#define TILE_VECS(rows) 4
#else
#define TILE_ROWS 5
#define TILE_VECS(rows) ((rows) > 2 ? 1 : (rows) > 1 ? 2 : 4)
#endif

typedef struct {
    const float *x, *residual;
    const void *weight;
    float *out;
    long rows, n, k, ldx;
    int is_bf16;
} linear_args;

INLINE void multiply_row(v16 *acc, const v16 *w, float x, int vecs) {
    UNROLL for (int v = 0; v < vecs; v++) acc[v] = fma16(splat(x), w[v], acc[v]);
}

// `ahead` bytes further lies what the thread reads next; 0 where the panel itself is read again.
INLINE void tile(const linear_args *a, const char *panel, long row, long col, int rows, int vecs, long ahead) {
    v16 acc[TILE_ROWS][MAX_VECS] = {};
    v16 w[MAX_VECS];
    const float *x = a->x + row * a->ldx;
    if (a->is_bf16) {
        const uint32_t *words = (const uint32_t *)panel;
        for (long k = 0; k < a->k; k += 2, words += PANEL) {
            if (ahead)
                UNROLL for (int v = 0; v < vecs; v++) __builtin_prefetch((const char *)(words + v * LANES) + ahead, 0, 2);
            UNROLL for (int v = 0; v < vecs; v++) w[v] = (v16)(*(const u16_unaligned *)(words + v * LANES) << 16);
            UNROLL for (int r = 0; r < rows; r++) multiply_row(acc[r], w, x[r * a->ldx + k], vecs);
            if (k + 1 == a->k) break;
            UNROLL for (int v = 0; v < vecs; v++) w[v] = (v16)(*(const u16_unaligned *)(words + v * LANES) & 0xffff0000u);
            UNROLL for (int r = 0; r < rows; r++) multiply_row(acc[r], w, x[r * a->ldx + k + 1], vecs);
        }
    } else {
        const float *values = (const float *)panel;
        for (long k = 0; k < a->k; k++, values += PANEL) {
            UNROLL for (int v = 0; v < vecs; v++) w[v] = load16(values + v * LANES);
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

static void run_panel(void *context, long task, int thread) {
    (void)thread;
    const linear_args *a = context;
    long bytes_per_word = 4, words = a->is_bf16 ? (a->k + 1) / 2 : a->k;
    const char *panel = (const char *)a->weight + task * words * PANEL * bytes_per_word;
    // Tiles of nearly equal height: a low last tile would stream the panel again for little work.
    long num_tiles = (a->rows + TILE_ROWS - 1) / TILE_ROWS;
    for (long i = 0; i < num_tiles; i++) {
        long row = a->rows * i / num_tiles, height = a->rows * (i + 1) / num_tiles - row;
        for (long v = 0; v < PANEL / LANES; v += TILE_VECS(height)) {
            long col = task * PANEL + v * LANES;
            // A lone row takes the memory as fast as it comes; it is only held up by asking twice.
            long ahead = i + 1 < num_tiles || height == 1 ? 0 : words * PANEL * bytes_per_word;
            const char *part = panel + v * LANES * bytes_per_word;
            switch (height) {
#if TILE_ROWS > 5
                case 6: tile(a, part, row, col, 6, TILE_VECS(6), ahead); break;
#endif
                case 5: tile(a, part, row, col, 5, TILE_VECS(5), ahead); break;
                case 4: tile(a, part, row, col, 4, TILE_VECS(4), ahead); break;
                case 3: tile(a, part, row, col, 3, TILE_VECS(3), ahead); break;
                case 2: tile(a, part, row, col, 2, TILE_VECS(2), ahead); break;
                default: tile(a, part, row, col, 1, TILE_VECS(1), ahead); break;
            }
        }
    }
}

// x [rows, k] with row stride ldx; residual NULL or [rows, n], added to the finished sum; out [rows, n].
EXPORT void tandem_linear(const float *x, long ldx, const void *weight, int is_bf16, const float *residual, float *out,
                          long rows, long n, long k) {
    linear_args a = {x, residual, weight, out, rows, n, k, ldx, is_bf16};
    parallel_for((n + PANEL - 1) / PANEL, 1, run_panel, &a);
}

// Packs rows [0, n) of a row-major weight; the padding columns of the last panel are zero.
EXPORT void tandem_pack_bf16(const uint16_t *weight, uint32_t *packed, long n, long k) {
    long words = (k + 1) / 2;
    for (long col = 0; col < n; col++) {
        uint32_t *panel = packed + (col / PANEL) * words * PANEL + col % PANEL;
        for (long i = 0; i < words; i++) {
            uint32_t high = 2 * i + 1 < k ? weight[col * k + 2 * i + 1] : 0;
            panel[i * PANEL] = weight[col * k + 2 * i] | high << 16;
        }
    }
}

EXPORT void tandem_pack_f32(const float *weight, float *packed, long n, long k) {
    for (long col = 0; col < n; col++) {
        float *panel = packed + (col / PANEL) * k * PANEL + col % PANEL;
        for (long i = 0; i < k; i++) panel[i * PANEL] = weight[col * k + i];
    }
}
