// Factors in messages on the CPU: what ops/factors.py defines for formats with scales, with the same bits.

#include "common.h"

#define BLOCK 128  // rows that share scales
#define LINE 64    // entries that are processed together: of several rows if a row is shorter

typedef struct {
    int64_t count, rows, rank;     // matrices
    int64_t element, scale, code;  // where the first one begins: in values; in a message, in bytes
} Piece;

typedef struct {
    const Piece *pieces;
    const float *values;  // to be encoded, or NULL to decode
    float *out;           // what the codes stand for, or NULL; the sum of all messages
    uint8_t *content;
    int64_t number, size, messages;  // number: of pieces; size: bytes from a message to the next one
    int32_t bits;
} Factors;

// Some columns of a block. Lines have ``joined`` rows of them.
typedef struct {
    int64_t rows, rank, half;  // half: with 4 bits, the rows whose codes are the lower ones of bytes; else all rows
    int width, joined;
} Panel;

static inline int entries(const Panel *p, int64_t row, int64_t last) {
    return row < last ? (int)MINIMUM(p->joined, last - row) * p->width : 0;
}

// fp16's least normal number, as bits of fp32. No number below is subnormal in fp32: threads may flush those to zero.
static const uint32_t LEAST_NORMAL = (127 - 14) << 23;

// The nearest number of fp16 as bits; quotients have at most 4 as their magnitude.
static inline uint16_t to_fp16(float q) {
    const uint32_t sign = word(q) >> 31, exponent = word(q) & 0x7F800000, from = MAXIMUM(exponent, LEAST_NORMAL);
    // 1.5 * 2^23 units in the last place of the format: the sum's last bits count these units.
    const uint32_t unit = from + (13 << 23) + (1 << 22);
    const uint32_t units = word(number(word(q) & 0x7FFFFFFF) + number(unit)) - unit;
    return (uint16_t)((((from - LEAST_NORMAL) >> 13) + units) | sign << 15);
}

static inline float from_fp16(uint16_t code) {
    const uint32_t magnitude = code & 0x7FFFu, moved = magnitude << 13;
    const uint32_t small = word(number(LEAST_NORMAL + moved) - number(LEAST_NORMAL));
    // Infinity and NaN, which only a wrong message has, stay what they are.
    const uint32_t normal = moved + ((magnitude < 0x7C00 ? 112 : 224) << 23);
    return number((code & 0x8000u) << 16 | (magnitude < 1024 ? small : normal));
}

// Write codes of a line, in 4 bits a byte each, and what they stand for.
static inline void write_codes(const float *x, const float *unit, const int32_t *kept, int n, int bits, float *out,
                               uint8_t *codes) {
    const float levels = bits == 4 ? 7.0f : 127.0f;
    for (int i = 0; i < n; i++) {
        float q = x[i] / unit[i];
        // Scales that are not normal numbers are rounded coarsely: a quotient may exceed the levels.
        q = q < levels ? q : levels;
        q = q > -levels ? q : -levels;
        if (bits == 16) {
            const uint16_t code = (uint16_t)(to_fp16(q) & kept[i]);
            ((uint16_t *)codes)[i] = code;
            if (out) out[i] = from_fp16(code) * unit[i];
        } else {
            const int32_t code = (int32_t)(word(q + 12582912.0f) - word(12582912.0f)) & kept[i];
            codes[i] = (uint8_t)code;
            if (out) out[i] = (float)code * unit[i];
        }
    }
}

static inline void encode_panel(const Panel *p, int bits, const float *x, float *out, uint16_t *scales, uint8_t *codes) {
    const float levels = bits == 4 ? 7.0f : bits == 8 ? 127.0f : 2.0f;
    uint32_t largest[LINE] = {0};
    float unit[LINE];
    int32_t kept[LINE];
    for (int64_t row = 0; row < p->rows; row += p->joined)
        for (int i = 0, n = entries(p, row, p->rows); i < n; i++) {
            const uint32_t magnitude = word(x[row * p->rank + i]) & 0x7FFFFFFF;
            largest[i] = MAXIMUM(largest[i], magnitude);
        }
    for (int u = 0; u < p->width; u++) {
        uint32_t most = largest[u];
        for (int j = 1; j < p->joined; j++) most = MAXIMUM(most, largest[j * p->width + u]);
        scales[u] = (uint16_t)(most < 0x7F800000 ? nearest_bf16(word(number(most) / levels)) : BF16_NAN);
        for (int j = 0; j < p->joined; j++) {
            unit[j * p->width + u] = number((uint32_t)scales[u] << 16);
            kept[j * p->width + u] = scales[u] && scales[u] != BF16_NAN ? -1 : 0;
        }
    }
    for (int64_t row = 0; row < p->half; row += p->joined) {
        const int64_t place = row * p->rank, upper = place + p->half * p->rank;
        const int n = entries(p, row, p->half), others = entries(p, p->half + row, p->rows);
        uint8_t *const code = codes + place * (bits == 16 ? 2 : 1), high[LINE] = {0};
        write_codes(x + place, unit, kept, n, bits, out ? out + place : NULL, code);
        if (bits != 4) continue;
        write_codes(x + upper, unit, kept, others, bits, out ? out + upper : NULL, high);
        for (int i = 0; i < n; i++) code[i] = (uint8_t)((code[i] & 15) | high[i] << 4);
    }
}

