// Quantized tensors on the CPU: what ops/differences.py defines for these formats, with the same bits.
// One pass reads or writes a tensor, where operations of torch take about ten.
//
// Built without -ffast-math and with -ffp-contract=off, since bits depend on the order and the rounding of operations.
// The compiler may compute what is not used (-fno-trapping-math), or some loops would not use vector instructions.

#include "codec.h"

#define BLOCK 128
#define PERIOD 65536
#define GROUP 4  // blocks that are encoded together

enum { INT4, INT8, FP8, BF16 };
static const int BITS[] = {4, 8, 8, 16};
static const float LEVELS[] = {7, 127, 448, 1};

// Random numbers below 2^16, as ops/differences.py has them.
static inline void random_numbers(uint16_t *noise, uint16_t start) {
    for (int i = 0; i < BLOCK; i++) {
        uint16_t x = (uint16_t)(start + i);
        x = (uint16_t)((x ^ x >> 8) * 0x88B5u);
        x = (uint16_t)((x ^ x >> 7) * 0xDB2Du);
        noise[i] = x ^ x >> 9;
    }
}

// The bits of a block's scale, bf16.
static inline uint32_t scale_of(const float *x, float levels, uint32_t limit, int up) {
    uint32_t largest = 0;
    for (int i = 0; i < BLOCK; i++) {
        const uint32_t magnitude = word(x[i]) & 0x7FFFFFFF;
        largest = magnitude > largest ? magnitude : largest;
    }
    if (largest >= 0x7F800000) return BF16_NAN;
    const uint32_t size = word(number(largest) / levels);
    const uint32_t scale = up ? (size + 0xFFFF) >> 16 : nearest_bf16(size);
    return scale < limit ? scale : limit;
}

// Write a block of bf16 numbers.
static inline void encode_bf16(const float *x, const uint16_t *noise, uint16_t *out) {
    for (int i = 0; i < BLOCK; i++) {
        const uint32_t magnitude = word(x[i]) & 0x7FFFFFFF, sign = word(x[i]) >> 16 & 0x8000;
        uint32_t rounded = noise ? (magnitude + noise[i]) >> 16 : nearest_bf16(magnitude);
        rounded = rounded < BF16_LARGEST ? rounded : BF16_LARGEST;
        out[i] = (uint16_t)(magnitude < 0x7F800000 ? rounded | sign : BF16_NAN);
    }
}

// The code of a number of E4M3: of the nearest one, or with random numbers of one of both neighbours.
static inline int32_t fp8_code(float q, const uint16_t *noise, int i) {
    // 1.5 * 2^23 units in the last place of the format: only its multiples remain in the sum.
    const uint32_t exponent = word(q) & 0x7F800000, least = (127 - 6) << 23;
    const float unit = number((exponent > least ? exponent : least) + (20 << 23) + (1 << 22));
    // 0 in the place of -0. The factor gives the numbers the bits of their exponents, also the subnormal ones.
    const float rounded = noise ? q + 0.0f : (q + unit) - unit;
    const uint32_t bits = word(rounded * 0x1p-120f) + (noise ? (uint32_t)noise[i] << 4 : 0);
    return (int32_t)((bits >> 20 & 0x7F) | (bits >> 24 & 0x80));
}

// Write the codes of a block in 8 or 4 bits. Quotients are within the levels if the scale is ordinary.
static inline void write_codes(const float *x, const uint16_t *noise, int format, float divisor, int ordinary, int32_t kept,
                               uint8_t *codes) {
    const float levels = LEVELS[format];
    const int32_t half = 1 << (BITS[format] - 1);
    int32_t code[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        float q = x[i] / divisor;
        if (!ordinary) {
            q = q < levels ? q : levels;
            q = q > -levels ? q : -levels;
        }
        // Random numbers are added with 16 bits behind the point. Without, 1.5 * 2^23 rounds the sum to nearest.
        const int32_t rounded = noise ? (int32_t)(q + number(noise[i] | 0x43000000)) - 128
                                      : (int32_t)(word(q + 12582912.0f) - word(12582912.0f));
        code[i] = format == FP8 ? fp8_code(q, noise, i) : rounded + half;
        if (!ordinary) code[i] &= kept;
    }
    if (format != INT4)
        for (int i = 0; i < BLOCK; i++) codes[i] = (uint8_t)code[i];
    else
        for (int i = 0; i < BLOCK / 2; i++) codes[i] = (uint8_t)(code[i] | code[i + BLOCK / 2] << 4);
}

