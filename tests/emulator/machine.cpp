// Interpreter of PTX for tests: runs the CTAs of a grid (or cluster after cluster) on the CPU.
//
// A register is a row of 64-bit values, one for each lane; constants and special registers are rows filled beforehand,
// so every operand is a row number. Lanes of a warp that are at the same instruction run together; warps are taken in
// random order for random numbers of instructions. Collectives wait for all lanes they name. cp.async and wgmma are done
// at issue or as late as their wait allows, by the seed. Sums of mma and wgmma are formed in double and rounded to fp32.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

using u8 = uint8_t; using u16 = uint16_t; using u32 = uint32_t; using u64 = uint64_t; using i32 = int32_t; using i64 = int64_t;
using Half = _Float16;

// The names before the types of every opcode; Python asks for this list, so it stands here alone.
#define OPCODES(X) X(abs) X(add) X(and_) X(atom) X(bar_arrive) X(bar_red) X(bar_sync) X(bar_warp) X(barrier_cluster_arrive) \
    X(barrier_cluster_wait) X(bfi) X(bfind) X(bra) X(brev) X(clz) X(copysign) X(commit) X(copy) X(copy_wait) X(cvt) X(div) \
    X(ex2) X(fma) X(ld) X(ldmatrix) X(lg2) X(mad) X(mad_wide) X(mapa) X(max) X(min) X(mb_arrive) X(mb_expect) X(mb_init) \
    X(mb_wait) X(mma) X(mov) X(mul) X(mul_hi) X(mul_wide) X(neg) X(nop) X(not_) X(or_) X(pack) X(popc) X(prmt) X(proxy_fence) X(rcp) X(rem) \
    X(ret) X(selp) X(setp) X(shf) X(shfl) X(shl) X(shr) X(sqrt) X(st) X(st_async) X(stmatrix) X(sub) X(unpack) X(vote) X(wgmma) \
    X(wgmma_commit) X(wgmma_wait) X(xor_)
enum Op { 
#define X(name) name##_op,
    OPCODES(X)
#undef X
};
enum Type { PRED, B8, U8, S8, B16, U16, S16, B32, U32, S32, B64, U64, S64, F16, BF16, F32, F64, F16X2, BF16X2, U16X2, E4M3X2 };
static int width(i64 t) { static const int bits[] = {1, 8, 8, 8, 16, 16, 16, 32, 32, 32, 64, 64, 64, 16, 16, 32, 64, 32, 32, 32, 16}; return bits[t]; }
static bool is_signed(i64 t) { return t == S8 || t == S16 || t == S32 || t == S64; }

struct Ins { i64 op, type, mod, flags, pred, negated, count, first, results, line, target, imm; };
enum Flags { FTZ = 1, NAN_ = 2, WIDE_X = 4, TRUNC = 8 };
struct Array { u64 begin, bytes, writable; };
struct Fault : std::runtime_error { using runtime_error::runtime_error; };

static float as_float(u64 x) { float f; u32 b = (u32)x; memcpy(&f, &b, 4); return f; }
static u32 bits_of(float f) { u32 b; memcpy(&b, &f, 4); return b; }
static double as_double(u64 x) { double f; memcpy(&f, &x, 8); return f; }
static u64 bits_of(double f) { u64 b; memcpy(&b, &f, 8); return b; }
static float half_value(u64 x) { Half h; u16 b = (u16)x; memcpy(&h, &b, 2); return (float)h; }
static u16 half_bits(double x) { if (x != x) return 0x7fff; Half h = (Half)x; u16 b; memcpy(&b, &h, 2); return b; }
static float bf16_value(u64 x) { return as_float((u32)(u16)x << 16); }
static u16 bf16_bits(float x) { u32 b = bits_of(x); return x != x ? 0x7fff : (u16)((b + 0x7fff + (b >> 16 & 1)) >> 16); }
static float flush(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.f, x) : x; }
static u32 result(float x, bool ftz) { return x != x ? 0x7fffffffu : bits_of(ftz ? flush(x) : x); }
static double e4m3_value(int c) {
    const int e = c >> 3 & 15, m = c & 7;
    const double v = (c & 127) == 127 ? NAN : e ? std::ldexp(8 + m, e - 10) : std::ldexp(m, -9);
    return c & 128 ? -v : v;
}
static int e4m3_code(float x) {  // nearest, ties to even, saturating
    if (x != x) return 0x7f;
    const int sign = std::signbit(x) ? 128 : 0;
    const double a = std::fabs((double)x);
    if (a >= 448) return sign | 0x7e;
    int e = a < std::ldexp(1, -6) ? -6 : std::ilogb(a);
    const double m = std::nearbyint(std::ldexp(a, 3 - e));  // 8..16 for normal numbers, 0..8 below
    const int code = (e + 6) * 8 + (int)m;
    return sign | std::min(code, 0x7e);
}
static u64 mask_to(u64 x, i64 t) { const int w = width(t); return w == 64 ? x : x & ((1ull << w) - 1); }
static i64 extend(u64 x, i64 t) { const int s = 64 - width(t); return is_signed(t) ? (i64)(x << s) >> s : (i64)(s ? x << s >> s : x); }

struct Random {
    u64 state;
    u32 next() { state = state * 6364136223846793005ull + 1442695040888963407ull; return (u32)(state >> 33); }
    u32 below(u32 n) { return next() % n; }
};
// Vector clocks, an entry for each warp of the cluster: what is ordered before, and what of it wgmma may read.
struct Clocks {
    std::vector<u32> seen, fenced;
    void join(const Clocks& o) {
        seen.resize(std::max(seen.size(), o.seen.size()));
        fenced.resize(seen.size());
        for (size_t k = 0; k < o.seen.size(); ++k) seen[k] = std::max(seen[k], o.seen[k]), fenced[k] = std::max(fenced[k], o.fenced[k]);
    }
};
struct Sync { Clocks coming, done; };         // what arrivals bring, and what waiters of the last phase get
struct Written { u32 clock, warp, line; };    // last write of a word of shared memory
struct Barrier { Sync sync; u32 arrived = 0, generation = 0, pending_or = 0, last_or = 0; };
struct MBarrier { Sync sync; i64 count, pending, tx; u32 phase; };
struct Copy { int lane; u32 group; u32 to; u64 from; u32 bytes, taken; };
struct Wgmma { const Ins* ins; u64 a, b; bool done, add; u32 group; };
struct Lanes { i64 pc; u32 mask; };
struct Cta;
struct Warp {
    Cta* cta; int index, id; Clocks clocks; u32 live; std::vector<Lanes> lanes; std::vector<u64> regs; std::vector<u8> local;
    u64 blocked_at = ~0ull; int waits = -1; u32 wait_generation = 0; bool cluster_arrived = false; u32 cluster_generation = 0;
    u32 copy_group[32] = {}; std::vector<Copy> copies; std::vector<Wgmma> products; u32 wgmma_group = 0;
    std::vector<u8> busy;  // by register: 1 read, 2 written by a wgmma in flight
};
struct Cta { std::vector<u8> shared; std::map<u32, MBarrier> mbarriers; Barrier barriers[16]; std::vector<Warp> warps; int rank; u32 at[3];
    std::vector<Written> written; std::vector<u32> reads;  // of each word; reads: [word][warp] clock
};

