// Products of matrices and factors of few columns on the CPU in fp32: what ops/reference.py defines, up to rounding.
// A stage takes one pass over its matrices, where operations of torch take several.
//
// Each element of a result is computed by one thread in one order: it has the same bits on any number of threads.

#include "products.h"

#define HEIGHT 512            // rows that are summed before the sum is added to others, so that rounding errors grow less

// Write w columns of a factor [rows, r] as vectors, those of the same rows side by side. Columns from r on are zero.
INLINE void transpose(const float *x, int64_t rows, int64_t r, int w, vector *columns) {
    memset(columns, 0, (rows + LANES - 1) / LANES * w * sizeof(vector));
    for (int64_t j = 0; j < rows; j++)
        for (int64_t u = 0; u < r; u++) ((float *)(columns + j / LANES * w + u))[j % LANES] = x[j * r + u];
}

// Some columns of some rows of M, and of G.
INLINE void multiply(int kind, int rows, int w, const float *g, float *x, int64_t m, int64_t count, float growth,
                     float c[][FEW], const vector *right, const vector *basis, vector sums[][FEW], vector *spoiled) {
    for (int i = 0; i < rows; i++) {
        // Processors follow one tensor by themselves, but not several rows of two.
        __builtin_prefetch(x + (rows + i) * m, 1);
        if (kind == COMPENSATE) __builtin_prefetch(g + (rows + i) * m);
        vector y = kind == RECONSTRUCT ? (vector){0} : load(x + i * m, count);
        for (int u = 0; u < w && kind != PROJECT; u++) y += c[i][u] * right[u];
        if (kind == COMPENSATE) y = compensated(y, load(g + i * m, count), growth, spoiled + i);
        if (kind != PROJECT) store(x + i * m, y, count);
        for (int v = 0; v < w && kind <= COMPENSATE; v++) sums[i][v] += y * basis[v];
    }
}

INLINE void multiply_rows(int kind, int rows, int w, const Stage *s, int64_t matrix, int64_t row, int64_t start,
                          int64_t width, const vector *right, const vector *basis) {
    float c[ROWS][FEW] = {0}, *x = s->M[matrix] + row * s->m + start;
    const float *g = kind == COMPENSATE ? s->G[matrix] + row * s->m + start : NULL;
    vector sums[ROWS][FEW] = {0}, spoiled[ROWS] = {0};
    for (int i = 0; i < rows; i++)
        for (int u = 0; u < s->k; u++) {
            const float own = s->left[(matrix * s->n + row + i) * s->k + u];
            c[i][u] = kind == RECONSTRUCT ? own : -own;
        }
    int64_t left = width;
    for (; left >= LANES; left -= LANES, x += LANES, g += LANES, right += w, basis += w)
        multiply(kind, rows, w, g, x, s->m, LANES, s->growth, c, right, basis, sums, spoiled);
    if (left) multiply(kind, rows, w, g, x, s->m, left, s->growth, c, right, basis, sums, spoiled);
    for (int i = 0; i < rows && kind <= COMPENSATE; i++)
        for (int v = 0; v < s->r; v++) {
            float *const P = s->out + (matrix * s->n + row + i) * s->r + v, sum = start ? *P : 0;
            for (int lane = 0; lane < LANES; lane++) sum += sums[i][v][lane] + spoiled[i][lane];
            *P = sum;
        }
}

// Rows of all matrices, counted from the first matrix on.
INLINE void all_rows(int kind, int rows, int w, const Stage *s, int64_t first, int64_t last) {
    vector right[WIDTH / LANES * w], basis[WIDTH / LANES * w];
    for (int64_t matrix = first / s->n; matrix * s->n < last; matrix++)
        for (int64_t start = 0; start < s->m; start += WIDTH) {
            const int64_t width = MINIMUM(WIDTH, s->m - start), top = matrix * s->n, end = MINIMUM(last - top, s->n);
            if (kind != PROJECT) transpose(s->right + (matrix * s->m + start) * s->k, width, s->k, w, right);
            if (kind <= COMPENSATE) transpose(s->basis + (matrix * s->m + start) * s->r, width, s->r, w, basis);
            int64_t row = first > top ? first - top : 0;
            for (; row + rows <= end; row += rows) multiply_rows(kind, rows, w, s, matrix, row, start, width, right, basis);
            for (; row < end; row++) multiply_rows(kind, 1, w, s, matrix, row, start, width, right, basis);
        }
}

// With constants, so that sums stay in registers. One column is read as fast as it arrives: row by row, in order.
INLINE void rows_of_kind(int kind, const Stage *s, int64_t first, int64_t last) {
    const int64_t columns = s->k > s->r ? s->k : s->r;
    if (columns == 1) all_rows(kind, 1, 1, s, first, last);
    else if (columns <= 4) all_rows(kind, ROWS, 4, s, first, last);
    else all_rows(kind, ROWS / 2, FEW, s, first, last);
}

