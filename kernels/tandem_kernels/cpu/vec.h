// SPDX-License-Identifier: Apache-2.0
// Sixteen float lanes, whatever the register width: the compiler splits them for AVX2, and since every operation here
// is per lane or in a fixed order, all targets give the same bits. Fusion is off; a fused multiply-add is written out.
#pragma once

#include <stdint.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16 __attribute__((vector_size(64)));
typedef float v16_unaligned __attribute__((vector_size(64), aligned(4)));
typedef uint32_t u16_unaligned __attribute__((vector_size(64), aligned(4)));

INLINE v16 splat(float x) { return (v16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE v16 fma16(v16 a, v16 b, v16 c) { return __builtin_elementwise_fma(a, b, c); }
INLINE v16 load16(const float *p) { return *(const v16_unaligned *)p; }
INLINE void store16(float *p, v16 x) { *(v16_unaligned *)p = x; }

// The first n lanes of memory (n in 1..16); the others are zero and are not read.
INLINE v16 load_first(const float *p, long n) {
    if (n >= LANES) return load16(p);
    v16 x = {};
    memcpy(&x, p, n * sizeof(float));
    return x;
}

INLINE void store_first(float *p, v16 x, long n) {
    if (n >= LANES) store16(p, x);
    else memcpy(p, &x, n * sizeof(float));
}

// Sum of the lanes in one fixed tree: 16 -> 8 -> 4 -> 2 -> 1, upper half onto lower half.
INLINE float sum16(v16 x) {
    typedef float v8 __attribute__((vector_size(32)));
    typedef float v4 __attribute__((vector_size(16)));
    v8 a = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
           __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    v4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
    return (b[0] + b[2]) + (b[1] + b[3]);
}

// Lanes of a where the mask is set (all ones, as a comparison gives it), of b elsewhere.
INLINE v16 select16(i16 mask, v16 a, v16 b) { return (v16)((mask & (i16)a) | (~mask & (i16)b)); }

INLINE float max16(v16 x) {
    float m = x[0];
    for (int i = 1; i < LANES; i++) m = x[i] > m ? x[i] : m;
    return m;
}

// exp by range reduction and a degree-6 polynomial (coefficients of Cephes expf); below -87.3 the result is exactly 0.
INLINE v16 exp16(v16 x) {
    const v16 lowest = splat(-87.3f), highest = splat(88.3f);
    i16 underflow = x < lowest;
    v16 c = select16(x > highest, highest, x);
    c = select16(c < lowest, lowest, c);
    v16 n = __builtin_elementwise_roundeven(c * splat(1.44269504088896341f));
    v16 r = fma16(n, splat(-0.693359375f), c);
    r = fma16(n, splat(2.12194440e-4f), r);
    v16 p = splat(1.9875691500e-4f);
    p = fma16(p, r, splat(1.3981999507e-3f));
    p = fma16(p, r, splat(8.3334519073e-3f));
    p = fma16(p, r, splat(4.1665795894e-2f));
    p = fma16(p, r, splat(1.6666665459e-1f));
    p = fma16(p, r, splat(5.0000001201e-1f));
    p = fma16(p, r * r, r) + splat(1.0f);
    i16 exponent = (__builtin_convertvector(n, i16) + 127) << 23;
    v16 y = p * (v16)exponent;
    return select16(underflow, (v16){}, y);
}

INLINE v16 sigmoid16(v16 x) { return splat(1.0f) / (splat(1.0f) + exp16(-x)); }

// Dot product of two float vectors: 16 partial sums over the index modulo 16, then sum16.
INLINE float dot(const float *a, const float *b, long n) {
    v16 acc = {};
    long i = 0;
    for (; i + LANES <= n; i += LANES) acc = fma16(load16(a + i), load16(b + i), acc);
    if (i < n) acc = fma16(load_first(a + i, n - i), load_first(b + i, n - i), acc);
    return sum16(acc);
}

INLINE long min_long(long a, long b) { return a < b ? a : b; }