// The largest scale whose product with the levels is finite.
static inline uint32_t largest_scale(int format) { return word(number(0x7F7FFFFF) / LEVELS[format]) >> 16; }

// Write the scales and the codes of some blocks x. All scales come first: no block then waits for the scale of another.
static inline void encode_group(const Encoding *e, int64_t place, const float *x, const uint16_t *starts, int blocks,
                                int format, uint16_t *scales, uint8_t *codes) {
    const uint32_t limit = largest_scale(format);
    for (int b = 0; b < blocks && format != BF16; b++)
        scales[b] = (uint16_t)scale_of(x + b * BLOCK, LEVELS[format], limit, starts != NULL);
    for (int b = 0; b < blocks; b++, x += BLOCK, place += BLOCK, codes += BLOCK * BITS[format] / 8) {
        uint16_t numbers[BLOCK], *noise = starts ? numbers : NULL;
        // The next group. Processors follow one tensor by themselves, but not several.
        for (int64_t i = place; i < place + BLOCK && e->term; i += 16) {
            __builtin_prefetch(e->target + GROUP * BLOCK + i);
            __builtin_prefetch(e->term + GROUP * BLOCK + i);
            __builtin_prefetch(e->other + GROUP * BLOCK + i);
        }
        if (noise) random_numbers(noise, starts[b]);
        // Scales that are not normal numbers are rounded coarsely, and the largest one down: a quotient may exceed the
        // levels. Looking at all quotients takes longer than all else.
        if (format == BF16)
            encode_bf16(x, noise, (uint16_t *)codes);
        else if (scales[b] >= 0x0080 && scales[b] < limit)
            write_codes(x, noise, format, number((uint32_t)scales[b] << 16), 1, -1, codes);
        else
            write_codes(x, noise, format, scales[b] ? number((uint32_t)scales[b] << 16) : INFINITY, 0,
                        scales[b] == BF16_NAN ? 0 : -1, codes);
    }
}

// Write what the codes of a block stand for, times a weight.
static inline void decode_block(int format, uint16_t scale, const uint8_t *codes, float weight, float *value) {
    const float half = (float)(1 << (BITS[format] - 1)), unit = number((uint32_t)scale << 16) * weight;
    if (format == BF16)
        for (int i = 0; i < BLOCK; i++) value[i] = number((uint32_t)((const uint16_t *)codes)[i] << 16) * weight;
    else if (format == INT8)
        for (int i = 0; i < BLOCK; i++) value[i] = ((float)codes[i] - half) * unit;
    else if (format == FP8)
        for (int i = 0; i < BLOCK; i++)
            value[i] = number((codes[i] & 0x80u) << 24 | (codes[i] & 0x7Fu) << 20) * 0x1p120f * unit;
    else
        for (int i = 0; i < BLOCK / 2; i++) {
            value[i] = ((float)(codes[i] & 15) - half) * unit;
            value[i + BLOCK / 2] = ((float)(codes[i] >> 4) - half) * unit;
        }
}

