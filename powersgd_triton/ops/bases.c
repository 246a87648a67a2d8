// Orthonormal bases of the factors of a bucket on the CPU, for ops/bases.py, and exploration, for ops/explore.py.

#include <math.h>

#include "products.h"

#define LEAST_PRODUCTS 65536 // for fewer, a thread takes longer to start

static int64_t products_of(const Factors *f) { return f->n * f->r * (f->r + SIDE); }

static void (*basis_of(const Factors *f))(const Factors *, int64_t, int64_t) {
#if CHOSEN_WHEN_LOADED
    // Rows of fewer columns fill no vector.
    if (f->r >= SIDE && __builtin_cpu_supports("x86-64-v4")) return powersgd_wide_basis;
#endif
    return powersgd_basis;
}

// Return whether this processor has the instructions for it. Without them, nothing is written.
int32_t powersgd_orthogonalize(const Factors *groups, int32_t count, int32_t threads) {
#if CHOSEN_WHEN_LOADED
    if (!__builtin_cpu_supports("x86-64-v3")) return 0;
#endif
    int64_t all = 0, products = 0;
    for (const Factors *f = groups; f < groups + count; f++) {
        all += f->count;
        products += f->count * products_of(f);
    }
    if (products < (int64_t)threads * LEAST_PRODUCTS) threads = 1;
    // Of a matrix with more than a thread's share of the work, each thread computes a part.
    const int64_t share = products / threads;
    for (const Factors *f = groups; f < groups + count; f++)
        if (products_of(f) > share)
            for (int64_t i = 0; i < f->count; i++) basis_of(f)(f, i, threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t i = 0; i < all; i++) {
        const Factors *f = groups;
        int64_t matrix = i;
        for (; matrix >= f->count; f++) matrix -= f->count;
        if (products_of(f) <= share) basis_of(f)(f, matrix, 1);
    }
    return 1;
}

typedef struct {
    float *bases;         // [count, m, r]
    const int64_t *keys;  // [count]
    int64_t count, m, r;
    int64_t every, step;  // those explore for which key + step is a multiple of every
    int64_t other;        // added to keys, for other random numbers
    double carry, least;  // the weight of the old column, and the share of a direction's square that must be left
} Bases;

// A number of ops/orthogonalize.py's random directions.
static inline double random_number(int64_t i, uint32_t stream) {
    return (mix(mix((uint32_t)i) ^ stream) >> 8) * 0x1p-23 - 1;
}

CLONES static void explore(const Bases *b, float *basis, uint32_t stream) {
    double inside[b->r], size = 0, left = 0;
    memset(inside, 0, sizeof inside);
    for (int64_t i = 0; i < b->m; i++) {
        const double direction = random_number(i, stream);
        size += direction * direction;
        for (int64_t j = 0; j < b->r; j++) inside[j] += direction * basis[i * b->r + j];
    }
    // Once to know what is left, and once more to write it.
    for (int write = 0; write < 2 && (!write || left > b->least * size); write++)
        for (int64_t i = 0; i < b->m; i++) {
            float *const row = basis + i * b->r, *const last = row + b->r - 1;
            double rest = random_number(i, stream);
            for (int64_t j = 0; j < b->r; j++) rest -= inside[j] * row[j];
            if (write) *last = (float)((rest + b->carry * *last) / sqrt(left + b->carry * b->carry));
            else left += rest * rest;
        }
}

// What ops/explore.py describes, for those bases whose turn it is.
void powersgd_explore(const Bases *groups, int32_t count) {
    for (const Bases *b = groups; b < groups + count; b++)
        for (int64_t i = 0; i < b->count; i++) {
            const uint32_t salt = (uint32_t)b->step * 0x9E3779B9u + 0x85EBCA6Bu;
            const uint32_t own = mix((uint32_t)(b->keys[i] + b->other));
            if ((b->keys[i] + b->step) % b->every == 0) explore(b, b->bases + i * b->m * b->r, mix(own ^ salt));
        }
}
