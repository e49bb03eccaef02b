// SPDX-License-Identifier: Apache-2.0
// From logits to tokens: the filters, the seeded draw, the largest logit, log-probabilities. One task a row.
//
// The draw and the filters are float64 with every operation rounded on its own, and weights are integers, whose sums do
// not depend on an order: so the twins in tandem_kernels/sampling.py give the same bits on any device.
#include "pool.h"
#include "vec.h"

#include <math.h>
#include <stdlib.h>

typedef double d8 __attribute__((vector_size(64)));
typedef int64_t l8 __attribute__((vector_size(64)));
typedef uint64_t q8 __attribute__((vector_size(64)));

INLINE long row_grain(long elements_per_row) { return 1 + 16384 / elements_per_row; }

static float largest(const float *x, long vocab) {
    v16 best = splat(-__builtin_inff());
    for (long i = 0; i < vocab; i += LANES) {
        v16 y = i + LANES <= vocab ? load16(x + i) : best;
        best = select16(y > best, y, best);
    }
    float top = max16(best);
    for (long i = vocab / LANES * LANES; i < vocab; i++) top = x[i] > top ? x[i] : top;
    return top;
}

// Natural logarithm of the sum of exp(x - top).
static double log_sum(const float *x, float top, long vocab) {
    v16 sum = {};
    for (long i = 0; i < vocab; i += LANES) {
        long n = vocab - i;
        v16 y = exp16(load_first(x + i, n) - splat(top));
        if (n < LANES) { v16 z = {}; memcpy(&z, &y, n * sizeof(float)); y = z; }
        sum += y;
    }
    return log((double)sum16(sum));
}

typedef struct {
    const float *logits;
    int32_t *ids, *top_ids;
    float *logprobs, *top_logprobs;
    long vocab, num_top;
} choice_args;

static void argmax_row(void *context, long row, int thread) {
    (void)thread;
    const choice_args *a = context;
    const float *x = a->logits + row * a->vocab;
    float top = largest(x, a->vocab);
    if (top == -__builtin_inff()) {
        a->ids[row] = -1;
        a->logprobs[row] = __builtin_nanf("");
        return;
    }
    long id = 0;
    while (x[id] != top) id++;
    a->ids[row] = (int32_t)id;
    a->logprobs[row] = (float)-log_sum(x, top, a->vocab);
}

// Lowest index of the largest logit, and its log-probability under the softmax of the row; -1 and NaN where no logit
// is above minus infinity.
EXPORT void tandem_argmax(const float *logits, int32_t *ids, float *logprobs, long rows, long vocab) {
    choice_args a = {.logits = logits, .ids = ids, .logprobs = logprobs, .vocab = vocab};
    parallel_for(rows, row_grain(2 * vocab), argmax_row, &a);
}

static void log_probs_row(void *context, long row, int thread) {
    (void)thread;
    const choice_args *a = context;
    const float *x = a->logits + row * a->vocab;
    float top = largest(x, a->vocab);
    double norm = log_sum(x, top, a->vocab);
    // -(norm - 0) for the largest: argmax's bits, the sign of zero included.
    a->logprobs[row] = (float)-(norm - ((double)x[a->ids[row]] - (double)top));
    int32_t *ids = a->top_ids + row * a->num_top;
    long n = 0;
    for (long i = 0; i < a->vocab && a->num_top; i++) {
        if (n == a->num_top && !(x[i] > x[ids[n - 1]])) continue;
        long place = n < a->num_top ? n++ : n - 1;
        for (; place > 0 && x[i] > x[ids[place - 1]]; place--) ids[place] = ids[place - 1];
        ids[place] = (int32_t)i;
    }
    for (long i = 0; i < n; i++)
        a->top_logprobs[row * a->num_top + i] = (float)-(norm - ((double)x[ids[i]] - (double)top));
}

// Log-probabilities of ids [rows] and of the num_top largest logits (lower ids first among equals), [rows, num_top].
EXPORT void tandem_log_probs(const float *logits, const int32_t *ids, float *logprobs, int32_t *top_ids,
                             float *top_logprobs, long rows, long vocab, long num_top) {
    choice_args a = {logits, (int32_t *)ids, top_ids, logprobs, top_logprobs, vocab, num_top};
    parallel_for(rows, row_grain(2 * vocab), log_probs_row, &a);
}

typedef struct {
    float *logits;
    const int32_t *masks;
    const float *temperature, *top_p, *min_p, *typical_p;
    const int32_t *top_k;
    long vocab;
} filter_args;

static void mask_row(void *context, long row, int thread) {
    (void)thread;
    const filter_args *a = context;
    const uint32_t *words = (const uint32_t *)a->masks + row * ((a->vocab + 31) / 32);
    float *x = a->logits + row * a->vocab;
    for (long i = 0; i < a->vocab; i++)
        if (!(words[i / 32] >> i % 32 & 1)) x[i] = -__builtin_inff();
}

