// Rows of Llama-like sublayers on the CPU, straight from the model's own row-major weights.
//
// A product of few rows takes as long as reading its weights, if nothing else gets in the way; one of many rows takes
// as long as its multiplications. Every weight is read once for a group of rows at a time; a panel of weights stays in
// the cache while the other groups pass. Each sum runs over its inputs in one order, however many rows there are, and
// bfloat16 is rounded where transformers rounds it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

struct bf16 {
    uint16_t bits;
};

inline float up(float value) { return value; }
inline float up(bf16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

template <class T> T down(float value);
template <> inline float down<float>(float value) { return value; }
template <> inline bf16 down<bf16>(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (value != value) return {0x7fc0};
    return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
// Cephes' expf, which compilers turn into vector code; good to two units in the last place.
inline float exponential(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    const float n = std::nearbyint(x * 1.44269504f);
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * r + 1.3981999507e-3f;
    sum = sum * r + 8.3334519073e-3f;
    sum = sum * r + 4.1665795894e-2f;
    sum = sum * r + 1.6666665459e-1f;
    sum = sum * r + 5.0000001201e-1f;
    const int32_t bits = (int32_t(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return (sum * r * r + r + 1.0f) * power;
}

template <class T> inline float rounded(float value) { return up(down<T>(value)); }

// Vectors as wide as the processor's; a tile of sums has to fit its registers.
#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif
template <int N> struct Vector {
    typedef float Floats __attribute__((vector_size(4 * N)));
    typedef uint32_t Words __attribute__((vector_size(4 * N)));
};
using Floats = Vector<LANES>::Floats;
using Words = Vector<LANES>::Words;

template <class To> inline To load(const void* from) {
    To to;
    std::memcpy(&to, from, sizeof(To));
    return to;
}

// Compilers that may choose where to fuse do not choose the same in every tile.
inline Floats multiply_add(Floats total, Floats a, Floats b) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, total);
#elif defined(__AVX2__) && defined(__FMA__)
    return _mm256_fmadd_ps(a, b, total);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)total, (float32x4_t)a, (float32x4_t)b);
#else
    return total + a * b;
#endif
}

// How a dtype is multiplied: blocks of ``width`` inputs, each of them ``parts`` vectors, whose products are added to
// float sums.
template <class T> struct Lanes;
template <> struct Lanes<float> {
    using Part = Floats;
    static constexpr int width = LANES, parts = 1;
    static Part part(const float* block, int) { return load<Floats>(block); }
    static Floats add(Floats total, Part a, Part b) { return multiply_add(total, a, b); }
};
// Widened in registers: every other element of a block is one part, the rest the other.
template <> struct Lanes<bf16> {
    using Part = Floats;
    static constexpr int width = 2 * LANES, parts = 2;
    static Part part(const bf16* block, int index) {
        const Words pairs = load<Words>(block);
        return (Floats)(index ? pairs & 0xffff0000u : pairs << 16);
    }
    static Floats add(Floats total, Part a, Part b) { return multiply_add(total, a, b); }
};
// The same for products, which some processors have instructions for.
template <class T> struct ProductLanes : Lanes<T> {};
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
template <> struct ProductLanes<bf16> {
    using Part = __m512bh;
    static constexpr int width = 2 * LANES, parts = 1;
    static Part part(const bf16* block, int) { return load<__m512bh>(block); }
    static Floats add(Floats total, Part a, Part b) { return _mm512_dpbf16_ps(total, a, b); }
};
#endif

// A block of inputs of one row, ready to be multiplied.
template <class T> struct Block {
    typename ProductLanes<T>::Part parts[ProductLanes<T>::parts];
};

constexpr long GROUP = 6;       // most rows of a tile
constexpr long ROWS = 96;       // most rows that are multiplied before the weights are read again
constexpr long COLUMNS = 48;    // most weight rows that a thread takes at a time: a panel
constexpr long MOST_DIM = 512;  // of a head
constexpr long STRIP = 1024;    // inputs of a panel and of a group that stay in the caches while others pass
constexpr long RESIDENT = 4;    // most rows that need no strips: whole weight rows are read faster than parts of them

constexpr long VERIFIED = 128;  // most rows of a verification

// Up to how many rows these kernels run. In bfloat16 a verification stays in them wherever they are not many times
// slower than torch's products (which need AMX for that): what a row gives does not depend on how many others there
// are, so that its tokens are exactly those of single steps. torch has no products for bfloat16 of its own on x86
// without AVX512_BF16. Otherwise the limit is where torch becomes faster, as measured with AVX2 and with AVX-512.
template <class T> constexpr long most_rows() {
#if defined(__x86_64__) && !defined(__AVX512BF16__)
    if (sizeof(T) == 2) return std::numeric_limits<long>::max();
#elif !defined(__AMX_BF16__)
    if (sizeof(T) == 2) return VERIFIED;
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
    return ROWS;
#else
    return 16;
#endif
}