struct Machine {
    const Ins* code; i64 size; const i64* args; const u64* constants; i64 num_rows, num_constants; const u64* special_rows;
    u32 grid[3]; u32 threads, cluster, shared_bytes, local_bytes; const u8* params; u64 param_bytes;
    std::vector<Array> arrays; Random random; u64 executed = 0, limit; std::vector<Cta> ctas;
    u32 cluster_arrived = 0, cluster_generation = 0, num_warps = 0; Sync cluster_sync; std::vector<float> halves;

    [[noreturn]] void fail(const Warp& w, const Ins& i, int lane, const std::string& what) {
        char text[256];
        snprintf(text, sizeof text, "%s [instruction %ld, line %ld, CTA (%u, %u, %u), thread %d]", what.c_str(), (long)(&i - code), (long)i.line,
                 w.cta->at[0], w.cta->at[1], w.cta->at[2], 32 * w.index + lane);
        throw Fault(text);
    }
    static std::string hex(u64 x) { char t[32]; snprintf(t, sizeof t, "%#llx", (unsigned long long)x); return t; }
    u8* global(const Warp& w, const Ins& i, int lane, u64 at, u64 bytes, u64 align, bool write) {
        if (at % align) fail(w, i, lane, "misaligned global access of " + std::to_string(align) + " bytes at " + hex(at));
        for (size_t k = 0; k < arrays.size(); ++k) {
            const Array a = arrays[k];
            if (at >= a.begin && at + bytes <= a.begin + a.bytes && (a.writable || !write)) {
                if (k) std::swap(arrays[k], arrays[k / 2]);
                return (u8*)at;
            }
        }
        fail(w, i, lane, std::string(write ? "store to" : "load from") + " global memory outside every array, at " + hex(at));
    }
    static constexpr u32 SHARED_BASE = 1024;
    u8* shared(Warp& w, const Ins& i, int lane, u64 at, u64 bytes, u64 align) {
        Cta* c = w.cta;
        if (at >> 24) {
            if ((at >> 24) > ctas.size()) fail(w, i, lane, "shared address of no CTA, " + hex(at));
            c = &ctas[(at >> 24) - 1];
            at &= 0xffffff;
        }
        if (at % align) fail(w, i, lane, "misaligned shared access of " + std::to_string(align) + " bytes at " + hex(at));
        if (at < SHARED_BASE || at + bytes > SHARED_BASE + shared_bytes) fail(w, i, lane, "shared access out of bounds at " + hex(at) + " of " + std::to_string(bytes) + " bytes");
        return c->shared.data() + (at - SHARED_BASE);
    }
    // Checks that accesses of different warps to a word of shared memory are ordered by barriers. Accesses of less than
    // a word and atomics are not looked at. `async`: by wgmma, which also needs a fence behind the write. `same`: writes
    // what is there already, as several warps may at once.
    void touch(Warp& w, const Ins& i, int lane, u64 at, u64 bytes, bool write, bool async = false, bool same = false) {
        if (bytes < 4) return;
        Cta& c = at >> 24 ? ctas[(at >> 24) - 1] : *w.cta;
        const u64 first = ((at & 0xffffff) - SHARED_BASE) / 4;
        for (u64 word = first; word < first + bytes / 4; ++word) {
            Written& last = c.written[word];
            u32* reads = &c.reads[word * num_warps];
            if (last.clock > w.clocks.seen[last.warp] && !same)
                fail(w, i, lane, std::string("race: ") + (write ? "write" : "read") + " of the shared word " + hex(SHARED_BASE + 4 * word) + ", written by warp " + std::to_string(last.warp) + " at line " + std::to_string(last.line) + ", without a barrier between");
            if (async && last.clock > w.clocks.fenced[last.warp])
                fail(w, i, lane, "wgmma reads the shared word " + hex(SHARED_BASE + 4 * word) + ", written by warp " + std::to_string(last.warp) + " at line " + std::to_string(last.line) + ", without fence.proxy.async between");
            if (!write) { reads[w.id] = w.clocks.seen[w.id]; continue; }
            for (u32 r = 0; r < num_warps; ++r)
                if (reads[r] > w.clocks.seen[r] && (int)r != w.id)
                    fail(w, i, lane, "race: write of the shared word " + hex(SHARED_BASE + 4 * word) + ", read by warp " + std::to_string(r) + ", without a barrier between");
            last = {w.clocks.seen[w.id], (u32)w.id, (u32)i.line};
        }
    }
    void release(Warp& w, Sync& s) { s.coming.join(w.clocks); w.clocks.seen[w.id]++; }
    MBarrier& mbarrier(Warp& w, const Ins& i, int lane, u64 at) {
        Cta* c = w.cta;
        if (at >> 24) { c = &ctas.at((at >> 24) - 1); at &= 0xffffff; }
        auto found = c->mbarriers.find((u32)at);
        if (found == c->mbarriers.end()) fail(w, i, lane, "mbarrier not initialised, at " + hex(at));
        return found->second;
    }
    void settle(Warp& w, const Ins& i, int lane, MBarrier& b) {
        if (b.pending < 0) fail(w, i, lane, "more arrivals at an mbarrier than it counts");
        if (b.pending == 0 && b.tx == 0) { b.phase++; b.pending = b.count; b.sync.done = b.sync.coming; }
    }
    void do_copy(Warp& w, const Ins& i, const Copy& c) {
        u8* to = shared(w, i, c.lane, c.to, c.bytes, c.bytes);
        touch(w, i, c.lane, c.to, c.bytes, true);
        if (c.taken) memcpy(to, global(w, i, c.lane, c.from, c.taken, c.bytes, false), c.taken);
        memset(to + c.taken, 0, c.bytes - c.taken);
    }
    u16 element(Warp& w, const Ins& i, u64 at) { at ^= at >> 3 & 0x70; u16 x; memcpy(&x, shared(w, i, 0, at, 2, 2), 2); if (!(at & 3)) touch(w, i, 0, at, 4, false, true); return x; }
    // 16 rows of a product of 64 rows: this warp's. Operand layouts as in kernels/wgmma.cuh.
    void do_wgmma(Warp& w, Wgmma& p) {
        const Ins& i = *p.ins;
        const int n = (int)i.imm, d = n / 2, r0 = 16 * (w.index % 4);
        const bool bf = i.mod & 1, from_regs = i.mod & 2, b_transposed = i.mod & 4;
        auto value = [&](u16 x) { return bf ? bf16_value(x) : halves[x]; };
        auto field = [](u64 desc, int bit) { return (desc >> bit & 0x3fff) << 4; };
        float a[16][16]; std::vector<float> b(16 * n);
        if ((from_regs ? 1 : p.a >> 62) != 1 || p.b >> 62 != 1) fail(w, i, 0, "only the 128-byte swizzle is known");
        if (from_regs)
            for (int l = 0; l < 32; ++l)
                for (int k = 0; k < 4; ++k)
                    for (int h = 0; h < 2; ++h)
                        a[l / 4 + 8 * (k & 1)][2 * (l % 4) + 8 * (k >> 1) + h] = value((u16)(reg(w, i, d + k)[l] >> 16 * h));
        else
            for (int r = 0; r < 16; ++r)
                for (int k = 0; k < 16; ++k) {
                    const int row = r0 + r;
                    a[r][k] = value(element(w, i, field(p.a, 0) + row / 8 * field(p.a, 32) + row % 8 * 128 + 2 * k));
                }
        for (int k = 0; k < 16; ++k)
            for (int c = 0; c < n; ++c) {
                const u64 at = b_transposed ? c / 64 * field(p.b, 16) + k / 8 * field(p.b, 32) + k % 8 * 128 + c % 64 * 2
                                            : c / 8 * field(p.b, 32) + c % 8 * 128 + 2 * k;
                b[k * n + c] = value(element(w, i, field(p.b, 0) + at));
            }
        for (int l = 0; l < 32; ++l)
            for (int e = 0; e < d; ++e) {
                const int row = l / 4 + (e & 2 ? 8 : 0), c = e / 4 * 8 + 2 * (l % 4) + (e & 1);
                u64& out = reg(w, i, e)[l];
                double sum = p.add ? as_float(out) : 0.0;
                for (int k = 0; k < 16; ++k) sum += (double)a[row][k] * b[k * n + c];
                out = result((float)sum, false);
            }
        p.done = true;
    }
    u64* reg(Warp& w, const Ins& i, i64 k) { return &w.regs[args[i.first + k] * 32]; }
    void mark(Warp& w) {
        std::fill(w.busy.begin(), w.busy.end(), 0);
        for (const Wgmma& p : w.products)
            for (i64 k = 0; k < p.ins->count; ++k) w.busy[args[p.ins->first + k]] |= k < p.ins->results ? 2 : 1;
    }
    void wait_wgmma(Warp& w, u32 left) {
        size_t kept = 0;
        for (size_t k = 0; k < w.products.size(); ++k) {
            Wgmma p = w.products[k];
            if (p.group + left < w.wgmma_group) { if (!p.done) do_wgmma(w, p); }
            else w.products[kept++] = p;
        }
        w.products.resize(kept);
        mark(w);
    }
    void wait_copies(Warp& w, const Ins& i, u32 lanes, i64 left) {
        size_t kept = 0;
        for (const Copy& c : w.copies)
            if ((lanes >> c.lane & 1) && (left < 0 || c.group + left < w.copy_group[c.lane])) do_copy(w, i, c);
            else w.copies[kept++] = c;
        w.copies.resize(kept);
    }
    bool step(Warp& w, size_t which);
    bool advance(Warp& w);
    void run_cluster(const std::vector<std::array<u32, 3>>& at);
    void run();
};

