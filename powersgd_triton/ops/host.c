// Quantized tensors on the CPU: what ops/differences.py and ops/sparse.py define for these formats, with the same bits.
// One pass reads or writes a tensor, where operations of torch take about ten.
//
// Built without -ffast-math and with -ffp-contract=off, since bits depend on the order and the rounding of operations.
// The compiler may compute what is not used (-fno-trapping-math), or some loops would not use vector instructions.

#include <math.h>

#include "common.h"

#define BLOCK 128
#define PERIOD 65536
#define CHUNK 4096
#define BF16_LARGEST 0x7F7F
#define GROUP 4  // blocks that are encoded together

enum { INT4, INT8, FP8, BF16 };
static const int BITS[] = {4, 8, 8, 16};
static const float LEVELS[] = {7, 127, 448, 1};

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

static inline int32_t low_bits(int32_t kept) {
    int32_t low = 0;
    while (kept << (low + 1) <= CHUNK) low++;
    return low;
}

static inline int64_t chunk_bytes(int32_t kept, int32_t low) { return ((low + 2) * kept + (CHUNK >> low)) / 8; }

// How many upper halves of magnitudes are at least so large. In 16 bits, of which a vector has twice as many.
static inline int32_t number_of(const int16_t *upper, int32_t least) {
    int16_t number = 0;
    for (int i = 0; i < CHUNK; i++) number = (int16_t)(number + (upper[i] >= (int16_t)least));
    return number;
}

// An upper half that so many or more elements have or exceed, and that no larger one is needed for, or 0. Neighbouring
// chunks are alike, so that it is near the guess.
static inline int32_t least_upper(const int16_t *upper, int32_t most, int32_t guess) {
    int32_t least = 0, above = 0x7F80;
    for (int32_t step = 0, number = 0; above - least > 1 && number != most; step = 4 * step + 4) {
        int32_t next = (least + above) / 2;
        next = next < guess - step ? guess - step : next;
        next = next > guess + step ? guess + step : next;
        number = number_of(upper, next);
        if (number >= most) least = next;
        else above = next;
    }
    return least;
}

// Bits of eight bytes that are next to each other, in a byte.
static inline uint8_t gather_bits(const uint8_t *bytes, int bit) {
    uint64_t eight;
    memcpy(&eight, bytes, 8);
    return (uint8_t)((eight >> bit & 0x0101010101010101) * 0x0102040810204080 >> 56);
}

// The inverse, for bits that are not set.
static inline void scatter_bits(uint8_t bits, int bit, uint8_t *bytes) {
    uint64_t eight;
    memcpy(&eight, bytes, 8);
    // Copies of seven bits do not overlap in the product.
    eight |= ((bits & 0x7F) * 0x0002040810204081 & 0x0101010101010101) << bit | (uint64_t)(bits >> 7) << (56 + bit);
    memcpy(bytes, &eight, 8);
}

// Write the places of the elements that are sent, and their magnitudes. Return how many. Not all that have the least
// upper half have room: the larger ones come first, and then the first ones. Zeros are not sent.
static inline int32_t choose(const float *x, const int16_t *upper, int32_t least, int32_t most, uint16_t *places,
                             uint32_t *magnitudes) {
    uint8_t large[CHUNK];
    int32_t listed = 0, larger = 0, sent = 0;
    for (int i = 0; i < CHUNK; i++) large[i] = upper[i] >= (int16_t)least;
    for (int i = 0; i < CHUNK; i += 64) {
        uint64_t found = 0;
        // The next chunk. Processors do not look so far ahead.
        for (int k = 0; k < 64; k += 16) __builtin_prefetch(x + CHUNK + i + k);
        for (int k = 0; k < 8; k++) found |= (uint64_t)gather_bits(large + i + 8 * k, 0) << 8 * k;
        for (; found; found &= found - 1) places[listed++] = (uint16_t)(i + __builtin_ctzll(found));
    }
    for (int i = 0; i < listed; i++) magnitudes[i] = word(x[places[i]]) & 0x7FFFFFFF;
    uint32_t limit = (uint32_t)least << 16, bit = 1 << 15;
    for (int32_t number = listed; bit && number != most; bit >>= 1) {
        number = 0;
        for (int i = 0; i < listed; i++) number += magnitudes[i] >= (limit | bit);
        if (number >= most) limit |= bit;
    }
    for (int i = 0; i < listed; i++) larger += magnitudes[i] > limit;
    int32_t ties = limit ? most - larger : 0;
    for (int i = 0; i < listed; i++) {
        if (magnitudes[i] < limit || (magnitudes[i] == limit && ties-- <= 0)) continue;
        places[sent] = places[i];
        magnitudes[sent++] = magnitudes[i];
    }
    return sent;
}