// The same of attention, whose kernel is the faster one up to some four rows.
template <class T> constexpr long most_attending() { return std::min(VERIFIED, most_rows<T>()); }

// Weight rows of a tile, beside whose sums there is room for a vector of each, one of a row, and a mask for two parts.
template <class T> constexpr int columns(int rows) {
    return std::min(4, (REGISTERS + 1 - std::max(2, 1 + ProductLanes<T>::parts)) / (rows + 1));
}

// Keeps compilers from reading a row anew for each weight, for reading is what the loop would wait for.
template <class Part> inline void hold(Part& part) {
#if defined(__x86_64__) && !defined(__AVX512F__)
    asm("" : "+x"(part));
#else
    (void)part;
#endif
}

template <int N> inline float sum(typename Vector<N>::Floats vector) {
    typename Vector<N / 2>::Floats halves[2];
    std::memcpy(halves, &vector, sizeof(vector));
    return sum<N / 2>(halves[0] + halves[1]);
}
template <> inline float sum<4>(Vector<4>::Floats vector) { return (vector[0] + vector[2]) + (vector[1] + vector[3]); }

// Adds to R x C vectors of sums the products of some blocks of R rows, which stand side by side, and C weight rows.
template <int R, int C, class T>
inline void add_blocks(Floats (*total)[C], const Block<T>* rows, const T* weights, long stride, long count) {
    using L = ProductLanes<T>;
    for (long block = 0; block < count; block++) {
        const T* from = weights + block * L::width;
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) __builtin_prefetch(from + (c + C) * stride);  // of the next tile
#pragma GCC unroll 2
        for (int p = 0; p < L::parts; p++) {
            typename L::Part weight[C];
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) weight[c] = L::part(from + c * stride, p);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                auto row = rows[block * R + r].parts[p];
                hold(row);
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) total[r][c] = L::add(total[r][c], row, weight[c]);
            }
        }
    }
}

// Blocks that a row of k inputs takes.
template <class T> constexpr long blocks_of(long k) {
    return (k + ProductLanes<T>::width - 1) / ProductLanes<T>::width;
}

// At most ROWS rows, laid out by groups of at most GROUP, times one panel of weights after the other. What comes out is
// written, or added to a stream of rows where there is one.
template <class T> struct Product {
    using L = ProductLanes<T>;
    static constexpr long strip = STRIP / L::width;
    const T *weights, *bias;
    T *out, *stream;
    long count, k, n;
    Block<T>* rows;  // count * blocks
    long blocks = blocks_of<T>(k);

    long group_rows(long group) const { return std::min(GROUP, count - group); }

    void lay_out(const T* from, long row) const {
        const long group = row / GROUP * GROUP, stride = group_rows(group);
        Block<T>* to = rows + group * blocks + row - group;
        for (long block = 0; block < blocks; block++, to += stride) {
            T last[L::width] = {};
            const T* values = from + block * L::width;
            if (k < (block + 1) * L::width) values = std::copy(values, from + k, last) - (k - block * L::width);
            for (int p = 0; p < L::parts; p++) to->parts[p] = L::part(values, p);
        }
    }

    // Adds the sums over some blocks, strip by strip, to what the strips before gave.
    template <int R, int C> void tile(long group, long column, long first, long last, float* sums, long stride) const {
        const Block<T>* group_rows = rows + group * blocks;
        const T* from = weights + column * k;
        for (long start = first; start < last; start += strip) {
            const long end = std::min(last, start + strip), whole = std::min(end, k / L::width);
            Floats total[R][C] = {};
            add_blocks<R, C, T>(total, group_rows + start * R, from + start * L::width, k, whole - start);
            if (whole < end) {
                T rest[2 * C][L::width] = {};
                for (int c = 0; c < C; c++) std::copy(from + c * k + whole * L::width, from + (c + 1) * k, rest[c]);
                add_blocks<R, C, T>(total, group_rows + whole * R, rest[0], L::width, 1);
            }
            for (int r = 0; r < R; r++)
                for (int c = 0; c < C; c++) sums[r * stride + c] += sum<LANES>(total[r][c]);
        }
    }
    template <int R> void band(long group, long from, long to, long first, long last, float* sums) const {
        constexpr int C = columns<T>(R);
        long column = from;
        for (; column + C <= to; column += C) tile<R, C>(group, column, first, last, sums + column - from, to - from);
        for (; column < to; column++) tile<R, 1>(group, column, first, last, sums + column - from, to - from);
    }
    void panel(long from, long to) const {
        float sums[ROWS * COLUMNS] = {};
        const long step = count > RESIDENT ? strip : blocks;
        for (long first = 0; first < blocks; first += step)
            for (long group = 0; group < count; group += GROUP) {
                const long last = std::min(blocks, first + step);
                float* to_sums = sums + group * (to - from);
                switch (group_rows(group)) {
                    case 1: band<1>(group, from, to, first, last, to_sums); break;
                    case 2: band<2>(group, from, to, first, last, to_sums); break;
                    case 3: band<3>(group, from, to, first, last, to_sums); break;
                    case 4: band<4>(group, from, to, first, last, to_sums); break;
                    case 5: band<5>(group, from, to, first, last, to_sums); break;
                    default: band<6>(group, from, to, first, last, to_sums);
                }
            }
        const float* sum = sums;
        for (long row = 0; row < count; row++)
            for (long column = from; column < to; column++) {
                const T value = down<T>(*sum++ + (bias ? up(bias[column]) : 0.0f));
                if (stream)
                    stream[row * n + column] = down<T>(up(stream[row * n + column]) + up(value));
                else
                    out[row * n + column] = value;
            }
    }
};