CLONES static void encode_blocks(const Encoding *e, int64_t first, int64_t last) {
    for (int64_t block = first; block < last; block += GROUP) {
        const int blocks = last - block < GROUP ? (int)(last - block) : GROUP;
        const int64_t place = block * BLOCK, left = e->numel - place;
        const int n = left < blocks * BLOCK ? (int)left : blocks * BLOCK;
        float *own = e->target + place, copy[GROUP * BLOCK];
        const float *x = own;
        uint16_t numbers[GROUP], *starts = e->random ? numbers : NULL, *scales = (uint16_t *)e->content + block;
        uint8_t *codes = e->content + e->codes + place * BITS[e->format] / 8;
        if (e->term)
            for (int i = 0; i < n; i++) own[i] = e->term[place + i] + e->other[place + i];
        if (e->base || n < blocks * BLOCK) {
            memset(copy, 0, sizeof copy);
            memcpy(copy, own, n * sizeof(float));
            x = copy;
        }
        if (e->base)
            for (int i = 0; i < n; i++) copy[i] -= fabsf(e->base[place + i]) < INFINITY ? e->base[place + i] : 0.0f;
        for (int64_t b = 0, i = place; b < blocks && starts; b++, i += BLOCK)
            starts[b] = (uint16_t)(mix(mix(e->span + (uint32_t)(i / PERIOD)) ^ e->seed) + i % PERIOD);
        // With constants, so that the compiler has a loop for each case.
        if (e->format == INT8 && starts) encode_group(e, place, x, starts, blocks, INT8, scales, codes);
        else if (e->format == INT8) encode_group(e, place, x, NULL, blocks, INT8, scales, codes);
        else if (e->format == INT4 && starts) encode_group(e, place, x, starts, blocks, INT4, scales, codes);
        else if (e->format == INT4) encode_group(e, place, x, NULL, blocks, INT4, scales, codes);
        else if (e->format == FP8 && starts) encode_group(e, place, x, starts, blocks, FP8, scales, codes);
        else if (e->format == FP8) encode_group(e, place, x, NULL, blocks, FP8, scales, codes);
        else if (starts) encode_group(e, place, x, starts, blocks, BF16, scales, codes);
        else encode_group(e, place, x, NULL, blocks, BF16, scales, codes);
        for (int b = 0; b < blocks && e->subtract; b++, own += BLOCK, codes += BLOCK * BITS[e->format] / 8) {
            const int size = n - b * BLOCK < BLOCK ? n - b * BLOCK : BLOCK;
            float value[BLOCK];
            decode_block(e->format, e->format == BF16 ? 0 : scales[b], codes, 1, value);
            for (int i = 0; i < size; i++) own[i] -= value[i];
        }
    }
}

CLONES static void decode_blocks(const Decoding *d, int64_t first, int64_t last) {
    for (int64_t block = first; block < last; block++) {
        const int64_t place = block * BLOCK, left = d->numel - place;
        const int n = left < BLOCK ? (int)left : BLOCK;
        float *out = d->out + place, copy[BLOCK], added[BLOCK], *sum = n < BLOCK ? copy : out;
        for (int i = 0; i < BLOCK; i += 16) __builtin_prefetch(out + GROUP * BLOCK + i, 1);
        if (!d->fresh)
            for (int i = 0; i < n; i++) sum[i] = fabsf(out[i]) < INFINITY ? out[i] : 0.0f;
        for (int64_t message = 0; message < d->messages; message++) {
            const uint8_t *content = d->content + message * d->size;
            const uint8_t *codes = content + d->codes + place * BITS[d->format] / 8;
            const uint16_t scale = d->format == BF16 ? 0 : ((const uint16_t *)content)[block];
            // The first one is not added to 0, which would change -0.
            float *value = d->fresh && !message ? sum : added;
            decode_block(d->format, scale, codes, d->weight, value);
            if (value == added)
                for (int i = 0; i < n; i++) sum[i] += added[i];
        }
        if (n < BLOCK) memcpy(out, sum, n * sizeof(float));
    }
}

// Change the number here and in host.py when a function gets other arguments: a library may be older than Python's code.
void powersgd_interface_3(void) {}

void powersgd_encode(const Encoding *e, int32_t threads) { IN_PARTS(encode_blocks, e, BLOCK); }
void powersgd_decode(const Decoding *d, int32_t threads) { IN_PARTS(decode_blocks, d, BLOCK); }
