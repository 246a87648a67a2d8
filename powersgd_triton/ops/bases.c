// Orthonormal bases of factors on the CPU, CholeskyQR in fp64, for ops/bases.py, and exploration, for ops/explore.py.
//
// Numbers in fp64 lie in panels of SIDE columns, [panel][row][SIDE], so that all products are of one kind. Each number
// is computed by one thread in one order: it has the same bits on any number of threads.

#include <math.h>
#include <stdlib.h>

#include "products.h"

#define SIDE 8    // columns of a panel
#define DEPTH 64  // rows of a factor that stay in the cache, and are summed before the sum is added to others
#define HEIGHT 16 // rows that are divided by a triangular matrix while its panels stay in the cache
#define LEAST_PRODUCTS 65536

#define WIDE (LANES / 2)
#define PARTS (SIDE / WIDE)

typedef double wide __attribute__((vector_size(8 * WIDE)));
typedef float narrow __attribute__((vector_size(4 * WIDE)));
typedef wide numbers[PARTS];  // of a row in a panel

typedef struct {
    const float *A;  // [count, n, r]
    float *out;      // the same
    uint8_t *exact;  // [count]: whether the columns of ``out`` are orthonormal
    int64_t count, n, r;
    double enough, most;  // growth up to which one decomposition is exact enough, or else two
} Factors;

// sums += A B: rows of A are ``row`` apart, and have ``count`` numbers, ``next`` apart. B is a panel.
INLINE void add_product(const double *A, int64_t row, int64_t next, const numbers *B, int64_t count, numbers *sums) {
    for (int64_t c = 0; c < count; c++, A += next)
        for (int i = 0; i < ROWS; i++)
            for (int k = 0; k < PARTS; k++) sums[i][k] += A[i * row] * B[c][k];
}

INLINE void add(numbers *sums, const numbers *others, double sign) {
    for (int i = 0; i < ROWS; i++)
        for (int k = 0; k < PARTS; k++) sums[i][k] += sign * others[i][k];
}

// Rows of a factor as panels, which are ``depth`` rows long. Their last columns may be missing: they stay as they are.
INLINE void widen(const float *A, int64_t rows, int64_t r, int64_t depth, numbers *panels) {
    for (int64_t i = 0; i < rows; i++, A += r) {
        int64_t j = 0;
        for (numbers *own = panels + i; j + SIDE <= r; j += SIDE, own += depth) {
            narrow x[PARTS];
            memcpy(x, A + j, sizeof x);
            for (int k = 0; k < PARTS; k++) (*own)[k] = __builtin_convertvector(x[k], wide);
        }
        for (; j < r; j++) ((double *)panels[j / SIDE * depth + i])[j % SIDE] = A[j];
    }
}

// G = AᵀA on and above its diagonal: every so many of ROWS rows of it.
AVX2 static void multiply(const Factors *f, const float *A, numbers *G, numbers *panels, int64_t first, int64_t every) {
    const int64_t count = (f->r + SIDE - 1) / SIDE;
    for (int64_t top = 0; top < f->n; top += DEPTH) {
        const int64_t depth = MINIMUM(DEPTH, f->n - top);
        widen(A + top * f->r, depth, f->r, DEPTH, panels);
        for (int64_t part = first; part * ROWS < count * SIDE; part += every) {
            const double *const left = (double *)panels[part * ROWS / SIDE * DEPTH] + part * ROWS % SIDE;
            for (int64_t j = part * ROWS / SIDE; j < count; j++) {
                numbers sums[ROWS] = {0}, *const block = G + j * count * SIDE + part * ROWS;
                add_product(left, 1, SIDE, panels + j * DEPTH, depth, sums);
                if (top) add(sums, block, 1);
                memcpy(block, sums, sizeof sums);
            }
        }
    }
}

