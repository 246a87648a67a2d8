// The sparse format on the CPU: what ops/sparse.py defines, with the same bits. One pass reads or writes a tensor.

#include "codec.h"

#define CHUNK 4096

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
    for (int32_t step = 0, number = 0; above - least > 1 && number != most; step = MINIMUM(4 * step + 4, 0x8000)) {
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
                // A wrong message must not write elsewhere. -0 changes no number that it is added to.
                values[i] = places[i] < n ? values[i] : -0.0f;
                places[i] = places[i] < n ? places[i] : 0;
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

void powersgd_encode_sparse(const Encoding *e, int32_t threads) { IN_PARTS(encode_chunks, e, CHUNK); }
void powersgd_decode_sparse(const Decoding *d, int32_t threads) { IN_PARTS(decode_chunks, d, CHUNK); }