static u64 arithmetic(const Ins& i, u64 a, u64 b) {
    const i64 t = i.type;
    const bool ftz = i.flags & FTZ;
    if (t == F32) {
        float x = as_float(a), y = as_float(b), r = 0;
        if (ftz) x = flush(x), y = flush(y);
        switch (i.op) {
            case add_op: r = x + y; break;
            case sub_op: r = x - y; break;
            case mul_op: {
                r = x * y;
                if (i.flags & TRUNC && std::isfinite(x) && std::isfinite(y) && std::fabs((double)r) > std::fabs((double)x * y)) r = std::nextafter(r, 0.f);
                break;
            }
            case div_op: r = x / y; break;
            case max_op: case min_op:
                if (x != x || y != y) { r = i.flags & NAN_ || (x != x && y != y) ? NAN : x != x ? y : x; break; }
                if (x == y) r = std::signbit(x) == (i.op == min_op) ? x : y;
                else r = (x > y) == (i.op == max_op) ? x : y;
                break;
        }
        return result(r, ftz);
    }
    if (t == F64) {
        const double x = as_double(a), y = as_double(b);
        return bits_of(i.op == add_op ? x + y : i.op == sub_op ? x - y : i.op == mul_op ? x * y : x / y);
    }
    if (t == F16X2 || t == BF16X2) {
        u64 r = 0;
        for (int h = 0; h < 32; h += 16) {
            const double x = t == F16X2 ? half_value(a >> h) : bf16_value(a >> h), y = t == F16X2 ? half_value(b >> h) : bf16_value(b >> h);
            const double v = i.op == add_op ? x + y : i.op == sub_op ? x - y : x * y;
            r |= (u64)(t == F16X2 ? half_bits(v) : bf16_bits((float)v)) << h;
        }
        return r;
    }
    if (t == U16X2) {
        const u64 l = i.op == max_op ? std::max((u16)a, (u16)b) : std::min((u16)a, (u16)b);
        const u64 h = i.op == max_op ? std::max((u16)(a >> 16), (u16)(b >> 16)) : std::min((u16)(a >> 16), (u16)(b >> 16));
        return l | h << 16;
    }
    const i64 x = extend(a, t), y = extend(b, t);
    switch (i.op) {
        case add_op: return mask_to(a + b, t);
        case sub_op: return mask_to(a - b, t);
        case mul_op: return mask_to(a * b, t);
        case max_op: return mask_to(is_signed(t) ? (u64)std::max(x, y) : std::max((u64)x, (u64)y), t);
        case min_op: return mask_to(is_signed(t) ? (u64)std::min(x, y) : std::min((u64)x, (u64)y), t);
        case div_op: if (!y) return mask_to(~0ull, t); return mask_to(is_signed(t) ? (u64)(y == -1 ? -(u64)x : x / y) : (u64)x / (u64)y, t);
        case rem_op: if (!y) return a; return mask_to(is_signed(t) ? (u64)(y == -1 ? 0 : x % y) : (u64)x % (u64)y, t);
    }
    return 0;
}