// The inverse of R with G = RᵀR, for blocks of SIDE rows. Return whether G is positive definite.
INLINE int invert(double G[SIDE][SIDE], double inverse[SIDE][SIDE]) {
    for (int k = 0; k < SIDE; k++) {
        if (!(G[k][k] > 0 && G[k][k] <= __DBL_MAX__)) return 0;
        const double root = sqrt(G[k][k]);
        for (int j = k; j < SIDE; j++) G[k][j] /= root;
        for (int i = k + 1; i < SIDE; i++)
            for (int j = i; j < SIDE; j++) G[i][j] -= G[k][i] * G[k][j];
    }
    memset(inverse, 0, SIDE * sizeof *inverse);
    for (int j = 0; j < SIDE; j++)
        for (int k = j; k >= 0; k--) {
            double rest = k == j;
            for (int i = k + 1; i <= j; i++) rest -= G[k][i] * inverse[i][j];
            inverse[k][j] = rest / G[k][k];
        }
    return 1;
}

// R with G = RᵀR in its place, but with the inverses of the blocks on its diagonal.
INLINE int decompose(numbers *G, int64_t count) {
    const int64_t rows = count * SIDE;
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = i; j < count; j++) {
            numbers *const block = G + j * rows + i * SIDE, rest[SIDE];
            for (int top = 0; top < SIDE; top += ROWS) {
                numbers sums[ROWS] = {0};
                add_product((double *)(G + i * rows) + top, 1, SIDE, G + j * rows, i * SIDE, sums);
                memcpy(rest + top, block + top, sizeof sums);
                add(rest + top, (const numbers *)sums, -1);
            }
            if (i == j && !invert((double(*)[SIDE])rest, (double(*)[SIDE])block)) return 0;
            for (int top = 0; i < j && top < SIDE; top += ROWS) {
                numbers sums[ROWS] = {0};
                add_product((double *)(G + i * rows + i * SIDE) + top, 1, SIDE, (const numbers *)rest, SIDE, sums);
                memcpy(block + top, sums, sizeof sums);
            }
        }
    return 1;
}

// X ← X R⁻¹, for panels of HEIGHT rows, of which those before ``from`` are zero.
INLINE void solve(const numbers *R, int64_t count, int64_t from, numbers X[][HEIGHT]) {
    for (int64_t j = from; j < count; j++) {
        const numbers *const panel = R + j * count * SIDE;
        for (int64_t top = 0; top < HEIGHT; top += ROWS) {
            numbers sums[ROWS] = {0}, found[ROWS] = {0};
            for (int64_t i = from; i < j; i++) add_product((double *)X[i][top], SIDE, 1, panel + i * SIDE, SIDE, sums);
            add(X[j] + top, (const numbers *)sums, -1);
            add_product((double *)X[j][top], SIDE, 1, panel + j * SIDE, SIDE, found);
            memcpy(X[j] + top, found, sizeof found);
        }
    }
}

// Decompose G, and return the growth: the largest root of the squares of the terms of a new column.
AVX2 static double growth(numbers *G, int64_t r) {
    const int64_t count = (r + SIDE - 1) / SIDE, rows = count * SIDE;
    double norms[rows], squares[rows], most = 0;
    for (int64_t i = 0; i < rows; i++) {
        double *const own = (double *)(G + i / SIDE * rows + i) + i % SIDE;
        norms[i] = i < r ? sqrt(*own) : 0;
        // Columns that fill a panel up are orthonormal to all others.
        if (i >= r) *own = 1;
    }
    if (!decompose(G, count)) return INFINITY;
    memset(squares, 0, sizeof squares);
    for (int64_t i = 0; i < rows; i += HEIGHT) {
        numbers X[count][HEIGHT];
        memset(X, 0, sizeof X);
        for (int64_t k = i; k < MINIMUM(i + HEIGHT, rows); k++) ((double *)X[k / SIDE][k - i])[k % SIDE] = norms[k];
        solve(G, count, i / SIDE, X);
        for (int64_t j = i; j < rows; j++)
            for (int64_t k = 0; k < HEIGHT; k++) {
                const double term = ((double *)X[j / SIDE][k])[j % SIDE];
                squares[j] += term * term;
            }
    }
    for (int64_t j = 0; j < r; j++) {
        if (!(squares[j] <= __DBL_MAX__)) return INFINITY;
        most = squares[j] > most ? squares[j] : most;
    }
    return sqrt(most);
}

