// Products with factors of more columns than products.c has registers for, panel by panel: two vectors side by side.

#include "products.h"

#ifndef PANELS
#define PANELS powersgd_panels
#define TARGET AVX2
#endif
#define PANEL (2 * LANES)
#define CACHED 32768  // numbers of a factor that stay in the cache with as many of the other
#define DEPTH 64      // rows of a strip that do, and are summed before the sum is added to others

// How many of ``count`` numbers the first or the second vector of a panel has.
INLINE int64_t share(int64_t count, int half) {
    const int64_t some = count - half * LANES;
    return some < 0 ? 0 : MINIMUM(some, LANES);
}

// sums += A B: rows of A are ``row`` apart, and have ``count`` numbers, ``next`` apart. B is a panel.
INLINE void add_product(int rows, int halves, const float *A, int64_t row, int64_t next, const vector *B, int64_t count,
                        vector sums[][2]) {
    for (int64_t c = 0; c < count; c++, A += next, B += 2)
        for (int i = 0; i < rows; i++)
            for (int half = 0; half < halves; half++) sums[i][half] += A[i * row] * B[half];
}

// A panel of some rows of M, and of G. ``copy`` has the same numbers without gaps.
INLINE void update(int kind, int rows, const Stage *s, const float *g, float *x, int64_t count, const float *left,
                   const vector *right, vector *spoiled, float *copy) {
    vector y[ROWS][2] = {0};
    for (int i = 0; i < rows && kind != RECONSTRUCT; i++)
        for (int half = 0; half < 2; half++) y[i][half] = load(x + i * s->m + half * LANES, share(count, half));
    add_product(rows, 2, left, s->k, 1, right, s->k, y);
    for (int i = 0; i < rows; i++) {
        __builtin_prefetch(x + (rows + i) * s->m, 1);
        if (kind == COMPENSATE) __builtin_prefetch(g + (rows + i) * s->m);
        for (int half = 0; half < 2; half++) {
            const int64_t place = i * s->m + half * LANES, some = share(count, half);
            if (kind == COMPENSATE)
                y[i][half] = compensated(y[i][half], load(g + place, some), s->growth, spoiled + i);
            store(x + place, y[i][half], some);
            if (kind == COMPENSATE) store(copy + i * WIDTH + half * LANES, y[i][half], LANES);
        }
    }
}

INLINE void multiply(int kind, int rows, const Stage *s, int64_t matrix, int64_t row, int64_t start, int64_t width,
                     const vector *right, const vector *basis) {
    const float *const left = s->left + (matrix * s->n + row) * s->k;
    float copy[ROWS * WIDTH], *const x = s->M[matrix] + row * s->m + start;
    const float *const g = kind == COMPENSATE ? s->G[matrix] + row * s->m + start : NULL;
    vector spoiled[ROWS] = {0};
    const float *const M = kind == PROJECT ? x : copy;
    const int64_t apart = kind == PROJECT ? s->m : WIDTH;
    int64_t j = kind == PROJECT ? width : 0;
    for (; j + PANEL <= width; j += PANEL, right += 2 * s->k)
        update(kind, rows, s, g ? g + j : g, x + j, PANEL, left, right, spoiled, copy + j);
    if (j < width) update(kind, rows, s, g ? g + j : g, x + j, width - j, left, right, spoiled, copy + j);
    for (int64_t v = 0; v < s->r && kind <= COMPENSATE; v += PANEL, basis += 2 * width) {
        vector sums[ROWS][2] = {0};
        if (s->r - v > LANES) add_product(rows, 2, M, apart, 1, basis, width, sums);
        else add_product(rows, 1, M, apart, 1, basis, width, sums);
        for (int i = 0; i < rows; i++) {
            float rest = 0;
            for (int lane = 0; lane < LANES; lane++) rest += spoiled[i][lane];
            for (int half = 0; half < 2; half++) {
                float *const P = s->out + (matrix * s->n + row + i) * s->r + v + half * LANES;
                const int64_t some = share(s->r - v, half);
                store(P, (start ? load(P, some) : (vector){0}) + (sums[i][half] + rest), some);
            }
        }
    }
}