// Columns of a panel: few enough for every thread to get some.
inline long panel_width(long n, int threads) { return std::min(COLUMNS, ((n + threads - 1) / threads + 11) / 12 * 12); }

// out[row][j] = sum over i of rows[row][i] * weights[j][i], plus bias[j]
template <class T>
void product(const T* weights, const T* bias, const T* rows, T* out, long count, long k, long n, int threads) {
    if (n * k * long(sizeof(T)) < (1 << 20)) threads = 1;  // waking a thread takes longer
    const long width = panel_width(n, threads);
    const std::unique_ptr<Block<T>[]> laid{new Block<T>[std::min(ROWS, count) * blocks_of<T>(k)]};
    for (long start = 0; start < count; start += ROWS) {
        const Product<T> task{weights, bias, out + start * n, nullptr, std::min(ROWS, count - start), k, n, laid.get()};
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
#pragma omp for
            for (long row = 0; row < task.count; row++) task.lay_out(rows + (start + row) * k, row);
#pragma omp for schedule(dynamic)
            for (long from = 0; from < n; from += width) task.panel(from, std::min(n, from + width));
        }
    }
}

// Does something for every row, in several threads where it is enough to wake them.
template <class Run> void each_row(long count, long width, int threads, const Run& run) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && count * width >= (1 << 16))
    for (long row = 0; row < count; row++) run(row);
}

// Not inlined: the order of its sum is the compiler's choice, and has to be the same wherever it is called from.
template <class T> __attribute__((noinline)) void norm(const T* from, const T* weight, float epsilon, T* to, long k) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (long i = 0; i < k; i++) squares += up(from[i]) * up(from[i]);
    const float scale = 1.0f / std::sqrt(squares / k + epsilon);
    for (long i = 0; i < k; i++) to[i] = down<T>(up(weight[i]) * rounded<T>(up(from[i]) * scale));
}

template <class T> void turn(T* head, const T* cosine, const T* sine, long dim) {
    const long half = dim / 2;
    for (long i = 0; i < half; i++) {
        const float a = up(head[i]), b = up(head[i + half]);
        head[i] = down<T>(rounded<T>(a * up(cosine[i])) + rounded<T>(b * up(sine[i])));
        head[i + half] = down<T>(rounded<T>(b * up(cosine[i + half])) + rounded<T>(a * up(sine[i + half])));
    }
}

struct Projection {
    const void *norm, *weights, *bias;
    float epsilon;
    int threads;
    long hidden, heads, key_heads, head_dim;
};

