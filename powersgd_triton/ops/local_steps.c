// Local steps on the CPU: what ops/local_steps.py defines. One pass over a parameter, where operations of torch take
// three. All arrays have numel elements, and do not overlap.

#include <stddef.h>

#include "common.h"

// The greatest magnitude of out, as its bits, among which those of NaN are the greatest.
CLONES static int32_t subtract(const float *start, const float *own, float *restrict out, float *restrict copy, int64_t n) {
    int32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        const float difference = start[i] - own[i];
        const int32_t magnitude = (int32_t)(word(difference) & 0x7FFFFFFF);
        largest = MAXIMUM(magnitude, largest);
        out[i] = difference;
        if (copy) copy[i] = own[i];
    }
    return largest;
}

CLONES static void go_on(float *restrict own, const float *shared, const float *begun, const float *error, float keep,
                         int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const float value = begun ? own[i] - begun[i] + shared[i] : shared[i];
        own[i] = error ? value - keep * error[i] : value;
    }
}

#define AT(pointer) ((pointer) ? (pointer) + first : NULL)

// out = start - own, copy = own, largest = the greatest magnitude of out. copy may be NULL.
void powersgd_subtract(const float *start, const float *own, float *out, float *copy, float *largest, int64_t numel,
                       int32_t threads) {
    int32_t most = 0;
    const int64_t parts = numel < (int64_t)threads * LEAST_PER_THREAD ? 1 : threads;
#pragma omp parallel for num_threads(parts) schedule(static) reduction(max : most)
    for (int64_t part = 0; part < parts; part++) {
        const int64_t first = numel * part / parts, last = numel * (part + 1) / parts;
        const int32_t found = subtract(start + first, own + first, out + first, AT(copy), last - first);
        most = MAXIMUM(found, most);
    }
    *largest = number((uint32_t)most);
}

// own = own - begun + shared - keep * error. If begun is NULL, own - begun is left out. error may be NULL, too.
void powersgd_go_on(float *own, const float *shared, const float *begun, const float *error, float keep, int64_t numel,
                    int32_t threads) {
    const int64_t parts = numel < (int64_t)threads * LEAST_PER_THREAD ? 1 : threads;
#pragma omp parallel for num_threads(parts) schedule(static)
    for (int64_t part = 0; part < parts; part++) {
        const int64_t first = numel * part / parts, last = numel * (part + 1) / parts;
        go_on(own + first, shared + first, AT(begun), AT(error), keep, last - first);
    }
}
