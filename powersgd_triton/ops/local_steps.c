// Local steps on the CPU: what ops/local_steps.py defines. One pass over the parameters, where operations of torch take
// three. Arrays of a piece have numel elements, and do not overlap.

#include "common.h"

typedef struct {
    float *arrays[4];  // NULL for what is left out
    int64_t numel;
} Piece;

// out = start - own, copy = own. The greatest magnitude of out, as its bits, among which those of NaN are the greatest.
CLONES static int32_t subtract(float *const *arrays, int64_t first, int64_t n, float keep) {
    const float *start = arrays[0] + first, *own = arrays[1] + first;
    float *restrict out = arrays[2] + first, *restrict copy = arrays[3] ? arrays[3] + first : NULL;
    int32_t largest = 0;
    (void)keep;
    for (int64_t i = 0; i < n; i++) {
        const float difference = start[i] - own[i];
        const int32_t magnitude = (int32_t)(word(difference) & 0x7FFFFFFF);
        largest = MAXIMUM(magnitude, largest);
        out[i] = difference;
        if (copy) copy[i] = own[i];
    }
    return largest;
}

// own = own - begun + shared - keep * error. Without begun, own - begun is left out.
CLONES static int32_t go_on(float *const *arrays, int64_t first, int64_t n, float keep) {
    float *restrict own = arrays[0] + first;
    const float *shared = arrays[1] + first, *begun = arrays[2] ? arrays[2] + first : NULL;
    const float *error = arrays[3] ? arrays[3] + first : NULL;
    for (int64_t i = 0; i < n; i++) {
        const float value = begun ? own[i] - begun[i] + shared[i] : shared[i];
        own[i] = error ? value - keep * error[i] : value;
    }
    return 0;
}

// Threads divide the elements of all pieces. Return the greatest of what the parts return.
static int32_t in_parts(int32_t (*work)(float *const *, int64_t, int64_t, float), const Piece *pieces, int64_t count,
                        float keep, int32_t threads) {
    int64_t numel = 0;
    int32_t most = 0;
    for (int64_t i = 0; i < count; i++) numel += pieces[i].numel;
    const int64_t parts = numel < (int64_t)threads * LEAST_PER_THREAD ? 1 : threads;
#pragma omp parallel for num_threads(parts) schedule(static) reduction(max : most)
    for (int64_t part = 0; part < parts; part++) {
        int64_t before = 0;
        for (const Piece *piece = pieces; piece < pieces + count; before += piece++->numel) {
            const int64_t first = MAXIMUM(numel * part / parts - before, 0);
            const int64_t last = MINIMUM(numel * (part + 1) / parts - before, piece->numel);
            const int32_t found = first < last ? work(piece->arrays, first, last - first, keep) : 0;
            most = MAXIMUM(found, most);
        }
    }
    return most;
}

// Pieces have start, own, out and copy.
void powersgd_subtract(const Piece *pieces, int64_t count, float *largest, int32_t threads) {
    *largest = number((uint32_t)in_parts(subtract, pieces, count, 0, threads));
}

// Pieces have own, shared, begun and error.
void powersgd_go_on(const Piece *pieces, int64_t count, float keep, int32_t threads) {
    in_parts(go_on, pieces, count, keep, threads);
}