// Rows of ``out`` = A R⁻¹.
AVX2 static void divide(const Factors *f, const float *A, float *out, const numbers *R, int64_t first, int64_t last) {
    const int64_t count = (f->r + SIDE - 1) / SIDE;
    numbers X[count][HEIGHT];
    memset(X, 0, sizeof X);
    for (int64_t top = first; top < last; top += HEIGHT) {
        const int64_t rows = MINIMUM(HEIGHT, last - top);
        widen(A + top * f->r, rows, f->r, HEIGHT, X[0]);
        solve(R, count, 0, X);
        float *row = out + top * f->r;
        for (int64_t i = 0; i < rows; i++, row += f->r) {
            int64_t j = 0;
            for (; j + SIDE <= f->r; j += SIDE)
                for (int k = 0; k < PARTS; k++) {
                    const narrow x = __builtin_convertvector(X[j / SIDE][i][k], narrow);
                    memcpy(row + j + k * WIDE, &x, sizeof x);
                }
            for (; j < f->r; j++) row[j] = ((double *)X[j / SIDE][i])[j % SIDE];
        }
    }
}

static void orthogonalize(const Factors *f, int64_t matrix, int64_t threads) {
    const int64_t count = (f->r + SIDE - 1) / SIDE, sizes[2] = {count * count * SIDE, count * DEPTH};
    numbers *const G = aligned_alloc(sizeof *G, (sizes[0] + threads * sizes[1]) * sizeof *G);
    float *const out = f->out + matrix * f->n * f->r;
    const float *A = f->A + matrix * f->n * f->r;
    f->exact[matrix] = 0;
    numbers *const panels = G ? memset(G + sizes[0], 0, threads * sizes[1] * sizeof *G) : NULL;
    for (int pass = 0; G && pass < 2 && !f->exact[matrix]; pass++, A = out) {
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t i = 0; i < threads; i++) multiply(f, A, G, panels + i * sizes[1], i, threads);
        const double found = growth(G, f->r);
        if (!(found <= f->most)) break;
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t i = 0; i < threads; i++) divide(f, A, out, G, f->n * i / threads, f->n * (i + 1) / threads);
        f->exact[matrix] = found <= f->enough;
    }
    free(G);
}

static int64_t products_of(const Factors *f) { return f->n * f->r * (f->r + SIDE); }

// Return whether this processor has the instructions for it. Without them, nothing is written.
int32_t powersgd_orthogonalize(const Factors *groups, int32_t count, int32_t threads) {
#if CHOSEN_WHEN_LOADED
    if (!__builtin_cpu_supports("x86-64-v3")) return 0;
#endif
    int64_t all = 0, products = 0;
    for (const Factors *f = groups; f < groups + count; all += f++->count) products += f->count * products_of(f);
    if (products < (int64_t)threads * LEAST_PRODUCTS) threads = 1;
    // Of a matrix with more than a thread's share of the work, each thread computes a part.
    const int64_t share = products / threads;
    for (const Factors *f = groups; f < groups + count; f++)
        for (int64_t i = 0; i < f->count && products_of(f) > share; i++) orthogonalize(f, i, threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t i = 0; i < all; i++) {
        const Factors *f = groups;
        int64_t matrix = i;
        for (; matrix >= f->count; f++) matrix -= f->count;
        if (products_of(f) <= share) orthogonalize(f, matrix, 1);
    }
    return 1;
}

typedef struct {
    float *bases;         // [count, m, r]
    const int64_t *keys;  // [count]
    int64_t count, m, r, every, step, other;
    double carry, least;
} Bases;

// A number of ops/orthogonalize.py's random directions.
static inline double random_number(int64_t i, uint32_t stream) { return (mix(mix((uint32_t)i) ^ stream) >> 8) * 0x1p-23 - 1; }

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
            const uint32_t own = mix((uint32_t)(b->keys[i] + b->other)), salt = (uint32_t)b->step * 0x9E3779B9u + 0x85EBCA6Bu;
            if ((b->keys[i] + b->step) % b->every == 0) explore(b, b->bases + i * b->m * b->r, mix(own ^ salt));
        }
}
