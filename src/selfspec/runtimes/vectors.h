// Numbers and vectors: bfloat16, the processor's vectors, and how a dtype is multiplied with them.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>
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

template <class T> inline float rounded(float value) { return up(down<T>(value)); }

// The exponential of numbers up to 88 by Cephes' polynomial, which compilers turn into vector code; the error is at most
// two units in the last place.
inline float exponential_below(float x) {
    x = -87.0f > x ? -87.0f : x;
    const float n = std::nearbyint(x * 1.44269504f);
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * r + 1.3981999507e-3f;
    sum = sum * r + 8.3334519073e-3f;
    sum = sum * r + 4.1665795894e-2f;
    sum = sum * r + 1.6666665459e-1f;
    sum = sum * r + 5.0000001201e-1f;
    const uint32_t bits = uint32_t(int32_t(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return (sum * r * r + r + 1.0f) * power;
}

inline float exponential(float x) { return exponential_below(88.0f < x ? 88.0f : x); }

// The hyperbolic tangent, by Cephes' polynomial where the exponential would cancel.
inline float hyperbolic_tangent(float x) {
    const float size = std::fabs(x), square = x * x;
    const float large = 1.0f - 2.0f / (exponential(2.0f * size) + 1.0f);
    float sum = -5.70498872745e-3f;
    sum = sum * square + 2.06390887954e-2f;
    sum = sum * square - 5.37397155531e-2f;
    sum = sum * square + 1.33314422036e-1f;
    sum = sum * square - 3.33332819422e-1f;
    const float small = size + size * square * sum;
    return std::copysign(size < 0.625f ? small : large, x);
}

// Vectors as wide as the processor's, and the number of its vector registers.
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
    typedef int32_t Ints __attribute__((vector_size(4 * N)));
    typedef int16_t Shorts __attribute__((vector_size(4 * N)));
    typedef uint16_t Halves __attribute__((vector_size(4 * N)));
};
using Floats = Vector<LANES>::Floats;
using Words = Vector<LANES>::Words;

inline Vector<LANES>::Ints spread(int32_t value) { return value - Vector<LANES>::Ints{}; }
inline Floats spread(float value) { return value - Floats{}; }  // minus zero is dropped by compilers, plus zero is not

template <class To> inline To load(const void* from) {
    To to;
    std::memcpy(&to, from, sizeof(To));
    return to;
}

// Written out, because a compiler that may choose where to fuse a multiplication with an addition does not choose the
// same in every tile.
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
    static void store(float* block, const Part* parts) { std::memcpy(block, parts, sizeof(Part)); }
};
// Widened in registers: the even elements of a block are one part, the odd ones the other.
template <> struct Lanes<bf16> {
    using Part = Floats;
    static constexpr int width = 2 * LANES, parts = 2;
    static Part part(const bf16* block, int index) {
        const Words pairs = load<Words>(block);
        return (Floats)(index ? pairs & 0xffff0000u : pairs << 16);
    }
    static Floats add(Floats total, Part a, Part b) { return multiply_add(total, a, b); }
    static void store(bf16* block, const Part* parts) {
        const Words pairs = down_high(parts[0]) >> 16 | (down_high(parts[1]) & 0xffff0000u);
        std::memcpy(block, &pairs, sizeof(pairs));
    }
    // ``down`` of each number, in the upper half of its word.
    static Words down_high(Floats values) {
        const Words bits = (Words)values, rounded = bits + 0x7fff + (bits >> 16 & 1);
        return values == values ? rounded : Words{} + 0x7fc00000;
    }
};
// The same for dot products, for which some processors have instructions.
template <class T> struct ProductLanes : Lanes<T> {};
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
template <> struct ProductLanes<bf16> {
    using Part = __m512bh;
    static constexpr int width = 2 * LANES, parts = 1;
    static Part part(const bf16* block, int) { return load<__m512bh>(block); }
    static Floats add(Floats total, Part a, Part b) { return _mm512_dpbf16_ps(total, a, b); }
};
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
template <> struct ProductLanes<bf16> {
    using Part = bfloat16x8_t;
    static constexpr int width = 2 * LANES, parts = 1;
    static Part part(const bf16* block, int) { return load<bfloat16x8_t>(block); }
    static Floats add(Floats total, Part a, Part b) { return (Floats)vbfdotq_f32((float32x4_t)total, a, b); }
};
#endif

// How weighted values of slots are added up: ``slots`` of them at a time.
template <class T> struct ValueLanes {
    static constexpr int slots = 1;
    static void lay_out(float*, long) {}
    static const float* weights(const float* laid, long slot) { return laid + slot; }
    static Floats part(const T* row, const T*, int index) { return Lanes<T>::part(row, index); }
    static Floats add(Floats total, const float* weight, Floats part) { return multiply_add(total, spread(*weight), part); }
};
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
// The weights are rounded. The instruction adds the product of the upper halves of words, rounds, and adds that of the lower
// ones. So the upper ones are of the first slot of a pair, and both give the bits that one after the other would.
template <> struct ValueLanes<bf16> {
    static constexpr int slots = 2;
    // Rounds weights and packs them in place.
    static void lay_out(float* weights, long count) {
        long i = 0;
        for (; i + 2 * LANES <= count; i += 2 * LANES) {
            const __m512bh packed = _mm512_cvtne2ps_pbh(load<Floats>(weights + i + LANES), load<Floats>(weights + i));
            const Words pairs = (Words)_mm512_rol_epi32((__m512i)packed, 16);
            std::memcpy(weights + i / 2, &pairs, sizeof(pairs));
        }
        for (; i < count; i += 2) {
            const uint32_t one = down<bf16>(weights[i]).bits, other = i + 1 < count ? down<bf16>(weights[i + 1]).bits : 0;
            const uint32_t pair = one << 16 | other;
            std::memcpy(weights + i / 2, &pair, sizeof(pair));
        }
    }
    static const float* weights(const float* laid, long slot) { return laid + slot / 2; }
    static Words part(const bf16* row, const bf16* next, int index) {
        const Words one = load<Words>(row), other = load<Words>(next);
        return index ? (one & 0xffff0000u) | other >> 16 : one << 16 | (other & 0xffffu);
    }
    static Floats add(Floats total, const float* weights, Words parts) {
        return _mm512_dpbf16_ps(total, (__m512bh)spread(load<int32_t>(weights)), (__m512bh)parts);
    }
};
#endif

