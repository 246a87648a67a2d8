// An orthonormal basis of a factor on the CPU: CholeskyQR in fp64, for ops/bases.py.
//
// Numbers in fp64 lie in panels of SIDE columns, [panel][row][SIDE], so that all products are of one kind. Each number
// is computed by one thread in one order: it has the same bits on any number of threads, with vectors of any width.

#include <math.h>
#include <stdlib.h>

#include "products.h"

#ifndef BASIS
#define BASIS powersgd_basis
#define TARGET AVX2
#endif
#define DEPTH 64  // rows of a factor that stay in the cache, and are summed before the sum is added to others
#define HEIGHT 16 // rows that are divided by a triangular matrix while its panels stay in the cache
#define WIDE (LANES / 2)
#define PARTS (SIDE / WIDE)

typedef double wide __attribute__((vector_size(8 * WIDE)));
typedef float narrow __attribute__((vector_size(4 * WIDE)));
typedef wide numbers[PARTS];  // of a row in a panel

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
TARGET static void multiply(const Factors *f, const float *A, numbers *G, numbers *panels, int64_t first, int64_t every) {
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
TARGET static double growth(numbers *G, int64_t r) {
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
TARGET static void divide(const Factors *f, const float *A, float *out, const numbers *R, int64_t first, int64_t last) {
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

void BASIS(const Factors *f, int64_t matrix, int64_t threads) {
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