enum Compare { EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, ISNAN };
static bool compare(const Ins& i, u64 a, u64 b) {
    auto by = [&](auto x, auto y, i64 c) { return c == EQ ? x == y : c == NE ? x != y : c == LT ? x < y : c == LE ? x <= y : c == GT ? x > y : x >= y; };
    if (i.type == F32 || i.type == F64) {
        double x = i.type == F32 ? as_float(a) : as_double(a), y = i.type == F32 ? as_float(b) : as_double(b);
        if (i.flags & FTZ) x = flush((float)x), y = flush((float)y);
        const bool unordered = x != x || y != y;
        if (i.mod == NUM) return !unordered;
        if (i.mod == ISNAN) return unordered;
        return unordered ? i.mod >= EQU : by(x, y, i.mod % 6);
    }
    return is_signed(i.type) ? by(extend(a, i.type), extend(b, i.type), i.mod) : by(mask_to(a, i.type), mask_to(b, i.type), i.mod);
}

static u64 convert(const Ins& i, u64 a, u64 b) {
    const i64 to = i.type, from = i.mod;
    if (to == F16X2 && from == E4M3X2) return half_bits(e4m3_value(a & 255)) | (u64)half_bits(e4m3_value(a >> 8 & 255)) << 16;
    if (to == F16X2) return half_bits(as_float(b)) | (u64)half_bits(as_float(a)) << 16;
    if (to == BF16X2) return bf16_bits(as_float(b)) | (u64)bf16_bits(as_float(a)) << 16;
    if (to == E4M3X2) return e4m3_code(as_float(b)) | e4m3_code(as_float(a)) << 8;
    const bool from_float = from >= F16 && from <= F64, to_float = to >= F16 && to <= F64;
    if (!from_float && !to_float) return mask_to((u64)extend(a, from), to);
    double x = from == F16 ? half_value(a) : from == BF16 ? bf16_value(a) : from == F64 ? as_double(a)
             : from == F32 ? (i.flags & FTZ ? flush(as_float(a)) : as_float(a)) : is_signed(from) ? (double)extend(a, from) : (double)mask_to(a, from);
    if (to_float) {
        if (to == F64) return bits_of(x);
        if (to == F16) return half_bits(x);
        if (to == BF16) return bf16_bits((float)x);
        float r = (float)x;
        if (i.imm == 1 && std::isfinite(x) && std::fabs((double)r) > std::fabs(x)) r = std::nextafter(r, 0.f);
        return result(r, i.flags & FTZ);
    }
    if (x != x) return 0;
    x = i.imm == 1 ? std::trunc(x) : i.imm == 2 ? std::floor(x) : i.imm == 3 ? std::ceil(x) : std::nearbyint(x);
    if (is_signed(to)) {
        const double top = std::ldexp(1.0, width(to) - 1);
        return mask_to(x >= top ? (u64)(((u64)1 << (width(to) - 1)) - 1) : x < -top ? (u64)1 << (width(to) - 1) : (u64)(i64)x, to);
    }
    return x <= 0 ? 0 : x >= std::ldexp(1.0, width(to)) ? mask_to(~0ull, to) : (u64)x;
}

