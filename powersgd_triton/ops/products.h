// What the products of few columns, products.c, those of more, panels.c, and the bases, basis.c, have in common.
#pragma once

#include "common.h"

// A product and a sum in one instruction. Expressions have one product, so there is one way to do this.
#if defined(__clang__)
#pragma STDC FP_CONTRACT ON
#else
#pragma GCC optimize("fp-contract=fast")
#endif

// Numbers of a vector that registers hold: compilers keep larger ones in memory.
#ifndef LANES
#define LANES (CHOSEN_WHEN_LOADED ? 8 : 4)
#endif
#ifndef ROWS
#define ROWS 4     // of a matrix, processed together: what is read of the factors serves all of them
#endif
#define STRIP 256  // columns of a matrix that one thread multiplies from the left, whose sums stay in the cache
#define FEW 8      // columns of factors whose sums stay in registers
#define WIDTH 1024 // columns of a matrix for which FEW columns of two factors, 64 KiB, stay in the cache
#define INLINE static inline __attribute__((always_inline))

typedef float vector __attribute__((vector_size(4 * LANES)));
typedef int32_t mask __attribute__((vector_size(4 * LANES)));

// P = M Q; M ← growth · (M − product) + G and P = M Q; M ← M − product; M = product; Q = Mᵀ P.
enum { PROJECT, COMPENSATE, SUBTRACT, RECONSTRUCT, BACKPROJECT };

typedef struct {
    const float *const *G;      // count matrices n × m
    float *const *M;            // the same
    const float *left, *right;  // the product left rightᵀ of [count, n, k] and [count, m, k]
    const float *basis;         // [count, m, r], or to backproject [count, n, r]
    float *out;                 // [count, n, r], or [count, m, r]
    int64_t count, n, m, k, r;
    float growth;
    int32_t kind;
} Stage;

// Up to LANES numbers, and zeros.
INLINE vector load(const float *x, int64_t count) { vector v = {0}; memcpy(&v, x, count * sizeof(float)); return v; }
INLINE void store(float *x, vector v, int64_t count) { memcpy(x, &v, count * sizeof(float)); }

// growth · y + the finite elements of G. Others add NaN to ``spoiled``.
INLINE vector compensated(vector y, vector g, float growth, vector *spoiled) {
    const mask finite = ((mask)g & 0x7F800000) != 0x7F800000;
    *spoiled += g * 0.0f;
    return growth * y + (vector)((mask)g & finite);
}

// The stages for more than FEW columns of a factor: rows or, from the left, strips from ``first`` on.
void powersgd_panels(const Stage *s, int64_t first, int64_t last);
// The same with vectors of AVX-512.
void powersgd_wide_panels(const Stage *s, int64_t first, int64_t last);

#define SIDE 8  // columns of a panel of a factor in fp64

typedef struct {
    const float *A;  // [count, n, r]
    float *out;      // the same
    uint8_t *exact;  // [count]: whether the columns of ``out`` are orthonormal
    int64_t count, n, r;
    double enough, most;  // growth up to which one decomposition is exact enough, or else two
} Factors;

// Decompose a matrix of a group. The second one has vectors of AVX-512.
void powersgd_basis(const Factors *f, int64_t matrix, int64_t threads);
void powersgd_wide_basis(const Factors *f, int64_t matrix, int64_t threads);