// logits [rows, vocab] become -inf where the bit of masks [rows, ceil(vocab / 32)] is 0.
EXPORT void tandem_apply_mask(float *logits, const int32_t *masks, long rows, long vocab) {
    filter_args a = {.logits = logits, .masks = masks, .vocab = vocab};
    parallel_for(rows, row_grain(vocab), mask_row, &a);
}

#define WEIGHT_ONE 1099511627776.0 // 2^40: the weight of the most likely token
#define LN2_HIGH 0x1.62e42feep-1   // few enough bits that a small integer times it is exact
#define LN2_LOW 0x1.a39ef35793c76p-33

// floor(exp(y) * 2^40) for y <= 0.
INLINE int64_t weight_of(double y) {
    if (!(y >= -28.0)) return 0;
    double n = __builtin_roundeven(y * 0x1.71547652b82fep+0);
    double r = (y - n * LN2_HIGH) - n * LN2_LOW;
    double p = 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    union { int64_t i; double d; } scale = {.i = ((int64_t)n + 1023 + 40) << 52};
    return (int64_t)(p * scale.d);
}

typedef struct {
    int32_t *ids;
    uint32_t *keys;
    int64_t *weights;
    long n;
} candidates;

// Larger keys for larger floats.
INLINE uint32_t ascending_key(float x) {
    union { float f; uint32_t u; } bits = {.f = x};
    return bits.u >> 31 ? ~bits.u : bits.u | 0x80000000u;
}

// Keeps the shortest prefix, by key downwards and then by id upwards, whose weight reaches the limit (at least one).
static void keep_prefix(candidates *c, int counts, int64_t limit) {
    uint32_t threshold = 0;
    int64_t before = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t sums[256] = {};
        for (long i = 0; i < c->n; i++)
            if (shift == 24 || c->keys[i] >> (shift + 8) == threshold >> (shift + 8))
                sums[c->keys[i] >> shift & 255] += counts ? 1 : c->weights[i];
        int bucket = 255;
        for (; bucket > 0 && before + sums[bucket] < limit; bucket--) before += sums[bucket];
        threshold |= (uint32_t)bucket << shift;
    }
    long kept = 0;
    for (long i = 0; i < c->n; i++) {
        int is_kept = c->keys[i] > threshold;
        if (c->keys[i] == threshold && before < limit) {
            is_kept = 1;
            before += counts ? 1 : c->weights[i];
        }
        if (!is_kept) continue;
        c->ids[kept] = c->ids[i];
        c->keys[kept] = c->keys[i];
        c->weights[kept] = c->weights[i];
        kept++;
    }
    c->n = kept;
}

static int64_t total_weight(const candidates *c) {
    int64_t total = 0;
    for (long i = 0; i < c->n; i++) total += c->weights[i];
    return total;
}

INLINE int64_t share_of(int64_t total, float share) { return (int64_t)ceil((double)total * (double)share); }

static void keep_typical(candidates *c, const float *x, float top, float share) {
    int64_t sum = 0, total = total_weight(c);
    for (long i = 0; i < c->n; i++) sum += (int64_t)((double)c->weights[i] * ((double)top - (double)x[c->ids[i]]));
    // The surprise of a token above that of the most likely one, on average.
    double mean = (double)sum / (double)total;
    for (long i = 0; i < c->n; i++)
        c->keys[i] = ~ascending_key((float)fabs(((double)top - (double)x[c->ids[i]]) - mean));
    keep_prefix(c, 0, share_of(total, share));
}

static void filter_row(void *context, long row, int thread) {
    (void)thread;
    const filter_args *a = context;
    float *x = a->logits + row * a->vocab;
    for (long i = 0; i < a->vocab; i++) x[i] = x[i] / a->temperature[row] + 0.0f; // -0 becomes 0
    float top = largest(x, a->vocab);
    int k = a->top_k[row], filters = a->top_p[row] < 1 || a->min_p[row] > 0 || a->typical_p[row] < 1;
    if (top == -__builtin_inff() || !(filters || (k > 0 && k < a->vocab))) return;
    candidates c = {malloc(a->vocab * sizeof(int32_t)), malloc(a->vocab * sizeof(uint32_t)),
                    malloc(a->vocab * sizeof(int64_t)), 0};
    for (long i = 0; i < a->vocab; i++)
        if (x[i] > -__builtin_inff()) {
            c.ids[c.n] = (int32_t)i;
            c.keys[c.n++] = ascending_key(x[i]);
        }
    if (k > 0 && k < c.n) {
        memset(c.weights, 0, c.n * sizeof(int64_t));
        keep_prefix(&c, 1, k);
    }
    for (long i = 0; i < c.n && filters; i++) c.weights[i] = weight_of((double)x[c.ids[i]] - (double)top);
    if (a->top_p[row] < 1) keep_prefix(&c, 0, share_of(total_weight(&c), a->top_p[row]));
    if (a->min_p[row] > 0) {
        long kept = 0;
        for (long i = 0; i < c.n; i++) {
            if ((double)c.weights[i] < (double)a->min_p[row] * WEIGHT_ONE) continue;
            c.ids[kept] = c.ids[i];
            c.weights[kept++] = c.weights[i];
        }
        c.n = kept;
    }
    if (a->typical_p[row] < 1) keep_typical(&c, x, top, a->typical_p[row]);
    for (long i = 0, next = 0; i < a->vocab; i++) {
        if (next < c.n && c.ids[next] == i) next++;
        else x[i] = -__builtin_inff();
    }
    free(c.ids), free(c.keys), free(c.weights);
}