CLONES static void encode_chunks(const Encoding *e, int64_t first, int64_t last) {
    const int32_t kept = e->kept, low = low_bits(kept);
    int32_t least = 0;
    for (int64_t chunk = first; chunk < last; chunk++) {
        const int64_t left = e->numel - chunk * CHUNK;
        const int32_t n = left < CHUNK ? (int32_t)left : CHUNK;
        float *own = e->target + chunk * CHUNK, copy[CHUNK], part[CHUNK / 2];
        const float *x = own;
        int16_t upper[CHUNK], largest = 0;
        uint16_t places[CHUNK];
        uint32_t magnitudes[CHUNK];
        uint8_t *codes = e->content + e->codes + chunk * chunk_bytes(kept, low);
        for (int64_t i = 0, place = chunk * CHUNK; i < n && e->term; i++) own[i] = e->term[place + i] + e->other[place + i];
        if (n < CHUNK) {
            memset(copy, 0, sizeof copy);
            x = memcpy(copy, own, n * sizeof(float));
        }
        for (int i = 0; i < CHUNK; i++) upper[i] = (int16_t)(word(x[i]) >> 16 & 0x7FFF);
        for (int i = 0; i < CHUNK; i++) largest = upper[i] > largest ? upper[i] : largest;
        if (largest >= 0x7F80) {
            ((uint16_t *)e->content)[chunk] = BF16_NAN;
            memset(codes, 0, chunk_bytes(kept, low));
            for (int i = 0; i < n && e->subtract; i++) own[i] = NAN;
            continue;
        }
        const int32_t most = (kept * n + CHUNK - 1) / CHUNK;
        least = least_upper(upper, most, least);
        const int32_t sent = choose(x, upper, least, most, places, magnitudes);
        // The sum of elements i and i + CHUNK / 2 comes first.
        memset(part, 0, sizeof part);
        for (int i = 0; i < sent; i++) part[places[i] % (CHUNK / 2)] += number(magnitudes[i]) / CHUNK;
        for (int half = CHUNK / 4; half; half /= 2)
            for (int i = 0; i < half; i++) part[i] += part[i + half];
        const float mean = part[0] / (float)(sent ? sent : 1) * CHUNK;
        const uint32_t rounded = nearest_bf16(word(mean)), scale = rounded < BF16_LARGEST ? rounded : BF16_LARGEST;
        ((uint16_t *)e->content)[chunk] = (uint16_t)scale;
        // A byte for each bit, and for the bits of places and signs.
        uint8_t lower[CHUNK / 2], higher[CHUNK / 2], unary[CHUNK];
        memset(lower + sent, 0, kept - sent);
        memset(higher + sent, 0, kept - sent);
        memset(unary, 0, (CHUNK >> low) + kept);
        for (int i = 0; i < sent; i++) {
            const uint32_t place = places[i], negative = word(x[place]) >> 31;
            lower[i] = (uint8_t)place;
            higher[i] = (uint8_t)(place >> 8 | negative << 7);
            unary[(place >> low) + i] = 1;
            if (e->subtract) own[place] -= number(scale << 16 | negative << 31);
        }
        for (int bit = 0; bit < low; bit++)
            for (int i = 0; i < kept; i += 8) *codes++ = gather_bits((bit < 8 ? lower : higher) + i, bit % 8);
        for (int i = 0; i < kept; i += 8) *codes++ = gather_bits(higher + i, 7);
        for (int i = 0; i < (CHUNK >> low) + kept; i += 8) *codes++ = gather_bits(unary + i, 0);
    }
}