// Write rows of both factors as panels. Columns from k or r on are zero.
INLINE void into_panels(int kind, const Stage *s, int64_t first, int64_t width, vector *right, vector *basis) {
    memset(right, 0, (width + PANEL - 1) / PANEL * 2 * s->k * sizeof(vector));
    memset(basis, 0, (s->r + PANEL - 1) / PANEL * 2 * width * sizeof(vector));
    for (int64_t j = 0; j < width; j++) {
        for (int64_t u = 0; u < s->k; u++) {
            const float own = s->right[(first + j) * s->k + u];
            ((float *)(right + (j / PANEL * s->k + u) * 2))[j % PANEL] = kind == RECONSTRUCT ? own : -own;
        }
        for (int64_t v = 0; v < s->r; v++)
            ((float *)(basis + (v / PANEL * width + j) * 2))[v % PANEL] = s->basis[(first + j) * s->r + v];
    }
}

INLINE void all_rows(int kind, const Stage *s, int64_t first, int64_t last) {
    // Not by both: sums would then have other bits where there is no product to subtract.
    const int64_t most = CACHED / (s->r ? s->r : s->k) / PANEL * PANEL, widest = MINIMUM(most, WIDTH);
    vector right[widest / LANES * s->k + 1], basis[(s->r + PANEL - 1) / PANEL * 2 * widest + 1];
    for (int64_t matrix = first / s->n; matrix * s->n < last; matrix++)
        for (int64_t start = 0; start < s->m; start += widest) {
            const int64_t width = MINIMUM(widest, s->m - start), top = matrix * s->n, end = MINIMUM(last - top, s->n);
            into_panels(kind, s, matrix * s->m + start, width, right, basis);
            int64_t row = first > top ? first - top : 0;
            for (; row + ROWS <= end; row += ROWS) multiply(kind, ROWS, s, matrix, row, start, width, right, basis);
            for (; row < end; row++) multiply(kind, 1, s, matrix, row, start, width, right, basis);
        }
}

INLINE void add_rows(int rows, const Stage *s, const float *P, const vector *panel, int64_t depth,
                     int64_t place, vector sums[][STRIP / LANES]) {
    vector found[ROWS][2] = {0};
    add_product(rows, 2, P, 1, s->r, panel, depth, found);
    for (int i = 0; i < rows; i++)
        for (int half = 0; half < 2; half++) sums[i][place + half] += found[i][half];
}

// Some columns of M, which are rows of Q.
INLINE void multiply_strip(const Stage *s, int64_t matrix, int64_t start, int64_t width) {
    const float *const M = s->M[matrix] + start;
    float *const Q = s->out + (matrix * s->m + start) * s->r;
    vector sums[s->r][STRIP / LANES], panels[STRIP / PANEL][DEPTH][2];
    memset(sums, 0, sizeof sums);
    for (int64_t top = 0; top < s->n; top += DEPTH) {
        const int64_t depth = MINIMUM(DEPTH, s->n - top);
        const float *const P = s->basis + (matrix * s->n + top) * s->r;
        // Where m is a power of 2, the rows of a panel would displace each other from the cache.
        for (int64_t i = 0; i < depth; i++) {
            const float *const x = M + (top + i) * s->m;
            int64_t j = 0;
            for (; j + PANEL <= width; j += PANEL) {
                __builtin_prefetch(x + ROWS * s->m + j);
                for (int half = 0; half < 2; half++) panels[j / PANEL][i][half] = load(x + j + half * LANES, LANES);
            }
            for (int half = 0; half < 2 && j < width; half++)
                panels[j / PANEL][i][half] = load(x + j + half * LANES, share(width - j, half));
        }
        for (int64_t p = 0; p * PANEL < width; p++) {
            int64_t v = 0;
            for (; v + ROWS <= s->r; v += ROWS) add_rows(ROWS, s, P + v, panels[p][0], depth, 2 * p, sums + v);
            for (; v < s->r; v++) add_rows(1, s, P + v, panels[p][0], depth, 2 * p, sums + v);
        }
    }
    for (int64_t j = 0; j < width; j++)
        for (int64_t v = 0; v < s->r; v++) Q[j * s->r + v] = sums[v][j / LANES][j % LANES];
}

TARGET void PANELS(const Stage *s, int64_t first, int64_t last) {
    const int64_t strips = (s->m + STRIP - 1) / STRIP;
    if (s->kind == COMPENSATE) all_rows(COMPENSATE, s, first, last);
    else if (s->kind == RECONSTRUCT) all_rows(RECONSTRUCT, s, first, last);
    else if (s->kind == PROJECT) all_rows(PROJECT, s, first, last);
    else if (s->kind == SUBTRACT) all_rows(SUBTRACT, s, first, last);
    else
        for (int64_t strip = first; strip < last; strip++) {
            const int64_t start = strip % strips * STRIP;
            multiply_strip(s, strip / strips, start, MINIMUM(STRIP, s->m - start));
        }
}