// Norm, queries, keys and values, rope in place, keys and values into the cache [2, key_heads, capacity, head_dim].
template <class T>
void project(const Projection& p, const T* states, const T* cosine, const T* sine, long turned, T* out, T* cache,
             long capacity, long start, long count) {
    const long all = p.heads + 2 * p.key_heads, dim = p.head_dim;
    std::vector<T> normed(count * p.hidden);
    each_row(count, p.hidden, p.threads, [&](long row) {
        norm<T>(states + row * p.hidden, static_cast<const T*>(p.norm), p.epsilon, &normed[row * p.hidden], p.hidden);
    });
    product<T>(static_cast<const T*>(p.weights), static_cast<const T*>(p.bias), normed.data(), out, count, p.hidden,
               all * dim, p.threads);
    each_row(count, all * dim, p.threads, [&](long row) {
        T* heads = out + row * all * dim;
        if (turned)
            for (long head = 0; head < p.heads + p.key_heads; head++)
                turn<T>(heads + head * dim, cosine + row * turned, sine + row * turned, turned);
        for (long head = 0; head < 2 * p.key_heads; head++)
            std::memcpy(cache + (head * capacity + start + row) * dim, heads + (p.heads + head) * dim,
                        dim * sizeof(T));
    });
}

// Rows of all heads' queries, [rows, all, dim], that attend to some slots of the cache; out is [rows, heads * dim].
template <class T> struct Attention {
    using L = Lanes<T>;
    using P = ProductLanes<T>;
    const Projection& p;
    const T *queries, *keys, *values;  // from the first slot of the first head on
    long capacity, slots;
    const bool* visible;  // [rows, slots]
    float scale;
    T* out;
    long dim = p.head_dim, group = p.heads / p.key_heads;
    long stride = slots;  // of the scores of a query

    // The queries of a key head stand behind one another; R of them at a time read its keys and values once.
    template <int R> void run(long head, long query, float* scores) const {
        score<R>(head, query, scores);
        for (int r = 0; r < R; r++)
            soften(scores + r * stride, visible ? visible + (query + r) / group * slots : nullptr);
        float whole[R] = {};
        for (long slot = 0; slot < slots; slot++)
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) whole[r] += scores[r * stride + slot];
        const T* from = values + head * capacity * dim;
        constexpr int PARTS = std::min(8 / R, 64 / LANES);  // of the outputs, as many as there are registers for
        for (long start = 0; start < dim; start += PARTS * LANES) {
            Floats total[R][PARTS] = {};
            for (long slot = 0; slot < slots; slot++) {
                const T* value = from + slot * dim + start;
#pragma GCC unroll 8
                for (int i = 0; i < PARTS; i++) {
                    const Floats part = L::part(value + i / L::parts * L::width, i % L::parts);
#pragma GCC unroll 8
                    for (int r = 0; r < R; r++)
                        total[r][i] = L::add(total[r][i], Floats{} + scores[r * stride + slot], part);
                }
            }
            for (int r = 0; r < R; r++) {
                T* to = out + ((query + r) / group * p.heads + head * group + (query + r) % group) * dim + start;
                for (int i = 0; i < PARTS * LANES; i++) {
                    const int part = i / L::width * L::parts + i % L::parts;
                    to[i] = down<T>(total[r][part][i % L::width / L::parts] / whole[r]);
                }
            }
        }
    }
    template <int R> void score(long head, long query, float* scores) const {
        const long blocks = dim / P::width;
        Block<T> laid[R * MOST_DIM / P::width];
        for (int r = 0; r < R; r++) {
            const T* from = queries + ((query + r) / group * (p.heads + 2 * p.key_heads) + head * group) * dim;
            from += (query + r) % group * dim;
            for (long block = 0; block < blocks; block++)
                for (int part = 0; part < P::parts; part++)
                    laid[block * R + r].parts[part] = P::part(from + block * P::width, part);
        }
        const T* from = keys + head * capacity * dim;
        constexpr int C = columns<T>(R);
        long slot = 0;
        for (; slot + C <= slots; slot += C) score_slots<R, C>(laid, from, slot, scores);
        for (; slot < slots; slot++) score_slots<R, 1>(laid, from, slot, scores);
    }
    template <int R, int C> void score_slots(const Block<T>* laid, const T* from, long slot, float* scores) const {
        Floats total[R][C] = {};
        add_blocks<R, C, T>(total, laid, from + slot * dim, dim, dim / P::width);
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) scores[r * stride + slot + c] = scale * sum<LANES>(total[r][c]);
    }
    // The four queries, or as many as there are, from one of a key head's on.
    void run_four(long head, long query, long all, float* scores) const {
        switch (all - query) {
            case 1: run<1>(head, query, scores); break;
            case 2: run<2>(head, query, scores); break;
            case 3:
                run<2>(head, query, scores);
                run<1>(head, query + 2, scores);
                break;
            default: run<4>(head, query, scores);
        }
    }
    // Scores of a query to what they are logarithms of, 0 for slots that it does not see. Sums then run over slots one
    // by one, where zeros change nothing: they are the same wherever between the others a slot that is not seen stands.
    void soften(float* scores, const bool* seen) const {
        float highest = std::numeric_limits<float>::lowest();
        for (long slot = 0; slot < slots; slot++)
            highest = !seen || seen[slot] ? std::max(highest, scores[slot]) : highest;
#pragma omp simd
        for (long slot = 0; slot < slots; slot++) scores[slot] = exponential(scores[slot] - highest);
        if (seen)
#pragma omp simd
            for (long slot = 0; slot < slots; slot++) scores[slot] *= float(seen[slot]);
    }
};