// One instruction of the lanes that stand together; false where they must wait.
bool Machine::step(Warp& w, size_t which) {
    const i64 pc = w.lanes[which].pc;
    const u32 group = w.lanes[which].mask;
    if (pc >= size) throw Fault("ran past the last instruction");
    const Ins& i = code[pc];
    u32 run = group;
    if (i.pred >= 0) {
        const u64* p = &w.regs[i.pred * 32];
        run = 0;
        for (int l = 0; l < 32; ++l) run |= (u32)((group >> l & 1) && (p[l] & 1) != (u64)i.negated) << l;
    }
    if (!w.products.empty() && i.op != wgmma_op)
        for (i64 k = 0; k < i.count; ++k)
            if (w.busy[args[i.first + k]] > (k < i.results ? 0 : 1)) fail(w, i, __builtin_ctz(group), "register of a wgmma in flight");
    auto R = [&](i64 k) { return reg(w, i, k); };
    auto each = [&](auto f) { for (u32 m = run; m; m &= m - 1) f(__builtin_ctz(m)); };
    auto whole = [&] { return run == w.live; };  // .aligned: all lanes of the warp
    auto split = [&](u32 now) {                  // the others stay where they are
        if (now != group) { w.lanes[which].mask = now; w.lanes.push_back({pc, group & ~now}); }
    };
    auto gather = [&](i64 k) {                   // lanes named by the mask in operand k, once all are here
        const u32 mask = (u32)R(k)[__builtin_ctz(run)] & w.live;
        if ((mask & run) != mask) return false;
        run = mask;
        return true;
    };
    if (run || i.op == bra_op) switch (i.op) {
        case nop_op: break;
        case bra_op: {
            const u32 stay = group & ~run;
            if (!stay) { w.lanes[which].pc = i.target; return true; }
            if (run) { w.lanes[which] = {pc + 1, stay}; w.lanes.push_back({i.target, run}); return true; }
            break;
        }
        case ret_op:
            wait_copies(w, i, run, -1);
            w.live &= ~run;
            if (run == group) w.lanes.erase(w.lanes.begin() + which);
            else w.lanes[which] = {pc + 1, group & ~run};
            return true;
        case add_op: case sub_op: case mul_op: case div_op: case rem_op: case max_op: case min_op: {
            u64 *d = R(0), *a = R(1), *b = R(2);
            each([&](int l) { d[l] = arithmetic(i, a[l], b[l]); });
            break;
        }
        case and__op: { u64 *d = R(0), *a = R(1), *b = R(2); each([&](int l) { d[l] = a[l] & b[l]; }); break; }
        case or__op: { u64 *d = R(0), *a = R(1), *b = R(2); each([&](int l) { d[l] = a[l] | b[l]; }); break; }
        case xor__op: { u64 *d = R(0), *a = R(1), *b = R(2); each([&](int l) { d[l] = a[l] ^ b[l]; }); break; }
        case not__op: { u64 *d = R(0), *a = R(1); each([&](int l) { d[l] = mask_to(~a[l], i.type); }); break; }
        case mov_op: { u64 *d = R(0), *a = R(1); each([&](int l) { d[l] = mask_to(a[l], i.type); }); break; }
        case neg_op: case abs_op: {
            u64 *d = R(0), *a = R(1);
            each([&](int l) {
                if (i.type == F32) {
                    const float x = i.flags & FTZ ? flush(as_float(a[l])) : as_float(a[l]);
                    d[l] = bits_of(i.op == neg_op ? -x : std::fabs(x));
                } else if (i.type == F64) d[l] = bits_of(i.op == neg_op ? -as_double(a[l]) : std::fabs(as_double(a[l])));
                else d[l] = mask_to(i.op == neg_op || extend(a[l], i.type) < 0 ? -a[l] : a[l], i.type);
            });
            break;
        }
        case copysign_op: { u64 *d = R(0), *a = R(1), *b = R(2); each([&](int l) { d[l] = bits_of(std::copysign(as_float(b[l]), as_float(a[l]))); }); break; }
        case fma_op: {
            u64 *d = R(0), *a = R(1), *b = R(2), *c = R(3);
            const bool ftz = i.flags & FTZ;
            each([&](int l) {
                if (i.type == F32) {
                    float x = as_float(a[l]), y = as_float(b[l]), z = as_float(c[l]);
                    if (ftz) x = flush(x), y = flush(y), z = flush(z);
                    float r = std::fma(x, y, z);  // mod: 1 to [0, 1], NaN to 0; 2 rounded down
                    if (i.mod & 2 && std::isfinite(r) && (double)r > std::fma((double)x, (double)y, (double)z)) r = std::nextafter(r, -INFINITY);
                    if (i.mod & 1) r = r > 0.f ? std::min(r, 1.f) : 0.f;
                    d[l] = result(r, ftz);
                } else if (i.type == F64) d[l] = bits_of(std::fma(as_double(a[l]), as_double(b[l]), as_double(c[l])));
                else {
                    u64 r = 0;
                    for (int h = 0; h < 32; h += 16)
                        r |= i.type == F16X2 ? (u64)half_bits((double)half_value(a[l] >> h) * half_value(b[l] >> h) + half_value(c[l] >> h)) << h
                                             : (u64)bf16_bits(std::fma(bf16_value(a[l] >> h), bf16_value(b[l] >> h), bf16_value(c[l] >> h))) << h;
                    d[l] = r;
                }
            });
            break;
        }
        case mad_op: { u64 *d = R(0), *a = R(1), *b = R(2), *c = R(3); each([&](int l) { d[l] = mask_to(a[l] * b[l] + c[l], i.type); }); break; }
        case mad_wide_op: case mul_wide_op: {
            u64 *d = R(0), *a = R(1), *b = R(2), *c = i.op == mad_wide_op ? R(3) : nullptr;
            each([&](int l) {
                const u64 r = (u64)extend(a[l], i.type) * (u64)extend(b[l], i.type) + (c ? c[l] : 0);
                d[l] = width(i.type) == 16 ? (u32)r : r;
            });
            break;
        }
        case mul_hi_op: {
            u64 *d = R(0), *a = R(1), *b = R(2);
            each([&](int l) {
                if (width(i.type) == 64) d[l] = is_signed(i.type) ? (u64)((__int128)(i64)a[l] * (i64)b[l] >> 64) : (u64)((unsigned __int128)a[l] * b[l] >> 64);
                else d[l] = mask_to((u64)(extend(a[l], i.type) * extend(b[l], i.type)) >> width(i.type), i.type);
            });
            break;
        }
        case shl_op: case shr_op: {
            u64 *d = R(0), *a = R(1), *b = R(2);
            const u64 wd = width(i.type);
            each([&](int l) {
                const u64 n = std::min<u64>((u32)b[l], wd);
                if (i.op == shl_op) d[l] = n >= wd ? 0 : mask_to(a[l] << n, i.type);
                else d[l] = is_signed(i.type) ? mask_to((u64)(extend(a[l], i.type) >> std::min(n, wd - 1)), i.type) : n >= wd ? 0 : mask_to(a[l], i.type) >> n;
            });
            break;
        }
        case shf_op: {  // mod: 1 right, 2 clamp
            u64 *d = R(0), *a = R(1), *b = R(2), *c = R(3);
            each([&](int l) {
                const u64 both = (u32)a[l] | b[l] << 32, n = i.mod & 2 ? std::min<u32>((u32)c[l], 32) : c[l] & 31;
                d[l] = (u32)(i.mod & 1 ? both >> n : both << n >> 32);
            });
            break;
        }
        case bfi_op: {
            u64 *d = R(0), *a = R(1), *b = R(2), *p = R(3), *n = R(4);
            each([&](int l) {
                const u64 pos = p[l] & 255, len = n[l] & 255;
                const u64 field = pos > 63 ? 0 : (len > 63 ? ~0ull : (1ull << len) - 1) << pos;
                d[l] = mask_to((b[l] & ~field) | (pos > 63 ? 0 : a[l] << pos & field), i.type);
            });
            break;
        }
        case bfind_op: {
            u64 *d = R(0), *a = R(1);
            each([&](int l) {
                u64 x = a[l];
                if (is_signed(i.type) && extend(x, i.type) < 0) x = mask_to(~x, i.type);
                const int top = x ? 63 - __builtin_clzll(x) : -1;
                d[l] = (u32)(top < 0 ? -1 : i.mod ? width(i.type) - 1 - top : top);
            });
            break;
        }
        case brev_op: { u64 *d = R(0), *a = R(1); each([&](int l) { u64 r = 0; for (int k = 0; k < width(i.type); ++k) r |= (a[l] >> k & 1) << (width(i.type) - 1 - k); d[l] = r; }); break; }
        case clz_op: { u64 *d = R(0), *a = R(1); each([&](int l) { d[l] = a[l] ? __builtin_clzll(a[l]) - (64 - width(i.type)) : width(i.type); }); break; }
        case popc_op: { u64 *d = R(0), *a = R(1); each([&](int l) { d[l] = __builtin_popcountll(a[l]); }); break; }
        case prmt_op: {
            u64 *d = R(0), *a = R(1), *b = R(2), *c = R(3);
            each([&](int l) {
                const u64 both = (u32)a[l] | b[l] << 32;
                u32 r = 0;
                for (int k = 0; k < 4; ++k) {
                    const u32 s = c[l] >> 4 * k & 15, byte = both >> 8 * (s & 7) & 255;
                    r |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * k;
                }
                d[l] = r;
            });
            break;
        }
        case ex2_op: case lg2_op: case rcp_op: case sqrt_op: {
            u64 *d = R(0), *a = R(1);
            const bool ftz = i.flags & FTZ;
            each([&](int l) {
                const float x = ftz ? flush(as_float(a[l])) : as_float(a[l]);
                const double r = i.op == ex2_op ? std::exp2((double)x) : i.op == lg2_op ? std::log2((double)x) : i.op == rcp_op ? 1.0 / x : std::sqrt((double)x);
                d[l] = result((float)r, ftz);
            });
            break;
        }
        case cvt_op: { u64 *d = R(0), *a = R(1), *b = i.count > 2 ? R(2) : a; each([&](int l) { d[l] = convert(i, a[l], b[l]); }); break; }
        case selp_op: { u64 *d = R(0), *a = R(1), *b = R(2), *p = R(3); each([&](int l) { d[l] = p[l] & 1 ? a[l] : b[l]; }); break; }
        case setp_op: { u64 *d = R(0), *a = R(1), *b = R(2); each([&](int l) { d[l] = compare(i, a[l], b[l]); }); break; }
        case pack_op: {  // imm: bits of a part
            each([&](int l) { u64 r = 0; for (i64 k = 1; k < i.count; ++k) r |= (i.imm == 64 ? R(k)[l] : R(k)[l] & ((1ull << i.imm) - 1)) << i.imm * (k - 1); R(0)[l] = r; });
            break;
        }
        case unpack_op:
            each([&](int l) { const u64 x = R(i.count - 1)[l]; for (i64 k = 0; k + 1 < i.count; ++k) R(k)[l] = x >> i.imm * k & ((1ull << i.imm) - 1); });
            break;
        case ld_op: case st_op: {  // mod: 0 global, 1 shared, 2 param, 3 local
            const bool store = i.op == st_op;
            const i64 n = i.count - 1, bytes = width(i.type) / 8;
            u64* base = R(store ? 0 : n);
            each([&](int l) {
                const u64 at = base[l] + i.imm, whole_bytes = n * bytes;
                u8* p;
                if (i.mod == 0) p = global(w, i, l, at, whole_bytes, whole_bytes, store);
                else if (i.mod == 1) {
                    p = shared(w, i, l, at, whole_bytes, whole_bytes);
                    bool same = store;
                    for (i64 k = 0; same && k < n; ++k) same = !memcmp(p + k * bytes, &R(k + 1)[l], bytes);
                    touch(w, i, l, at, whole_bytes, store, false, same);
                }
                else if (i.mod == 2) { if (at + whole_bytes > param_bytes) fail(w, i, l, "parameter out of bounds"); p = (u8*)params + at; }
                else { if (at + whole_bytes > local_bytes) fail(w, i, l, "local access out of bounds"); p = w.local.data() + (u64)l * local_bytes + at; }
                for (i64 k = 0; k < n; ++k, p += bytes) {
                    if (store) memcpy(p, &R(k + 1)[l], bytes);
                    else { u64 x = 0; memcpy(&x, p, bytes); R(k)[l] = (u64)extend(x, i.type); }
                }
            });
            break;
        }
        case atom_op: {  // mod: space + 16 * (add, min, max, or, and, cas, exch)
            const i64 bytes = width(i.type) / 8, kind = i.mod >> 4;
            each([&](int l) {
                const u64 at = R(1)[l] + i.imm;
                u8* p = (i.mod & 15) == 0 ? global(w, i, l, at, bytes, bytes, true) : shared(w, i, l, at, bytes, bytes);
                u64 old = 0, x = R(2)[l], now;
                memcpy(&old, p, bytes);
                const bool less = is_signed(i.type) ? extend(x, i.type) < extend(old, i.type) : x < old;
                now = kind == 0 ? (i.type == F32 ? (u64)bits_of(as_float(old) + as_float(x)) : old + x) : kind == 1 ? (less ? x : old) : kind == 2 ? (less ? old : x)
                    : kind == 3 ? old | x : kind == 4 ? old & x : kind == 5 ? (old == x ? R(3)[l] : old) : x;
                memcpy(p, &now, bytes);
                R(0)[l] = old;
            });
            break;
        }
        case shfl_op: {
            if (!gather(5)) return false;
            split(run | (i.pred >= 0 ? group : 0));
            u64 old[32];
            memcpy(old, R(2), sizeof old);
            u64 pred[32]; memcpy(pred, R(1), sizeof pred);
            u64 value[32]; memcpy(value, R(0), sizeof value);
            each([&](int l) {
                const u32 b = R(3)[l], c = R(4)[l], seg = c >> 8 & 31, bound = c & 31;
                const int top = (l & seg) | (bound & ~seg), low = l & seg;
                int j = i.mod == 0 ? l - (int)b : i.mod == 1 ? l + (int)b : i.mod == 2 ? (int)(l ^ b) : (int)(low | (b & ~seg & 31));
                const bool in = i.mod == 0 ? j >= top : j <= top;
                if (!in) j = l;
                if (!(run >> j & 1)) fail(w, i, l, "shfl from a lane that takes no part");
                value[l] = (u32)old[j];
                pred[l] = in;
            });
            memcpy(R(1), pred, sizeof pred);
            memcpy(R(0), value, sizeof value);
            break;
        }
        case vote_op: {  // mod: 0 all, 1 any, 2 ballot, 3 uni
            if (!gather(2)) return false;
            split(run | (i.pred >= 0 ? group : 0));
            u32 yes = 0;
            each([&](int l) { yes |= (u32)((R(1)[l] & 1) ^ (u64)i.imm) << l; });
            each([&](int l) { R(0)[l] = i.mod == 0 ? yes == run : i.mod == 1 ? yes != 0 : i.mod == 2 ? yes : yes == 0 || yes == run; });
            break;
        }
        case bar_warp_op:
            if (!gather(0)) return false;
            split(run | (i.pred >= 0 ? group : 0));
            break;
        case bar_sync_op: case bar_arrive_op: case bar_red_op: {
            if (!whole()) return false;
            const bool reduce = i.op == bar_red_op;
            const i64 k = reduce ? 1 : 0;
            const int l0 = __builtin_ctz(run);
            const u64 id = R(k)[l0];
            if (id > 15) fail(w, i, l0, "barrier number above 15");
            Barrier& b = w.cta->barriers[id];
            const i64 given = i.count - k - (reduce ? 1 : 0) > 1 ? (i64)R(k + 1)[l0] : -1;
            if (w.waits < 0) {
                b.arrived += 32;
                release(w, b.sync);
                if (reduce) each([&](int l) { b.pending_or |= (u32)(R(i.count - 1)[l] & 1); });
                w.waits = (int)id;
                w.wait_generation = b.generation;
                executed++;
            }
            u32 expected = (u32)given;
            if (given < 0) { expected = 0; for (Warp& o : w.cta->warps) expected += o.live ? 32 : 0; }
            if (given > 0 && given % 32) fail(w, i, l0, "barrier count is no multiple of 32");
            if (b.generation == w.wait_generation && b.arrived > expected) fail(w, i, l0, "more threads at a barrier than it counts");
            if (b.generation == w.wait_generation && b.arrived == expected) { b.generation++; b.arrived = 0; b.sync.done = std::move(b.sync.coming); b.sync.coming = Clocks(); b.last_or = b.pending_or; b.pending_or = 0; }
            if (i.op != bar_arrive_op && b.generation == w.wait_generation) return false;
            w.waits = -1;
            if (i.op != bar_arrive_op) w.clocks.join(b.sync.done);
            if (reduce) each([&](int l) { R(0)[l] = b.last_or; });
            break;
        }
        case barrier_cluster_arrive_op:
            if (!whole()) return false;
            w.cluster_generation = cluster_generation;
            release(w, cluster_sync);
            { u32 all = 0; for (Cta& c : ctas) all += (u32)c.warps.size(); if (++cluster_arrived == all) { cluster_arrived = 0; cluster_generation++; cluster_sync.done = cluster_sync.coming; } }
            break;
        case barrier_cluster_wait_op:
            if (cluster_generation == w.cluster_generation) return false;
            w.clocks.join(cluster_sync.done);
            break;
        case mapa_op: each([&](int l) { R(0)[l] = (R(1)[l] & 0xffffff) | (R(2)[l] + 1) << 24; }); break;
        case copy_op: {  // args: to, from, bytes[, taken]
            const bool late = (random.state >> 40) & 1;
            each([&](int l) {
                Copy c{l, w.copy_group[l], (u32)(R(0)[l] + i.imm), R(1)[l] + i.target, (u32)R(2)[l], (u32)(i.count > 3 ? R(3)[l] : R(2)[l])};
                if (c.taken > c.bytes) fail(w, i, l, "cp.async takes more bytes than it writes");
                if (late) w.copies.push_back(c); else do_copy(w, i, c);
            });
            break;
        }
        case proxy_fence_op: w.clocks.fenced = w.clocks.seen; w.clocks.seen[w.id]++; break;
        case commit_op: each([&](int l) { w.copy_group[l]++; }); break;
        case copy_wait_op: wait_copies(w, i, run, i.mod ? -1 : (i64)R(0)[0]); break;
        case ldmatrix_op: {  // mod: 1 transposed; results: number of matrices
            if (!whole()) return false;
            const int n = (int)i.results;
            u16 m[4][8][8];
            for (int k = 0; k < n; ++k)
                for (int r = 0; r < 8; ++r) {
                    const u64 at = R(n)[8 * k + r] + i.imm;
                    memcpy(m[k][r], shared(w, i, 8 * k + r, at, 16, 16), 16);
                    touch(w, i, 8 * k + r, at, 16, false);
                }
            for (int k = 0; k < n; ++k)
                each([&](int l) {
                    const int g = l / 4, t = 2 * (l % 4);
                    R(k)[l] = i.mod ? m[k][t][g] | (u32)m[k][t + 1][g] << 16 : m[k][g][t] | (u32)m[k][g][t + 1] << 16;
                });
            break;
        }
        case stmatrix_op: {  // args: address, matrices
            if (!whole() || run != ~0u) return false;
            const int n = (int)i.count - 1;
            for (int k = 0; k < n; ++k)
                for (int l = 0; l < 32; ++l)
                    for (int h = 0; h < 2; ++h) {
                        const int g = l / 4, t = 2 * (l % 4) + h, row = i.mod ? t : g, column = i.mod ? g : t;
                        const u16 x = (u16)(R(k + 1)[l] >> 16 * h);
                        const u64 at = R(0)[8 * k + row] + i.imm;
                        memcpy(shared(w, i, 8 * k + row, at, 16, 16) + 2 * column, &x, 2);
                        touch(w, i, 8 * k + row, at + 4 * (column / 2), 4, true);
                    }
            break;
        }
        case mma_op: {  // m16n8k16; mod: 1 bf16. args: d 4, a 4, b 2, c 4
            if (!whole() || run != ~0u) return false;
            float a[16][16], b[16][8], d[32][4];
            auto value = [&](u64 x) { return i.mod ? bf16_value(x) : halves[(u16)x]; };
            for (int l = 0; l < 32; ++l)
                for (int h = 0; h < 2; ++h) {
                    const int g = l / 4, t = 2 * (l % 4) + h;
                    for (int k = 0; k < 4; ++k) a[g + 8 * (k & 1)][t + 8 * (k >> 1)] = value(R(4 + k)[l] >> 16 * h);
                    for (int k = 0; k < 2; ++k) b[t + 8 * k][g] = value(R(8 + k)[l] >> 16 * h);
                }
            for (int l = 0; l < 32; ++l)
                for (int e = 0; e < 4; ++e) {
                    double sum = as_float(R(10 + e)[l]);
                    for (int k = 0; k < 16; ++k) sum += (double)a[l / 4 + (e & 2 ? 8 : 0)][k] * b[k][2 * (l % 4) + (e & 1)];
                    d[l][e] = (float)sum;
                }
            for (int l = 0; l < 32; ++l) for (int e = 0; e < 4; ++e) R(e)[l] = result(d[l][e], false);
            break;
        }
        case mb_init_op: each([&](int l) { shared(w, i, l, R(0)[l] + i.imm, 8, 8); const i64 n = (i64)(u32)R(1)[l]; w.cta->mbarriers[(u32)(R(0)[l] + i.imm)] = {{}, n, n, 0, 0}; }); break;
        case mb_arrive_op: case mb_expect_op:  // args: state, address[, count]
            each([&](int l) {
                MBarrier& b = mbarrier(w, i, l, R(1)[l] + i.imm);
                release(w, b.sync);
                if (i.op == mb_expect_op) { b.tx += (u32)R(2)[l]; b.pending--; }
                else b.pending -= i.count > 2 ? (i64)(u32)R(2)[l] : 1;
                settle(w, i, l, b);
            });
            break;
        case mb_wait_op: {  // args: result, address, parity; waits, as the hardware does for a while
            bool ready = true;
            each([&](int l) { ready &= (mbarrier(w, i, l, R(1)[l] + i.imm).phase & 1) != (R(2)[l] & 1); });
            if (!ready) return false;
            each([&](int l) { w.clocks.join(mbarrier(w, i, l, R(1)[l] + i.imm).sync.done); R(0)[l] = 1; });
            break;
        }
        case st_async_op: {  // args: address, values, mbarrier
            const i64 n = i.count - 2;
            each([&](int l) {
                u8* p = shared(w, i, l, R(0)[l] + i.imm, 4 * n, 4 * n);
                for (i64 k = 0; k < n; ++k) memcpy(p + 4 * k, &R(k + 1)[l], 4);
                MBarrier& b = mbarrier(w, i, l, R(n + 1)[l]);
                touch(w, i, l, R(0)[l] + i.imm, 4 * n, true);
                release(w, b.sync);
                b.tx -= 4 * n;
                settle(w, i, l, b);
            });
            break;
        }
        case wgmma_op: {  // imm: n; mod: 1 bf16, 2 A in registers, 4 B transposed. args: d, a, b, scale-d
            if (!whole() || run != ~0u) return false;
            const i64 d = i.imm / 2, b = d + (i.mod & 2 ? 4 : 1);
            Wgmma p{&i, R(d)[0], R(b)[0], false, (R(b + 1)[0] & 1) != 0, w.wgmma_group};
            w.products.push_back(p);
            mark(w);
            bool before = true;  // products are done in order
            for (const Wgmma& q : w.products) before &= q.done || &q == &w.products.back();
            if (before && random.below(2)) do_wgmma(w, w.products.back());
            break;
        }
        case wgmma_commit_op: if (!whole()) return false; w.wgmma_group++; break;
        case wgmma_wait_op: if (!whole()) return false; wait_wgmma(w, (u32)R(0)[0]); break;
        default: fail(w, i, __builtin_ctz(run), "opcode not known to the machine");
    }
    w.lanes[which].pc = pc + 1;
    return true;
}