// In place: divided by the temperature, then -inf where top_k, top_p, min_p or typical_p removes the token.
EXPORT void tandem_filter_logits(float *logits, const float *temperature, const int32_t *top_k, const float *top_p,
                                 const float *min_p, const float *typical_p, long rows, long vocab) {
    filter_args a = {.logits = logits, .temperature = temperature, .top_p = top_p, .min_p = min_p,
                     .typical_p = typical_p, .top_k = top_k, .vocab = vocab};
    parallel_for(rows, row_grain(4 * vocab), filter_row, &a);
}

// Natural logarithm of positive normal numbers: log(m 2^e) by the series of atanh((m - 1) / (m + 1)).
INLINE d8 log8(d8 z) {
    q8 bits = (q8)z;
    l8 exponent = (l8)(bits >> 52) - 1023;
    d8 m = (d8)((bits & 0xfffffffffffffULL) | 0x3ff0000000000000ULL);
    l8 is_high = m > 0x1.6a09e667f3bcdp+0;
    m = (d8)((is_high & (l8)(m * 0.5)) | (~is_high & (l8)m));
    exponent -= is_high; // a set mask is -1
    d8 e = __builtin_convertvector(exponent, d8), f = m - 1.0;
    d8 s = f / (f + 2.0), t = s * s;
    d8 p = t * (1.0 / 21.0) + 1.0 / 19.0;
    p = p * t + 1.0 / 17.0;
    p = p * t + 1.0 / 15.0;
    p = p * t + 1.0 / 13.0;
    p = p * t + 1.0 / 11.0;
    p = p * t + 1.0 / 9.0;
    p = p * t + 1.0 / 7.0;
    p = p * t + 1.0 / 5.0;
    p = p * t + 1.0 / 3.0;
    p = p * t + 1.0;
    return e * LN2_HIGH + ((s + s) * p + e * LN2_LOW);
}

// Philox4x32-10 (Salmon et al. 2011): eight counters (block + lane, position, stream, 0) under one key. The first two
// words of a counter make draws[0], the others draws[1]: 52 bits each.
INLINE void philox8(uint64_t key, uint64_t block, uint32_t position, uint32_t stream, q8 draws[2]) {
    const q8 low = (q8){} + 0xffffffffULL;
    q8 c0 = (q8){0, 1, 2, 3, 4, 5, 6, 7} + block, c1 = (q8){} + position, c2 = (q8){} + stream, c3 = {};
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        q8 a = c0 * 0xD2511F53ULL, b = c2 * 0xCD9E8D57ULL;
        c0 = (b >> 32) ^ c1 ^ k0;
        c2 = (a >> 32) ^ c3 ^ k1;
        c1 = b & low;
        c3 = a & low;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    draws[0] = (c0 << 20) | (c1 >> 12);
    draws[1] = (c2 << 20) | (c3 >> 12);
}

INLINE d8 gumbel8(q8 draw) {
    d8 u = __builtin_convertvector((l8)draw, d8) * 0x1p-52 + 0x1p-53;
    return -log8(-log8(u));
}

typedef struct {
    const float *logits;
    const int64_t *seeds;
    const int32_t *positions;
    int32_t *ids;
    long vocab;
    int stream;
} draw_args;

static void draw_row(void *context, long row, int thread) {
    (void)thread;
    const draw_args *a = context;
    const float *x = a->logits + row * a->vocab;
    double best = -__builtin_inf();
    long id = -1;
    float top = largest(x, a->vocab);
    for (long first = 0; first < a->vocab; first += 16) {
        long n = min_long(a->vocab - first, 16);
        // No noise lifts a logit by more than 37 or lowers one by more than 4: those far below the largest can't win.
        int can_win = 0;
        for (long i = 0; i < n; i++) can_win |= x[first + i] >= top - 42.0f;
        if (!can_win) continue;
        q8 draws[2];
        philox8((uint64_t)a->seeds[row], (uint64_t)first / 2, (uint32_t)a->positions[row], (uint32_t)a->stream, draws);
        d8 noise[2] = {gumbel8(draws[0]), gumbel8(draws[1])};
        for (long i = 0; i < n; i++) {
            double score = (double)x[first + i] + noise[i % 2][i / 2];
            if (score > best) best = score, id = first + i;
        }
    }
    a->ids[row] = (int32_t)id;
}

// The index of the largest logit + Gumbel noise of (seed, position, stream); -1 where all logits are -inf.
EXPORT void tandem_gumbel_argmax(const float *logits, const int64_t *seeds, const int32_t *positions, int32_t *ids,
                                 long rows, long vocab, int stream) {
    draw_args a = {logits, seeds, positions, ids, vocab, stream};
    parallel_for(rows, row_grain(8 * vocab), draw_row, &a);
}