// A block of inputs of one row, ready to be multiplied.
template <class T> struct Block {
    typename ProductLanes<T>::Part parts[ProductLanes<T>::parts];
};

// The number of blocks of a row of k inputs.
template <class T> constexpr long blocks_of(long k) {
    return (k + ProductLanes<T>::width - 1) / ProductLanes<T>::width;
}

// Weight rows of a tile of ``rows`` rows. Its sums, a vector of each weight row, one of a row and a mask for two parts
// fit the registers together.
template <class T> constexpr int columns(int rows) {
    return std::min(4, (REGISTERS + 1 - std::max(2, 1 + ProductLanes<T>::parts)) / (rows + 1));
}

// Keeps a vector in its register at this place of the program. Without this, compilers load that of a row again for each
// weight row, and add sums in another order.
template <class V> inline void hold(V& vector) {
#if defined(__x86_64__) && !defined(__AVX512F__)
    asm("" : "+x"(vector));
#else
    (void)vector;
#endif
}

// Keeps values in memory up to this place of the program, so that each use loads its own.
template <class V> inline void hold_in_memory(V& values) { asm("" : "+m"(values)); }

template <int N> inline float sum(typename Vector<N>::Floats vector) {
    typename Vector<N / 2>::Floats halves[2];
    std::memcpy(halves, &vector, sizeof(vector));
    return sum<N / 2>(halves[0] + halves[1]);
}
template <> inline float sum<4>(Vector<4>::Floats vector) { return (vector[0] + vector[2]) + (vector[1] + vector[3]); }

// Lanes of two vectors, those of the second counted from LANES on.
template <int... LANE> inline Floats shuffle(Floats a, Floats b) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, LANE...);
#else
    return __builtin_shuffle(a, b, Vector<LANES>::Ints{LANE...});
#endif
}
// Adds the halves of each part of two vectors, which have LANES / PART parts each. The result has the parts of the first
// vector before those of the second.
template <int PART, int... LANE> inline Floats add_halves(Floats a, Floats b, std::integer_sequence<int, LANE...>) {
    constexpr auto low = [](int lane) { return 2 * lane - lane % (PART / 2); };
    return shuffle<low(LANE)...>(a, b) + shuffle<low(LANE) + PART / 2 ...>(a, b);
}
// The sums of COUNT vectors, at most LANES, each with the additions of ``sum``. The vectors are overwritten.
template <int COUNT, int PART = LANES> inline Floats sum_each(Floats* vectors) {
    if constexpr (PART == 1) {
        return vectors[0];
    } else {
        constexpr auto lanes = std::make_integer_sequence<int, LANES>();
#pragma GCC unroll 8
        for (int i = 0; i < COUNT; i += 2)
            vectors[i / 2] = add_halves<PART>(vectors[i], vectors[std::min(i + 1, COUNT - 1)], lanes);
        return sum_each<(COUNT + 1) / 2, PART / 2>(vectors);
    }
}

// How weights are read in products of one row, of two or three, and of more. All ways give the same bits; which is
// fastest depends on the processor, so a trial sets them (reading.py).
struct Ways {
    static constexpr int KINDS = 3;
    std::atomic<int> each[KINDS];

    int of(long rows) const { return each[rows == 1 ? 0 : rows <= 3 ? 1 : 2].load(std::memory_order_relaxed); }
};

// Bytes that weight rows read in sequence are fetched ahead. On Zen 5 half is as fast for one row and slower for more; a
// quarter, and two and four times as much, are slower.
constexpr long AHEAD = 8192;
constexpr long LINE = 64;      // bytes that are fetched at a time

// Where memory is fetched ahead of its use: from an address on, some bytes for each block that is multiplied.
struct Ahead {
    const char* from;
    long step;
    // What is fetched while a block of C weight rows is multiplied, if each has one line for it. A core waits for few lines
    // of its first cache at a time, too few for memory's speed, so into the second one. PAST the outer caches: weights of a
    // part of the model then stay there from one step to the next, where reading all of them in turn would replace each
    // before it is read again. Some processors are much slower that way, so it is chosen by a trial.
    template <int C, bool PAST> void fetch(long block) const {
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) __builtin_prefetch(from + block * step + c * LINE, 0, PAST ? 0 : 2);
    }
};

// Adds the products of R rows and C weight rows, over some blocks, to R x C vectors of sums. The blocks of the R rows
// are interleaved.
template <int R, int C, class T, bool PAST = false>
inline void add_blocks(Floats (*total)[C], const Block<T>* rows, const T* weights, long stride, long count,
                       const Ahead& ahead) {
    using L = ProductLanes<T>;
    for (long block = 0; block < count; block++) {
        const T* from = weights + block * L::width;
        ahead.fetch<C, PAST>(block);
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

}  // namespace