// One instruction of some lanes of the warp; false if all of them wait.
bool Machine::advance(Warp& w) {
    auto& lanes = w.lanes;
    if (lanes.size() == 1) return step(w, 0);
    std::sort(lanes.begin(), lanes.end(), [](const Lanes& a, const Lanes& b) { return a.pc < b.pc; });
    size_t kept = 0;
    for (size_t k = 1; k < lanes.size(); ++k)
        if (lanes[k].pc == lanes[kept].pc) lanes[kept].mask |= lanes[k].mask;
        else lanes[++kept] = lanes[k];
    lanes.resize(kept + 1);
    const size_t first = random.below(16) ? 0 : random.below((u32)lanes.size());
    for (size_t k = 0, n = lanes.size(); k < n; ++k)
        if (step(w, (first + k) % n)) return true;
    return false;
}

void Machine::run_cluster(const std::vector<std::array<u32, 3>>& at) {
    ctas.resize(at.size());
    cluster_arrived = 0;
    cluster_sync = Sync();
    const u32 per_cta = (threads + 31) / 32;
    num_warps = per_cta * (u32)at.size();
    std::vector<Warp*> all;
    for (size_t r = 0; r < at.size(); ++r) {
        Cta& c = ctas[r];
        c.rank = (int)r;
        std::copy(at[r].begin(), at[r].end(), c.at);
        c.shared.assign(shared_bytes, 0xff);
        c.mbarriers.clear();
        c.written.assign(shared_bytes / 4 + 1, Written{});
        c.reads.assign((shared_bytes / 4 + 1) * num_warps, 0);
        for (Barrier& b : c.barriers) b = Barrier();
        c.warps.resize((threads + 31) / 32);
        for (size_t k = 0; k < c.warps.size(); ++k) {
            Warp& w = c.warps[k];
            std::vector<u64> regs = std::move(w.regs);
            w = Warp();
            w.regs = std::move(regs);
            w.regs.resize(num_rows * 32, 0xffffffffffffffffull);
            w.cta = &c;
            w.index = (int)k;
            w.id = (int)(r * per_cta + k);
            w.clocks.seen.assign(num_warps, 0);
            w.clocks.fenced.assign(num_warps, 0);
            w.clocks.seen[w.id] = 1;
            w.live = threads - 32 * k >= 32 ? ~0u : (1u << (threads - 32 * k)) - 1;
            w.lanes = {{0, w.live}};
            w.local.assign(32ull * local_bytes, 0xff);
            w.busy.assign(num_rows, 0);
            for (int l = 0; l < 32; ++l) {
                const u32 special[] = {32 * (u32)k + l, 0, 0, threads, 1, 1, at[r][0], at[r][1], at[r][2], grid[0], grid[1], grid[2], (u32)l, (u32)r, (u32)at.size()};
                for (int s = 0; s < 15; ++s) w.regs[s * 32 + l] = special[s];
                for (i64 s = 0; s < num_constants; ++s) w.regs[(15 + s) * 32 + l] = constants[s];
            }
            all.push_back(&w);
        }
    }
    u64 progress = 0;
    std::vector<Warp*> ready;
    for (;;) {
        ready.clear();
        bool any = false;
        for (Warp* w : all) if (w->live) { any = true; if (w->blocked_at != progress) ready.push_back(w); }
        if (!any) return;
        if (ready.empty()) {
            std::string text = "deadlock:";
            for (Warp* w : all)
                for (const Lanes& g : w->live ? w->lanes : std::vector<Lanes>())
                    text += " CTA " + std::to_string(w->cta->rank) + " warp " + std::to_string(w->index) + " lanes " + hex(g.mask) + " waits at instruction " + std::to_string(g.pc) + ", line " + std::to_string(code[g.pc].line) + ";";
            throw Fault(text);
        }
        Warp& w = *ready[random.below((u32)ready.size())];
        const u64 before = executed;
        for (u32 n = 1 + random.below(random.below(8) ? 400 : 10); n && w.live; --n) {
            if (!advance(w)) { if (executed != before) progress++; w.blocked_at = progress; break; }
            executed++;
        }
        if (executed != before && w.blocked_at != progress) progress++;
        if (executed > limit) throw Fault("too many instructions: a loop without end?");
    }
}