CLONES static void decode_chunks(const Decoding *d, int64_t first, int64_t last) {
    const int32_t kept = d->kept, low = low_bits(kept);
    for (int64_t chunk = first; chunk < last; chunk++) {
        const int64_t left = d->numel - chunk * CHUNK;
        const int32_t n = left < CHUNK ? (int32_t)left : CHUNK;
        float *out = d->out + chunk * CHUNK;
        for (int i = 0; i < n; i++) out[i] = !d->fresh && fabsf(out[i]) < INFINITY ? out[i] : 0.0f;
        int32_t next = 0;
        for (int64_t message = 0; message < d->messages; message++) {
            const uint8_t *content = d->content + message * d->size;
            const uint8_t *codes = content + d->codes + chunk * chunk_bytes(kept, low);
            const uint8_t *unary = codes + (low + 1) * kept / 8;
            const float unit = number((uint32_t)((const uint16_t *)content)[chunk] << 16) * d->weight;
            for (int i = 0; i < n && unit != unit; i++) out[i] = NAN;
            uint8_t lower[CHUNK / 2], higher[CHUNK / 2];
            memset(lower, 0, kept);
            memset(higher, 0, kept);
            for (int bit = 0; bit <= low; bit++)
                for (int i = 0; i < kept; i += 8)
                    scatter_bits(*codes++, bit < low ? bit % 8 : 7, (bit < MINIMUM(low, 8) ? lower : higher) + i);
            // In several loops, which take less time than one with all of this.
            uint16_t places[CHUNK / 2 + 64];
            float values[CHUNK / 2];
            int32_t sent = 0;
            for (int byte = 0, bytes = ((CHUNK >> low) + kept) / 8; byte < bytes && sent < kept; byte += 8) {
                uint64_t bits = 0;
                memcpy(&bits, unary + byte, bytes - byte < 8 ? bytes - byte : 8);
                for (; bits; bits &= bits - 1) places[sent++] = (uint16_t)(byte * 8 + __builtin_ctzll(bits));
            }
            sent = MINIMUM(sent, kept);
            for (int i = 0; i < sent; i++) {
                places[i] = (uint16_t)((places[i] - i) << low | (higher[i] & 0x7F) << 8 | lower[i]);
                values[i] = number(word(unit) ^ (uint32_t)(higher[i] & 0x80) << 24);
            }
            for (int i = 0; i < sent; i++) {
                // The next chunk, line by line: many at a time would have to wait.
                __builtin_prefetch(out + CHUNK + next, 1);
                next = (next + 16) % CHUNK;
                out[places[i]] += values[i];
            }
        }
    }
}

#define IN_PARTS(work, of, size)                                                                                       \
    const int64_t blocks = (of->numel + size - 1) / size;                                                              \
    const int64_t parts = of->numel < (int64_t)threads * LEAST_PER_THREAD ? 1 : threads;                               \
    _Pragma("omp parallel for num_threads(parts) schedule(static)")                                                    \
    for (int64_t part = 0; part < parts; part++) work(of, blocks * part / parts, blocks * (part + 1) / parts)

// Change the number here and in host.py when a function gets other arguments: a library may be older than Python's code.
void powersgd_interface_3(void) {}

void powersgd_encode(const Encoding *e, int32_t threads) { IN_PARTS(encode_blocks, e, BLOCK); }
void powersgd_decode(const Decoding *d, int32_t threads) { IN_PARTS(decode_blocks, d, BLOCK); }
void powersgd_encode_sparse(const Encoding *e, int32_t threads) { IN_PARTS(encode_chunks, e, CHUNK); }
void powersgd_decode_sparse(const Decoding *d, int32_t threads) { IN_PARTS(decode_chunks, d, CHUNK); }