CLONES static void product(const Stage *s, int64_t first, int64_t last) {
    if (s->kind == COMPENSATE) rows_of_kind(COMPENSATE, s, first, last);
    else if (s->kind == RECONSTRUCT) rows_of_kind(RECONSTRUCT, s, first, last);
    else if (s->kind == PROJECT) all_rows(PROJECT, ROWS / 2, FEW, s, first, last);
    else all_rows(SUBTRACT, ROWS / 2, FEW, s, first, last);
}

// Some columns of M, which are rows of Q.
INLINE void multiply_strip(int w, const Stage *s, int64_t matrix, int64_t start, int64_t width) {
    const float *const P = s->basis + matrix * s->n * s->r, *const M = s->M[matrix] + start;
    float *const Q = s->out + (matrix * s->m + start) * s->r;
    vector sums[STRIP / LANES * w];
    for (int64_t top = 0; top < s->n; top += HEIGHT) {
        const int64_t end = MINIMUM(top + HEIGHT, s->n);
        memset(sums, 0, sizeof sums);
        for (int64_t row = top; row < end; row += ROWS) {
            // In the place of rows behind the last one: that row, times 0.
            float c[ROWS][FEW] = {0};
            const float *x[ROWS];
            for (int i = 0; i < ROWS; i++) {
                const int64_t own = MINIMUM(row + i, end - 1);
                x[i] = M + own * s->m;
                for (int v = 0; v < s->r && own == row + i; v++) c[i][v] = P[own * s->r + v];
            }
            for (int64_t j = 0; j < width; j += LANES) {
                vector y[ROWS], *const sum = sums + j / LANES * w;
                for (int i = 0; i < ROWS; i++) {
                    __builtin_prefetch(x[i] + ROWS * s->m + j);
                    y[i] = j + LANES <= width ? load(x[i] + j, LANES) : load(x[i] + j, width - j);
                }
                for (int v = 0; v < w; v++)
                    for (int i = 0; i < ROWS; i++) sum[v] += c[i][v] * y[i];
            }
        }
        for (int64_t j = 0; j < width; j++)
            for (int v = 0; v < s->r; v++) {
                const float sum = sums[j / LANES * w + v][j % LANES];
                Q[j * s->r + v] = top ? Q[j * s->r + v] + sum : sum;
            }
    }
}

CLONES static void backproject(const Stage *s, int64_t first, int64_t last) {
    const int64_t strips = (s->m + STRIP - 1) / STRIP;
    for (int64_t strip = first; strip < last; strip++) {
        const int64_t matrix = strip / strips, start = strip % strips * STRIP, width = MINIMUM(STRIP, s->m - start);
        if (s->r == 1) multiply_strip(1, s, matrix, start, width);
        else if (s->r <= 4) multiply_strip(4, s, matrix, start, width);
        else multiply_strip(FEW, s, matrix, start, width);
    }
}

// Columns of factors up to which this takes less time than torch's libraries.
int32_t powersgd_most_columns(void) {
#if CHOSEN_WHEN_LOADED
    return __builtin_cpu_supports("x86-64-v3") ? 64 : 4;
#elif defined(__x86_64__)
    return 0;
#else
    return FEW;
#endif
}

// The rows or strips of a stage, of which one thread computes each, that begin in its first ``elements``.
static int64_t units(const Stage *s, int64_t elements) {
    const int64_t all = s->count * s->n * s->m, strips = (s->m + STRIP - 1) / STRIP;
    const int64_t count = s->count * (s->kind == BACKPROJECT ? strips : s->n);
    return elements <= 0 ? 0 : elements >= all ? count : (int64_t)((double)count * elements / all);
}

// Stages that do not depend on each other.
void powersgd_multiply(const Stage *stages, int32_t count, int32_t threads) {
    int64_t all = 0;
    for (int32_t i = 0; i < count; i++) all += stages[i].count * stages[i].n * stages[i].m;
    const int64_t parts = all < (int64_t)threads * LEAST_PER_THREAD ? 1 : threads;
    void (*panels)(const Stage *, int64_t, int64_t) = powersgd_panels;
#if CHOSEN_WHEN_LOADED
    if (__builtin_cpu_supports("x86-64-v4")) panels = powersgd_wide_panels;
#endif
#pragma omp parallel for num_threads(parts) schedule(static)
    for (int64_t part = 0; part < parts; part++) {
        int64_t first = all * part / parts, last = all * (part + 1) / parts;
        for (const Stage *s = stages; s < stages + count; s++) {
            void (*const few)(const Stage *, int64_t, int64_t) = s->kind == BACKPROJECT ? backproject : product;
            (s->k > FEW || s->r > FEW ? panels : few)(s, units(s, first), units(s, last));
            first -= s->count * s->n * s->m;
            last -= s->count * s->n * s->m;
        }
    }
}
