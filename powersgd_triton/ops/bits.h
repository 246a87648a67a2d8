// The bits of numbers in fp32 and bf16.
#pragma once

#include <stdint.h>
#include <string.h>

#define BF16_NAN 0x7FC0

static inline uint32_t word(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static inline float number(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline uint32_t nearest_bf16(uint32_t bits) { return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16; }