// Add what the codes of a line stand for. Of 4 bits, take those from bit ``shift`` on.
static inline void add_codes(const uint8_t *codes, const float *unit, int n, int bits, int shift, int first, float *sum) {
    for (int i = 0; i < n; i++) {
        const float value = bits == 16  ? from_fp16(((const uint16_t *)codes)[i])
                            : bits == 8 ? (float)(int8_t)codes[i]
                                        : (float)(((codes[i] >> shift & 15) ^ 8) - 8);
        sum[i] = (first ? 0.0f : sum[i]) + value * unit[i];
    }
}

static inline void decode_panel(const Panel *p, int bits, const uint16_t *scales, const uint8_t *codes, int first, float *sum) {
    float unit[LINE];
    for (int i = 0; i < p->width * p->joined; i++) unit[i] = number((uint32_t)scales[i % p->width] << 16);
    for (int64_t row = 0; row < p->half; row += p->joined) {
        const int64_t place = row * p->rank, upper = place + p->half * p->rank;
        const uint8_t *const code = codes + place * (bits == 16 ? 2 : 1);
        add_codes(code, unit, entries(p, row, p->half), bits, 0, first, sum + place);
        if (bits == 4) add_codes(code, unit, entries(p, p->half + row, p->rows), bits, 4, first, sum + upper);
    }
}

// Encode the values, or decode and add all messages.
static inline void work_in_bits(const Factors *f, int bits, int64_t first, int64_t last) {
    const int size = bits == 16 ? 2 : 1;
    for (const Piece *piece = f->pieces; piece < f->pieces + f->number; piece++) {
        const int64_t rank = piece->rank, blocks = (piece->rows + BLOCK - 1) / BLOCK, all = piece->count * blocks;
        const int64_t code_rows = bits == 4 ? (piece->rows + 1) / 2 : piece->rows;
        for (int64_t block = MAXIMUM(first, 0); block < MINIMUM(last, all); block++) {
            const int64_t matrix = block / blocks, row = block % blocks * BLOCK, rows = MINIMUM(BLOCK, piece->rows - row);
            const int64_t element = piece->element + (matrix * piece->rows + row) * rank;
            const int64_t scale = piece->scale + 2 * block * rank;
            const int64_t code = piece->code + (matrix * code_rows + (bits == 4 ? row / 2 : row)) * rank * size;
            for (int64_t column = 0; column < rank; column += LINE) {
                const Panel panel = {rows, rank, bits == 4 ? (rows + 1) / 2 : rows, (int)MINIMUM(LINE, rank - column),
                                     (int)(LINE / MINIMUM(LINE, rank))};
                float *const out = f->out ? f->out + element + column : NULL;
                for (int64_t message = 0; message < f->messages; message++) {
                    uint8_t *const content = f->content + message * f->size;
                    uint8_t *const codes = content + code + column * size;
                    uint16_t *const scales = (uint16_t *)(content + scale) + column;
                    if (f->values) encode_panel(&panel, bits, f->values + element + column, out, scales, codes);
                    else decode_panel(&panel, bits, scales, codes, !message, out);
                }
            }
        }
        first -= all;
        last -= all;
    }
}

CLONES static void work_on_blocks(const Factors *f, int64_t first, int64_t last) {
    // With constants, so that the compiler has a loop for each case.
    if (f->bits == 4) work_in_bits(f, 4, first, last);
    else if (f->bits == 8) work_in_bits(f, 8, first, last);
    else work_in_bits(f, 16, first, last);
}

void powersgd_factors(const Factors *f, int32_t threads) {
    int64_t blocks = 0, entries = 0;
    for (const Piece *piece = f->pieces; piece < f->pieces + f->number; piece++) {
        blocks += piece->count * ((piece->rows + BLOCK - 1) / BLOCK);
        entries += piece->count * piece->rows * piece->rank;
    }
    const int64_t parts = entries < (int64_t)threads * LEAST_PER_THREAD ? 1 : threads;
#pragma omp parallel for num_threads(parts) schedule(static)
    for (int64_t part = 0; part < parts; part++) work_on_blocks(f, blocks * part / parts, blocks * (part + 1) / parts);
}