template <class T>
void attend(const Projection& p, const T* queries, const T* cache, long capacity, long first, long slots,
            const bool* visible, float scale, T* out, long count) {
    const T *keys = cache + first * p.head_dim, *values = keys + p.key_heads * capacity * p.head_dim;
    const Attention<T> task{p, queries, keys, values, capacity, slots, visible, scale, out};
    const long all = count * task.group;
#pragma omp parallel num_threads(p.threads) if (p.threads > 1 && all * p.key_heads * slots * task.dim >= (1 << 17))
    {
        std::vector<float> scores(4 * task.stride);
#pragma omp for collapse(2)
        for (long head = 0; head < p.key_heads; head++)
            for (long query = 0; query < all; query += 4) task.run_four(head, query, all, scores.data());
    }
}

struct Mlp {
    const void *norm, *gate_up, *gate_up_bias, *down, *down_bias;
    float epsilon;
    int threads;
    long hidden, inner;
};

template <class T> void activate(const T* gate, const T* other, T* to, long count) {
#pragma omp simd
    for (long i = 0; i < count; i++) {
        const float value = up(gate[i]);
        to[i] = down<T>(rounded<T>(value / (1.0f + exponential(-value))) * up(other[i]));
    }
}

// Norm, gate and up, silu(gate) * up, down; ROWS rows at a time, so that what is between stays in the cache.
template <class T> void mlp(const Mlp& p, const T* states, T* out, long count) {
    const long most = std::min(count, ROWS);
    std::vector<T> normed(most * p.hidden), both(most * 2 * p.inner), inner(most * p.inner);
    for (long start = 0; start < count; start += ROWS) {
        const long some = std::min(ROWS, count - start);
        const T* from = states + start * p.hidden;
        each_row(some, p.hidden, p.threads, [&](long row) {
            norm<T>(from + row * p.hidden, static_cast<const T*>(p.norm), p.epsilon, &normed[row * p.hidden], p.hidden);
        });
        product<T>(static_cast<const T*>(p.gate_up), static_cast<const T*>(p.gate_up_bias), normed.data(), both.data(),
                   some, p.hidden, 2 * p.inner, p.threads);
        each_row(some, 2 * p.inner, p.threads, [&](long row) {
            const T* gate = &both[row * 2 * p.inner];
            activate<T>(gate, gate + p.inner, &inner[row * p.inner], p.inner);
        });
        product<T>(static_cast<const T*>(p.down), static_cast<const T*>(p.down_bias), inner.data(),
                   out + start * p.hidden, some, p.inner, p.hidden, p.threads);
    }
}

#include "forward.h"

}  // namespace

#define EXPORT(T, SUFFIX)                                                                                              \
    extern "C" void project_##SUFFIX(const Projection* p, const T* states, const T* cosine, const T* sine,             \
                                     long turned, T* out, T* cache, long capacity, long start, long count) {           \
        project<T>(*p, states, cosine, sine, turned, out, cache, capacity, start, count);                              \
    }                                                                                                                  \
    extern "C" void attend_##SUFFIX(const Projection* p, const T* queries, const T* cache, long capacity, long first,  \
                                    long slots, const bool* visible, float scale, T* out, long count) {                \
        attend<T>(*p, queries, cache, capacity, first, slots, visible, scale, out, count);                             \
    }                                                                                                                  \
    extern "C" void mlp_##SUFFIX(const Mlp* p, const T* states, T* out, long count) { mlp<T>(*p, states, out, count); }\
    extern "C" void product_##SUFFIX(const T* weights, const T* bias, const T* rows, T* out, long count, long k,       \
                                     long n, int threads) {                                                            \
        product<T>(weights, bias, rows, out, count, k, n, threads);                                                    \
    }                                                                                                                  \
    extern "C" void forward_##SUFFIX(const Forward* f, T* stream, long rows) { Team<T>(*f, stream, rows).run(); }      \
    extern "C" long most_rows_##SUFFIX() { return most_rows<T>(); }                                                    \
    extern "C" long most_attending_##SUFFIX() { return most_attending<T>(); }

EXPORT(float, float32)
EXPORT(bf16, bfloat16)
