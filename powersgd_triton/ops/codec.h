// What the codecs of quantized tensors have in common: differences.c and sparse.c.
#pragma once

#include <math.h>

#include "common.h"

#define BF16_LARGEST 0x7F7F

typedef struct {
    float *target;
    const float *base;      // or NULL for zeros
    const float *term, *other;  // target is their sum, or NULL if it is given
    uint8_t *content;
    int64_t numel, codes;   // codes: their offset in content, in bytes
    uint32_t seed, span;    // of random numbers, and the number of the first PERIOD elements among all messages
    int32_t random, format, subtract, kept;  // kept: elements of a chunk that are sent, in the sparse format
} Encoding;

typedef struct {
    float *out;
    const uint8_t *content;
    int64_t numel, codes, size, messages;  // size: bytes from a message to the next one
    float weight;
    int32_t format, fresh, kept;
} Decoding;

// Threads divide blocks or chunks of so many elements.
#define IN_PARTS(work, of, size)                                                                                       \
    const int64_t blocks = (of->numel + size - 1) / size;                                                              \
    const int64_t parts = of->numel < (int64_t)threads * LEAST_PER_THREAD ? 1 : threads;                               \
    _Pragma("omp parallel for num_threads(parts) schedule(static)")                                                    \
    for (int64_t part = 0; part < parts; part++) work(of, blocks * part / parts, blocks * (part + 1) / parts)
