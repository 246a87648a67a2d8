/* Executes decoded PTX on the CPU: programs of warps of 32 lanes in a random schedule, over a weak memory.
 *
 * A register is 64 bits for each lane, zero-extended. Every access leaves a stamp where it reached memory. Two accesses
 * of the same bytes, one of them a store, are a race unless they are of one thread, a barrier lies between them, or one
 * thread's release and another's acquire do. That does not depend on which came first in this schedule. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint64_t u64; typedef uint32_t u32; typedef uint16_t u16; typedef uint8_t u8;
typedef int64_t s64; typedef int32_t s32; typedef int16_t s16; typedef int8_t s8;

/* Operations ------------------------------------------------------------------------------------------------------- */
/* V(name, value) of operands a, b, c. Names are those of PTX, where _b is for any type of
 * this size, and without rounding modes, since each is rounded once to nearest. */
#define INTEGER(V, n, S, U, WIDE) \
    V(add_b##n, (U)(a + b)) V(sub_b##n, (U)(a - b)) V(mul_lo_b##n, (U)(a * b)) V(mad_lo_b##n, (U)(a * b + c)) \
    V(mul_hi_s##n, (U)(((__int128)(S)a * (S)b) >> n)) V(mul_hi_u##n, (U)(((unsigned __int128)a * b) >> n)) \
    V(mul_wide_s##n, (WIDE)((s64)(S)a * (S)b)) V(mul_wide_u##n, (WIDE)(a * b)) \
    V(mad_wide_s##n, (WIDE)((s64)(S)a * (S)b + (s64)c)) V(mad_wide_u##n, (WIDE)(a * b + c)) \
    V(div_s##n, (U)(!b ? -1 : (S)b == -1 ? -(s64)a : (S)a / (S)b)) V(div_u##n, b ? a / b : (U)-1) \
    V(rem_s##n, (U)(!b ? (S)a : (S)b == -1 ? 0 : (S)a % (S)b)) V(rem_u##n, b ? a % b : a) \
    V(min_s##n, (S)a < (S)b ? a : b) V(max_s##n, (S)a > (S)b ? a : b) \
    V(min_u##n, a < b ? a : b) V(max_u##n, a > b ? a : b) V(neg_b##n, (U)-a) V(not_b##n, (U)~a) \
    V(abs_s##n, (U)((S)a < 0 ? -a : a)) V(and_b##n, a & b) V(or_b##n, a | b) V(xor_b##n, a ^ b) \
    V(shl_b##n, (u32)b >= n ? 0 : (U)(a << (u32)b)) V(shr_u##n, (u32)b >= n ? 0 : a >> (u32)b) \
    V(shr_s##n, (U)((S)a >> ((u32)b >= n ? n - 1 : (u32)b))) V(mov_b##n, a) V(selp_b##n, c ? a : b) \
    V(setp_eq_b##n, a == b) V(setp_ne_b##n, a != b) V(setp_lt_s##n, (S)a < (S)b) V(setp_le_s##n, (S)a <= (S)b) \
    V(setp_gt_s##n, (S)a > (S)b) V(setp_ge_s##n, (S)a >= (S)b) V(setp_lt_u##n, a < b) V(setp_le_u##n, a <= b) \
    V(setp_gt_u##n, a > b) V(setp_ge_u##n, a >= b)
#define COMPARISONS(V, t, of) \
    V(setp_eq_##t, of(a) == of(b)) V(setp_neu_##t, of(a) != of(b)) V(setp_lt_##t, of(a) < of(b)) \
    V(setp_le_##t, of(a) <= of(b)) V(setp_gt_##t, of(a) > of(b)) V(setp_ge_##t, of(a) >= of(b)) \
    V(setp_geu_##t, !(of(a) < of(b))) V(setp_gtu_##t, !(of(a) <= of(b))) V(setp_leu_##t, !(of(a) > of(b))) \
    V(setp_ltu_##t, !(of(a) >= of(b))) V(setp_ne_##t, of(a) < of(b) || of(a) > of(b)) \
    V(setp_equ_##t, !(of(a) < of(b) || of(a) > of(b))) V(setp_num_##t, of(a) == of(a) && of(b) == of(b)) \
    V(setp_nan_##t, of(a) != of(a) || of(b) != of(b))
#define FLOATING(V, t, of, bits, f) \
    V(add_##t, bits(of(a) + of(b))) V(sub_##t, bits(of(a) - of(b))) V(mul_##t, bits(of(a) * of(b))) \
    V(div_##t, bits(of(a) / of(b))) V(fma_##t, bits(f(fma)(of(a), of(b), of(c)))) V(sqrt_##t, bits(f(sqrt)(of(a)))) \
    V(rsqrt_##t, bits(1 / f(sqrt)(of(a)))) V(rcp_##t, bits(1 / of(a))) V(ex2_##t, bits(f(exp2)(of(a)))) \
    V(min_##t, bits(f(fmin)(of(a), of(b)))) V(max_##t, bits(f(fmax)(of(a), of(b)))) \
    V(min_NaN_##t, bits(of(a) < of(b) || of(a) != of(a) ? of(a) : of(b))) \
    V(max_NaN_##t, bits(of(a) > of(b) || of(a) != of(a) ? of(a) : of(b))) \
    V(abs_##t, bits(f(fabs)(of(a)))) V(neg_##t, bits(-of(a))) COMPARISONS(V, t, of)
#define FROM_INTEGER(V, t, bits, T) \
    V(cvt_##t##_s8, bits((T)(s8)a)) V(cvt_##t##_s16, bits((T)(s16)a)) V(cvt_##t##_s32, bits((T)(s32)a)) \
    V(cvt_##t##_s64, bits((T)(s64)a)) V(cvt_##t##_u8, bits((T)(u8)a)) V(cvt_##t##_u16, bits((T)(u16)a)) \
    V(cvt_##t##_u32, bits((T)(u32)a)) V(cvt_##t##_u64, bits((T)a))
#define VALUES(V) \
    INTEGER(V, 16, s16, u16, u32) INTEGER(V, 32, s32, u32, u64) INTEGER(V, 64, s64, u64, u64) \
    FLOATING(V, f32, single, of_single, SINGLE) FLOATING(V, f64, real, of_real, REAL) \
    COMPARISONS(V, f16, half) COMPARISONS(V, bf16, brain) \
    FROM_INTEGER(V, f32, of_single, float) FROM_INTEGER(V, f64, of_real, double) \
    V(and_pred, a & b) V(or_pred, a | b) V(xor_pred, a ^ b) V(not_pred, !a) V(mov_pred, a & 1) \
    V(bfe_u32, extract(a, b, c, 0)) V(bfe_s32, extract(a, b, c, 1)) \
    V(bfe_u64, (u64)a >> (b & 63) & (((u64)1 << (c & 63)) - 1)) V(prmt_b32, permute(a, b, c)) \
    V(popc_b32, (u64)__builtin_popcount((u32)a)) V(cvt_f64_f32, of_real(single(a))) \
    V(cvt_f32_f64, of_single((float)real(a))) V(cvt_f32_f16, of_single(half(a))) V(cvt_f16_f32, of_half(single(a))) \
    V(cvt_f32_bf16, (u32)(a << 16)) V(cvt_bf16_f32, of_brain(single(a))) \
    V(cvt_f16x2_f32, of_half(single(a)) << 16 | of_half(single(b))) \
    V(cvt_bf16x2_f32, of_brain(single(a)) << 16 | of_brain(single(b))) V(cvt_tf32_f32, (u32)(a + 0x1000) & 0xffffe000) \
    V(cvt_s32_f32, (u32)integer(single(a), 32)) V(cvt_s16_f32, (u16)integer(single(a), 16)) \
    V(cvt_s64_f64, (u64)integer(real(a), 64)) V(cvt_s32_f64, (u32)integer(real(a), 32)) \
    V(cvt_b16_s8, (u16)(s8)a) V(cvt_b16_u8, (u8)a) V(cvt_b16_b32, (u16)a) V(cvt_b16_b64, (u16)a) \
    V(cvt_b32_s8, (u32)(s8)a) V(cvt_b32_u8, (u8)a) V(cvt_b32_s16, (u32)(s16)a) V(cvt_b32_u16, (u16)a) \
    V(cvt_b32_b64, (u32)a) V(cvt_b64_s16, (u64)(s16)a) V(cvt_b64_u16, (u16)a) V(cvt_b64_s32, (u64)(s32)a) \
    V(cvt_b64_u32, (u32)a) V(cvt_s8_b16, (u16)(s8)a) V(cvt_s8_b32, (u16)(s8)a) V(cvt_u8_b16, (u8)a) \
    V(cvt_u8_b32, (u8)a) V(abs_f16, a & 0x7fff) V(abs_f16x2, a & 0x7fff7fff) V(abs_bf16x2, a & 0x7fff7fff)

/* Operations of more than one lane, on memory, or of the order of execution. */
#define ACTIONS(V) \
    V(ld_global, 0) V(ld_shared, 0) V(st_global, 0) V(st_shared, 0) V(atomic_add, 0) V(copy_async, 0) \
    V(commit, 0) V(wait, 0) V(shuffle, 0) V(reduce, 0) V(barrier, 0) V(warp_barrier, 0) V(branch, 0) V(end, 0) \
    V(pack, 0) V(unpack, 0) V(ldmatrix, 0) V(stmatrix, 0) V(mma_f64, 0) V(mma_tf32, 0) \
    V(compare_pair, 0)

#define NAME(name, value) OP_##name,
#define TEXT(name, value) #name,
enum { VALUES(NAME) ACTIONS(NAME) OPERATIONS };
const char *names[] = {VALUES(TEXT) ACTIONS(TEXT)};
int number_of_names(void) { return OPERATIONS; }

static float single(u64 x) { u32 v = (u32)x; float f; memcpy(&f, &v, 4); return f; }
/* GPUs make only this NaN of fp32. */
static u64 of_single(float f) { u32 v; memcpy(&v, &f, 4); return f == f ? v : 0x7fffffff; }
static double real(u64 x) { double f; memcpy(&f, &x, 8); return f; }
static u64 of_real(double f) { u64 v; memcpy(&v, &f, 8); return v; }
static float half(u64 x) { u16 v = (u16)x; _Float16 h; memcpy(&h, &v, 2); return (float)h; }
static u64 of_half(float f) { _Float16 h = (_Float16)f; u16 v; memcpy(&v, &h, 2); return f == f ? v : 0x7fff; }
static float brain(u64 x) { return single(x << 16); }
static u64 of_brain(float f) { u64 v = of_single(f); return f == f ? (v + 0x7fff + (v >> 16 & 1)) >> 16 : 0x7fff; }
#define SINGLE(name) name##f
#define REAL(name) name
static s64 integer(double x, int bits) { /* towards zero, at most the largest of so many bits */
    double end = ldexp(1, bits - 1);
    return x != x ? 0 : x >= end ? (s64)(~0ull >> (65 - bits)) : x < -end ? -(s64)(1ull << (bits - 1)) : (s64)x;
}
static u64 extract(u64 a, u64 b, u64 c, int sign) { /* c bits of a from bit b on */
    u32 from = b & 31, size = c & 31, unused = 32 - size;
    u64 left = (u32)((u32)a >> from << unused);
    return !size ? 0 : sign ? (u32)((s32)left >> unused) : left >> unused;
}
static u64 permute(u64 a, u64 b, u64 c) {
    u64 bytes = a | b << 32, result = 0;
    for (int k = 0; k < 4; k++) {
        u64 choice = c >> (4 * k), byte = bytes >> (8 * (choice & 7)) & 255;
        result |= (choice & 8 ? (byte >> 7) * 255 : byte) << (8 * k);
    }
    return result;
}
#define OPERANDS u64 a = A[l], b = B[l], c = C[l]; (void)a, (void)b, (void)c;
#define COMPUTE(name, value) \
    case OP_##name: \
        if (on == ~0u) for (int l = 0; l < 32; l++) { OPERANDS D[l] = value; } \
        else for (int l = 0; l < 32; l++) if (on >> l & 1) { OPERANDS D[l] = value; } \
        break;
static void compute(int op, const u64 *A, const u64 *B, const u64 *C, u64 *D, u32 on) {
    switch (op) { VALUES(COMPUTE) }
}

/* A launch --------------------------------------------------------------------------------------------------------- */
enum { RACE_SHARED, RACE_GLOBAL, RACE_PROGRAMS, RACE_WARP, RACE_COPY, BOUNDS, ALIGNMENT, UNWRITTEN, LANES, DEADLOCK,
       ENDLESS };
enum { ACQUIRE = 1, RELEASE = 2, STRONG = 4, ALL_LANES = 8 };
enum { PROGRAM_BITS = 10, LINES = 256, MOST_RELEASES = 1 << 14, SETS = MOST_RELEASES / 64 };

typedef struct { s32 op, guard, negated, nd, ns, d[8], s[16], size, flags, target; s64 offset, offset2; } Instruction;
typedef struct { s32 kind, at, other, program, thread, other_program, other_thread, count; u64 address; } Finding;
/* thread: 1 + its number among those of all programs, 0 for none. releases: how many of its own were before. */
typedef struct { u32 thread, barriers, warp_barriers, releases, at, in_flight; } Stamp;
typedef struct { Stamp written, read, read_before; } Shadow;
/* latest: what was stored last, whether other programs see it or not. data is copied before the first store. */
typedef struct { u64 base, size; u8 *data, *latest; Shadow *shadow; s32 changed, unused; } Segment;
/* Eight bytes in the cache of a program, of which others do not see the dirty ones. */
typedef struct { u64 word; Segment *segment; u8 bytes[8], dirty, valid; } Line;
typedef struct { u64 address; u64 *releases; } Counter;
typedef struct { u32 thread, barriers, count; } Release;
typedef struct { Segment *segment; u64 from; u32 to, tid; s32 size, have, done, group, at; } Copy;
typedef struct {
    u64 (*r)[32]; Copy *copies; u32 alive, barriers;
    s32 at, lane_at[32], diverged, waiting, number, copies_number, groups;
} Warp;
/* Sets of releases: what all threads know, and what one knows until the next barrier. */
typedef struct {
    Warp *warps; u8 *shared; Shadow *shadow; Line *cache; u64 *knows, **pending;
    s32 number, left, waiting; u32 barriers, *count; double speed;
} Program;
typedef struct {
    const Instruction *code; const u64 (*constants)[32]; Segment *segments; Finding *findings;
    u64 *hits, random, steps, most_steps, poison;
    s32 registers, warps, shared_bytes, programs, columns, rows, resident, global_granule, shared_granule, segments_number,
        findings_number, most_findings, counters_number, releases_number;
    Counter *counters; Release *releases;
} Launch;

static u64 draw(Launch *L, u64 n) { /* one of 0 to n - 1 */
    L->random ^= L->random << 13, L->random ^= L->random >> 7, L->random ^= L->random << 17;
    return (L->random >> 11) % n;
}
static void report(Launch *L, int kind, int at, Program *p, int tid, const Stamp *other, u64 address) {
    int before = other ? (int)other->at : -1, thread = other ? (int)other->thread - 1 : -1;
    Finding *f = L->findings, *end = f + L->findings_number;
    for (; f < end; f++) if (f->kind == kind && f->at == at && f->other == before) { f->count++; return; }
    if (L->findings_number == L->most_findings) return;
    L->findings_number++;
    *f = (Finding){kind, at, before, p->number, tid, thread >> PROGRAM_BITS, thread % (1 << PROGRAM_BITS), 1, address};
}

/* Order of accesses ------------------------------------------------------------------------------------------------ */
static int known(Launch *L, const u64 *set, const Stamp *s) { /* whether one of these releases came after the access */
    for (int i = 0; set && i < L->releases_number; i++) {
        Release *x = &L->releases[i];
        int same_program = (x->thread - 1) >> PROGRAM_BITS == (s->thread - 1) >> PROGRAM_BITS && set[i / 64] >> i % 64 & 1;
        if (same_program && (s->barriers < x->barriers || (s->thread == x->thread && s->releases <= x->count))) return 1;
    }
    return 0;
}
static int race(Launch *L, Program *p, Warp *w, u32 tid, const Stamp *s, int shared) { /* its kind, or -1 */
    if (!s->thread) return -1;
    if (s->in_flight) return RACE_COPY;
    u32 program = (s->thread - 1) >> PROGRAM_BITS, thread = (s->thread - 1) % (1 << PROGRAM_BITS);
    if (program != (u32)p->number) return known(L, p->knows, s) || known(L, p->pending[tid], s) ? -1 : RACE_PROGRAMS;
    if (thread == tid || s->barriers != p->barriers) return -1;
    if (thread / 32 == tid / 32) return s->warp_barriers == w->barriers ? RACE_WARP : -1;
    return shared ? RACE_SHARED : RACE_GLOBAL;
}
/* same: a store of what is there already. Several threads may store the same value. */
static void touch(Launch *L, Program *p, Warp *w, u32 tid, int at, Shadow *x, int store, int same, int shared, u64 address) {
    const Stamp *before[] = {&x->written, &x->read, &x->read_before};
    int atomic = L->code[at].op == OP_atomic_add;
    for (int i = 0; i < (store ? 3 : 1); i++) {
        int kind = race(L, p, w, tid, before[i], shared);
        if (kind < 0 || (i == 0 && same && kind != RACE_COPY)) continue;
        if (atomic && L->code[before[i]->at].op == OP_atomic_add) continue;
        report(L, kind, at, p, tid, before[i], address);
    }
    Stamp now = {((u32)p->number << PROGRAM_BITS | tid) + 1, p->barriers, w->barriers, p->count[tid], (u32)at, 0};
    if (!store && x->read.thread && (x->read.thread - 1) / 32 != (now.thread - 1) / 32) x->read_before = x->read;
    *(store ? &x->written : &x->read) = now;
}

/* Memory ----------------------------------------------------------------------------------------------------------- */
static Segment *locate(Launch *L, Program *p, u32 tid, int at, u64 address, int size, int alignment) {
    int low = 0, high = L->segments_number; /* segments before low start at or before the address */
    for (int k; low < high;) if (L->segments[k = (low + high) / 2].base <= address) low = k + 1; else high = k;
    Segment *s = &L->segments[low - 1];
    if (address % alignment) report(L, ALIGNMENT, at, p, tid, NULL, address);
    if (low && address + size <= s->base + s->size) return s;
    report(L, BOUNDS, at, p, tid, NULL, address);
    return NULL;
}
static void touch_global(Launch *L, Program *p, Warp *w, u32 tid, int at, Segment *s, u64 address, int size, int store, int same) {
    u64 offset = address - s->base;
    if (!s->shadow) s->shadow = calloc(s->size / L->global_granule + 2, sizeof(Shadow));
    for (u64 k = offset / L->global_granule; k <= (offset + size - 1) / L->global_granule; k++)
        touch(L, p, w, tid, at, &s->shadow[k], store, same, 0, address);
}
static void write_back(Line *x) {
    for (int k = 0; x->dirty && k < 8; k++)
        if (x->dirty >> k & 1) x->segment->data[x->word * 8 + k - x->segment->base] = x->bytes[k];
    x->dirty = 0;
}
static Line *line_at(Program *p, u64 address) { return &p->cache[(address / 8) * 0x9e3779b97f4a7c15ull >> 56]; }
static void install(Line *x, Segment *s, u64 address) { write_back(x), *x = (Line){.word = address / 8, .segment = s}; }
/* A load may see what the cache held before, unless it is strong. */
static void read_bytes(Launch *L, Program *p, Segment *s, u64 address, int size, int strong, u8 *out) {
    for (int k = 0; k < size; k++, address++) {
        Line *x = line_at(p, address);
        u8 bit = 1 << address % 8;
        if ((k == 0 || address % 8 == 0) && x->word != address / 8 && !strong && !draw(L, 4)) {
            install(x, s, address);
            for (u64 b = address & ~7ull; b < (address | 7) + 1; b++)
                if (b >= s->base && b < s->base + s->size) x->bytes[b % 8] = s->data[b - s->base], x->valid |= 1 << b % 8;
        }
        int held = x->word == address / 8 && (x->dirty & bit || (!strong && x->valid & bit));
        out[k] = held ? x->bytes[address % 8] : s->data[address - s->base];
    }
}
static void change(Segment *s) {
    if (s->changed) return;
    s->latest = memcpy(malloc(s->size), s->data, s->size), s->data = memcpy(malloc(s->size), s->data, s->size);
    s->changed = 1;
}
static void access_global(Launch *L, Program *p, Warp *w, u32 tid, int at, u64 address, int size, u8 *data, int store) {
    const Instruction *i = &L->code[at];
    Segment *s = locate(L, p, tid, at, address, size, size);
    if (!s) return;
    if (store) change(s);
    int same = store && !memcmp(s->latest + (address - s->base), data, size);
    touch_global(L, p, w, tid, at, s, address, size, store, same);
    if (!store) read_bytes(L, p, s, address, size, i->flags & STRONG, data);
    for (int k = 0; !store && i->size > 1 && k < size; k += i->size)
        if (!memcmp(data + k, &L->poison, i->size)) report(L, UNWRITTEN, at, p, tid, NULL, address);
    for (int k = 0; store && k < size; k++, address++) {
        Line *x = line_at(p, address);
        if (x->word != address / 8) install(x, s, address);
        x->bytes[address % 8] = s->latest[address - s->base] = data[k];
        x->dirty |= 1 << address % 8, x->valid |= 1 << address % 8;
    }
}
static int touch_shared(Launch *L, Program *p, Warp *w, u32 tid, int at, u64 address, int size, int store, int same) {
    if (address % size) report(L, ALIGNMENT, at, p, tid, NULL, address);
    if (address + size > (u64)L->shared_bytes) { report(L, BOUNDS, at, p, tid, NULL, address); return 0; }
    for (u64 k = address / L->shared_granule; k <= (address + size - 1) / L->shared_granule; k++) {
        if (!store && !p->shadow[k].written.thread) report(L, UNWRITTEN, at, p, tid, NULL, address);
        touch(L, p, w, tid, at, &p->shadow[k], store, same, 1, address);
    }
    return 1;
}
static void access_shared(Launch *L, Program *p, Warp *w, u32 tid, int at, u64 address, int size, u8 *data, int store) {
    int same = store && address + size <= (u64)L->shared_bytes && !memcmp(p->shared + address, data, size);
    if (!touch_shared(L, p, w, tid, at, address, size, store, same)) return;
    if (store) memcpy(p->shared + address, data, size); else memcpy(data, p->shared + address, size);
}

/* Asynchronous copies are done at any time until their group is waited for. */
static void do_copy(Launch *L, Program *p, Copy *x) {
    if (!x->done) memset(p->shared + x->to, 0, x->size);
    if (!x->done && x->segment) read_bytes(L, p, x->segment, x->from, x->have, x->size == 16, p->shared + x->to);
    x->done = 1;
}
static void mark_copy(Launch *L, Program *p, Warp *w, Copy *x, int in_flight) {
    Stamp now = {((u32)p->number << PROGRAM_BITS | x->tid) + 1, p->barriers, w->barriers, 0, (u32)x->at, in_flight};
    for (u32 k = x->to / L->shared_granule; k <= (x->to + x->size - 1) / L->shared_granule; k++) p->shadow[k].written = now;
}
static void copy_async(Launch *L, Program *p, Warp *w, u32 tid, int at, const Instruction *i, u64 to, u64 from, int have) {
    int size = i->size;
    Copy x = {NULL, from, (u32)to, tid, size, have, 0, w->groups, at};
    if (!touch_shared(L, p, w, tid, at, to, size, 1, 0)) return;
    if (have > 0 && (x.segment = locate(L, p, tid, at, from, have, size)))
        touch_global(L, p, w, tid, at, x.segment, from, have, 0, 0);
    mark_copy(L, p, w, &x, 1);
    if (!draw(L, 3)) do_copy(L, p, &x);
    w->copies = realloc(w->copies, sizeof x * (w->copies_number + 1));
    w->copies[w->copies_number++] = x;
}
static void wait_for_copies(Launch *L, Program *p, Warp *w, s64 pending) {
    int kept = 0;
    for (int i = 0; i < w->copies_number; i++) {
        Copy *x = &w->copies[i];
        if (x->group >= w->groups - pending) { w->copies[kept++] = *x; continue; }
        do_copy(L, p, x), mark_copy(L, p, w, x, 0);
    }
    w->copies_number = kept;
}

/* Releases, acquires and barriers ---------------------------------------------------------------------------------- */
static void join(u64 *to, const u64 *from) { for (int i = 0; from && i < SETS; i++) to[i] |= from[i]; }
static u64 atomic_add(Launch *L, Program *p, Warp *w, u32 tid, int at, u64 address, u64 value) {
    const Instruction *i = &L->code[at];
    Segment *s = locate(L, p, tid, at, address, 4, 4);
    Counter *counter = NULL;
    if (!s) return 0;
    change(s);
    for (int k = 0; k < L->counters_number; k++) if (L->counters[k].address == address) counter = &L->counters[k];
    if (!counter) {
        L->counters = realloc(L->counters, sizeof(Counter) * (L->counters_number + 1));
        *(counter = &L->counters[L->counters_number++]) = (Counter){address, calloc(SETS, 8)};
    }
    if (i->flags & ACQUIRE) {
        if (!p->pending[tid]) p->pending[tid] = calloc(SETS, 8);
        join(p->pending[tid], counter->releases);
        for (int k = 0; k < LINES; k++) p->cache[k].valid &= p->cache[k].dirty;
    }
    touch_global(L, p, w, tid, at, s, address, 4, 1, 0);
    if (i->flags & RELEASE && L->releases_number < MOST_RELEASES) {
        u32 thread = ((u32)p->number << PROGRAM_BITS | tid) + 1;
        for (int k = 0; k < LINES; k++) write_back(&p->cache[k]);
        join(counter->releases, p->knows), join(counter->releases, p->pending[tid]);
        counter->releases[L->releases_number / 64] |= 1ull << L->releases_number % 64;
        L->releases[L->releases_number++] = (Release){thread, p->barriers, p->count[tid]++};
    }
    Line *x = line_at(p, address);
    if (x->word == address / 8) write_back(x), x->valid = 0;
    u32 old, now;
    memcpy(&old, s->data + (address - s->base), 4);
    now = old + (u32)value;
    memcpy(s->data + (address - s->base), &now, 4), memcpy(s->latest + (address - s->base), &now, 4);
    return old;
}
static void pass_barrier(Launch *L, Program *p) {
    p->barriers++;
    for (int t = 0; t < L->warps * 32; t++)
        if (p->pending[t]) join(p->knows, p->pending[t]), free(p->pending[t]), p->pending[t] = NULL;
}

/* Instructions of a warp ------------------------------------------------------------------------------------------- */
static const u64 ZEROS[32];
static const u64 *source(Launch *L, Warp *w, int slot) { return slot < L->registers ? w->r[slot] : L->constants[slot - L->registers]; }

/* D = A B + C in tiles of 8 × 4 elements of A and 4 × 8 of B, which lane l holds at (l / 4, l % 4) and transposed. */
static void mma(Launch *L, Warp *w, const Instruction *i, int wide) {
    int tiles = i->nd / 2, depth = (i->ns - i->nd) / (tiles + 1), k0 = depth * tiles;
    double a[16][16], b[16][8];
    for (int l = 0; l < 32; l++)
        for (int k = 0; k < k0 + depth; k++) {
            u64 bits = source(L, w, i->s[k])[l];
            double x = wide ? real(bits) : single(bits & 0xffffe000);
            if (k < k0) a[l / 4 + 8 * (k % tiles)][l % 4 + 4 * (k / tiles)] = x; else b[l % 4 + 4 * (k - k0)][l / 4] = x;
        }
    for (int l = 0; l < 32; l++)
        for (int k = 0; k < i->nd; k++) {
            u64 x = source(L, w, i->s[k0 + depth + k])[l];
            double total = wide ? real(x) : single(x);
            for (int e = 0; e < 4 * depth; e++)
                total = fma(a[l / 4 + 8 * (k / 2)][e], b[e][l % 4 * 2 + k % 2], total);
            w->r[i->d[k]][l] = wide ? of_real(total) : of_single((float)total);
        }
}
/* Tiles of 8 × 8 elements of 16 bits: lane 8 k + j has the address of row j of tile k. */
static void matrices(Launch *L, Program *p, Warp *w, int at, const Instruction *i, int load) {
    for (int k = 0; k < (load ? i->nd : i->ns - 1); k++) {
        u16 tile[8][8];
        for (int part = 0; part < 2; part++) {
            if (part == load)
                for (int l = 0; l < 32; l++)
                    for (int e = 0; e < 2; e++) {
                        u16 *x = i->target ? &tile[l % 4 * 2 + e][l / 4] : &tile[l / 4][l % 4 * 2 + e];
                        u64 *r = w->r[load ? i->d[k] : i->s[k + 1]];
                        if (load) r[l] = e ? r[l] | (u64)*x << 16 : *x; else *x = (u16)(r[l] >> 16 * e);
                    }
            else
                for (int j = 0; j < 8; j++) {
                    u64 address = (u32)(source(L, w, i->s[0])[8 * k + j] + i->offset);
                    u32 tid = w->number * 32 + 8 * k + j;
                    access_shared(L, p, w, tid, at, address, 16, (u8 *)tile[j], !load);
                }
        }
    }
}
static void shuffle(Launch *L, Program *p, Warp *w, int at, const Instruction *i, u32 on) {
    const u64 *b = source(L, w, i->s[1]), *c = source(L, w, i->s[2]);
    u64 old[32];
    memcpy(old, source(L, w, i->s[0]), sizeof old);
    for (int l = 0; l < 32; l++) {
        int fixed = c[l] >> 8 & 31, last = (l & fixed) | (c[l] & 31 & ~fixed), by = b[l] & 31;
        int from = i->target == 0 ? l ^ by : i->target == 1 ? (l & fixed) | (by & ~fixed) : i->target == 2 ? l - by : l + by;
        if (i->target == 2 ? from < last : from > last) from = l;
        if (!(on >> from & 1)) report(L, LANES, at, p, w->number * 32 + l, NULL, from);
        w->r[i->d[0]][l] = old[from];
    }
}
static void access(Launch *L, Program *p, Warp *w, int at, const Instruction *i, int l, u64 address) {
    int load = i->op == OP_ld_global || i->op == OP_ld_shared, number = load ? i->nd : i->ns - 1, size = number * i->size;
    u32 tid = w->number * 32 + l;
    u8 data[32] = {0};
    for (int k = 0; !load && k < number; k++) memcpy(data + k * i->size, &source(L, w, i->s[k + 1])[l], i->size);
    if (i->op == OP_ld_global || i->op == OP_st_global) access_global(L, p, w, tid, at, address, size, data, !load);
    else access_shared(L, p, w, tid, at, (u32)address, size, data, !load);
    for (int k = 0; load && k < number; k++)
        if (i->d[k] >= 0) w->r[i->d[k]][l] = 0, memcpy(&w->r[i->d[k]][l], data + k * i->size, i->size);
}
/* Returns whether another warp may come next. */
static int step(Launch *L, Program *p, Warp *w) {
    int at = w->at, result = 0;
    u32 active = w->alive, jump = 0, over = 0;
    if (w->diverged) { /* lanes that are behind go first, so that they meet the others */
        at = INT32_MAX, active = 0;
        for (int l = 0; l < 32; l++) if (w->alive >> l & 1 && w->lane_at[l] < at) at = w->lane_at[l];
        for (int l = 0; l < 32; l++) if (w->alive >> l & 1 && w->lane_at[l] == at) active |= 1u << l;
    }
    const Instruction *i = &L->code[at];
    u32 on = active, tid = w->number * 32;
    if (i->guard >= 0)
        for (int l = 0; l < 32; l++) if ((int)(w->r[i->guard][l] & 1) == i->negated) on &= ~(1u << l);
    L->steps++;
    L->hits[at] += on != 0;
    if (i->flags & ALL_LANES && on != ~0u) report(L, LANES, at, p, tid, NULL, on);
    u64 *d = i->nd && i->d[0] >= 0 ? w->r[i->d[0]] : NULL;
    const u64 *a = i->ns ? source(L, w, i->s[0]) : ZEROS, *b = i->ns > 1 ? source(L, w, i->s[1]) : ZEROS;
    const u64 *c = i->ns > 2 ? source(L, w, i->s[2]) : ZEROS;
#define EACH for (int l = 0; l < 32; l++) if (on >> l & 1)
    switch (i->op) {
    case OP_ld_global: case OP_ld_shared: case OP_st_global: case OP_st_shared: case OP_atomic_add: case OP_copy_async:
        EACH {
            u64 address = a[l] + i->offset;
            if (i->op == OP_atomic_add) d[l] = atomic_add(L, p, w, tid + l, at, address, b[l]);
            else if (i->op == OP_copy_async) copy_async(L, p, w, tid + l, at, i, (u32)address, b[l] + i->offset2, i->ns < 3 ? i->size : (int)c[l]);
            else access(L, p, w, at, i, l, address);
        }
        result = 1;
        break;
    case OP_commit: w->groups++; break;
    case OP_wait: wait_for_copies(L, p, w, i->offset); result = 1; break;
    case OP_shuffle: shuffle(L, p, w, at, i, on); break;
    case OP_reduce: {
        u64 total[32] = {a[0]}, next[32];
        for (int l = 1; l < 32; l++) next[0] = a[l], compute(i->target, total, next, ZEROS, total, 1);
        EACH d[l] = total[0];
        break;
    }
    case OP_compare_pair:
        for (int k = 0; k < 2; k++) {
            u64 x[32], y[32];
            for (int l = 0; l < 32; l++) x[l] = (u16)(a[l] >> 16 * k), y[l] = (u16)(b[l] >> 16 * k);
            compute(i->target, x, y, ZEROS, w->r[i->d[k]], on);
        }
        break;
    case OP_barrier: w->waiting = 1, p->waiting++, result = 1; break;
    case OP_warp_barrier: w->barriers++, result = 1; if (L->warps == 1) pass_barrier(L, p); break;
    case OP_branch: jump = on; break;
    case OP_end: over = on; break;
    case OP_pack:
        EACH {
            u64 x = 0;
            for (int k = 0; k < i->ns; k++) x |= (source(L, w, i->s[k])[l] & ((1ull << i->size) - 1)) << k * i->size;
            d[l] = x;
        }
        break;
    case OP_unpack:
        EACH {
            u64 x = a[l]; /* which may be one of the targets */
            for (int k = 0; k < i->nd; k++) if (i->d[k] >= 0) w->r[i->d[k]][l] = x >> k * i->size & ((1ull << i->size) - 1);
        }
        break;
    case OP_ldmatrix: case OP_stmatrix: matrices(L, p, w, at, i, i->op == OP_ldmatrix); result = 1; break;
    case OP_mma_f64: case OP_mma_tf32: mma(L, w, i, i->op == OP_mma_f64); break;
    default: compute(i->op, a, b, c, d, on);
    }
    w->alive &= ~over;
    if (!w->diverged && (!jump || jump == active)) { w->at = jump ? i->target : at + 1; return result || !w->alive; }
    for (int l = 0; l < 32; l++) if (active >> l & 1) w->lane_at[l] = jump >> l & 1 ? i->target : at + 1;
    int first = w->alive ? __builtin_ctz(w->alive) : 0;
    w->at = w->lane_at[first], w->diverged = 0;
    for (int l = first; l < 32; l++) w->diverged |= w->alive >> l & 1 && w->lane_at[l] != w->at;
    return result || !w->alive;
}

/* Programs --------------------------------------------------------------------------------------------------------- */
/* The first registers: thread, program along both axes, programs along both axes. */
static void start(Launch *L, Program *p, int number) {
    *p = (Program){.number = number, .left = L->warps, .speed = draw(L, 3) ? 1 : 0.05};
    p->warps = calloc(L->warps, sizeof(Warp)), p->shared = malloc(L->shared_bytes + 1), p->shadow = calloc(L->shared_bytes + 1, sizeof(Shadow));
    p->cache = calloc(LINES, sizeof(Line)), p->knows = calloc(SETS, 8);
    p->pending = calloc(L->warps * 32, sizeof(u64 *)), p->count = calloc(L->warps * 32, sizeof(u32));
    for (int k = 0; k < L->shared_bytes; k++) p->shared[k] = (u8)draw(L, 256);
    for (int k = 0; k < L->warps; k++) {
        Warp *w = &p->warps[k];
        w->r = malloc(sizeof(u64[32]) * L->registers), w->alive = ~0u, w->number = k;
        memset(w->r, 0xdb, sizeof(u64[32]) * L->registers);
        u64 first[] = {k * 32, number % L->columns, number / L->columns, L->columns, L->rows};
        for (int l = 0; l < 160; l++) w->r[l / 32][l % 32] = first[l / 32] + (l < 32 ? l : 0);
    }
}
static void finish(Launch *L, Program *p) { /* what it stored may stay in its cache */
    for (int k = 0; k < L->warps; k++) free(p->warps[k].r), free(p->warps[k].copies);
    for (int t = 0; t < L->warps * 32; t++) free(p->pending[t]);
    free(p->warps), free(p->shared), free(p->shadow), free(p->knows), free(p->pending), free(p->count);
}
static Warp *choose(Launch *L, Program *programs, const int *running, int number, int *place) {
    int warps = number * L->warps, first = (int)draw(L, warps);
    for (int v = 0; v < 2 * warps; v++) { /* at the second time, however slow its program is */
        Program *p = &programs[running[*place = (first + v) % warps / L->warps]];
        Warp *w = &p->warps[(first + v) % L->warps];
        if (!w->waiting && w->alive && (v >= warps || draw(L, 1000) < 1000 * p->speed)) return w;
    }
    return NULL;
}
void run(Launch *L) {
    Program *programs = calloc(L->programs, sizeof(Program));
    int *order = malloc(sizeof(int) * L->programs), *running = malloc(sizeof(int) * L->programs), number = 0, next = 0;
    L->releases = malloc(sizeof(Release) * MOST_RELEASES);
    for (int i = 0; i < L->programs; i++) { int j = (int)draw(L, i + 1); order[i] = order[j], order[j] = i; }
    while (number || next < L->programs) {
        for (; number < L->resident && next < L->programs; next++)
            start(L, &programs[order[next]], running[number++] = order[next]);
        int k;
        Warp *w = choose(L, programs, running, number, &k);
        Program *p = &programs[running[w ? k : 0]];
        if (!w || L->steps > L->most_steps) { report(L, w ? ENDLESS : DEADLOCK, w ? w->at : p->warps->at - 1, p, 0, NULL, 0); break; }
        int more = 1 + (int)draw(L, 12);
        while (!w->waiting && w->alive && L->steps <= L->most_steps) if (step(L, p, w) && --more <= 0) break;
        p->left -= !w->alive;
        if (p->waiting && p->waiting == p->left) {
            if (p->left < L->warps) report(L, LANES, w->at - 1, p, 0, NULL, 0); /* the barrier, or the end */
            for (int v = p->waiting = 0; v < L->warps; v++) p->warps[v].waiting = 0;
            pass_barrier(L, p);
        }
        if (!draw(L, 20)) write_back(&p->cache[draw(L, LINES)]);
        if (!p->left) {
            finish(L, p);
            if (draw(L, 2)) for (int v = 0; v < LINES; v++) write_back(&p->cache[v]);
            running[k] = running[--number];
        }
    }
    for (int i = 0; i < number; i++) finish(L, &programs[running[i]]);
    for (int i = 0; i < next; i++) {
        for (int v = 0; v < LINES; v++) write_back(&programs[order[i]].cache[v]);
        free(programs[order[i]].cache);
    }
    for (int i = 0; i < L->segments_number; i++) free(L->segments[i].shadow), free(L->segments[i].latest);
    for (int i = 0; i < L->counters_number; i++) free(L->counters[i].releases);
    free(L->counters), free(L->releases), free(programs), free(order), free(running);
}
void forget(Launch *L) { /* the copies of what was stored to */
    for (int i = 0; i < L->segments_number; i++) if (L->segments[i].changed) free(L->segments[i].data);
}
