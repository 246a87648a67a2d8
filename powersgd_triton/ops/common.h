// What the files of the library have in common.
#pragma once

#include <stdint.h>
#include <string.h>

// Vector instructions are chosen when the library is loaded: it may run on another machine than it was built on.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12
#define CHOSEN_WHEN_LOADED 1
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
// For what is called only where there is AVX2. Vectors have 8 numbers, so those of AVX-512 would not be used.
#define AVX2 __attribute__((target("arch=x86-64-v3")))
#else
#define CHOSEN_WHEN_LOADED 0
#define CLONES
#define AVX2
#endif

#define LEAST_PER_THREAD 16384  // elements; for fewer, a thread takes longer to start
#define MINIMUM(a, b) ((a) < (b) ? (a) : (b))
#define MAXIMUM(a, b) ((a) > (b) ? (a) : (b))

// The bits of numbers in fp32 and bf16.
#define BF16_NAN 0x7FC0
static inline uint32_t word(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static inline float number(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline uint32_t nearest_bf16(uint32_t bits) { return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16; }

// Every bit of the number changes about half of the bits of the result: ops/orthogonalize.py.
static inline uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return x ^ x >> 16;
}