void Machine::run() {
    for (u32 x = 0; x < 65536; ++x) halves.push_back(half_value(x));
    const u32 n = grid[0] * grid[1] * grid[2];
    if (n % cluster) throw Fault("grid is no multiple of the cluster");
    std::vector<std::vector<std::array<u32, 3>>> order;
    // Clusters lie along x or, where the grid is not wide enough, along y.
    std::map<std::array<u32, 3>, std::vector<std::array<u32, 3>>> by;
    for (u32 z = 0; z < grid[2]; ++z) for (u32 y = 0; y < grid[1]; ++y) for (u32 x = 0; x < grid[0]; ++x)
        by[{x, y / cluster, z}].push_back({x, y, z});
    for (auto& one : by) order.push_back(one.second);
    for (size_t k = order.size(); k > 1; --k) std::swap(order[k - 1], order[random.below((u32)k)]);
    for (auto& one : order) run_cluster(one);
}

extern "C" const char* opcodes() {
    return ""
#define X(name) #name " "
        OPCODES(X)
#undef X
        ;
}

extern "C" int run(const Ins* code, i64 size, const i64* args, const u64* constants, i64 num_constants, i64 num_rows, const u32* geometry,
                   const u8* params, u64 param_bytes, const Array* arrays, u64 num_arrays, u64 seed, u64 limit, char* error, u64 error_bytes) {
    Machine m{};
    m.code = code; m.size = size; m.args = args; m.constants = constants; m.num_constants = num_constants; m.num_rows = num_rows;
    std::copy(geometry, geometry + 3, m.grid);
    m.threads = geometry[3]; m.cluster = geometry[4]; m.shared_bytes = geometry[5]; m.local_bytes = geometry[6];
    m.params = params; m.param_bytes = param_bytes;
    m.arrays.assign(arrays, arrays + num_arrays);
    m.random.state = seed * 0x9e3779b97f4a7c15ull + 12345;
    m.limit = limit;
    try { m.run(); return 0; }
    catch (const std::exception& e) { snprintf(error, error_bytes, "%s", e.what()); return 1; }
}
