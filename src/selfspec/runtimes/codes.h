// How the integers of weights of few bits are stored, and how vectors of them are read.
//
// 16 weight rows stand side by side, a tile; its inputs are read in blocks of 32. What is stored are codes, integers
// without a sign. The codes of a block are bytes in eight groups of four inputs, [group][weight row][input], of which the
// low four bits, the next two and the last one are stored apart, each packed in words of four bytes: a word has the codes of
// four inputs of a weight row, so that a shift and a mask give those of a group.

#pragma once

#include "vectors.h"

namespace {

constexpr long BLOCK = 32;  // inputs of a block
constexpr long TILE = 16;   // weight rows side by side
constexpr int GROUPS = 8;   // of four inputs in a block

// Vectors of weight rows that are multiplied together, and their weight rows: with AVX2 all of a tile, so that an input is
// loaded once for them.
constexpr int SIDES = LANES == 8 ? 2 : 1, JOINT = SIDES * LANES;

using Ints = Vector<LANES>::Ints;
using Shorts = Vector<LANES>::Shorts;

// Shifts words to the left, or by a negative number of bits to the right.
template <class V> inline V shifted(V words, int bits) { return bits < 0 ? words >> -bits : words << bits; }

template <int BITS> struct Codes {
    static constexpr long bytes = TILE * BLOCK * BITS / 8;
    static constexpr int part(int bits) { return BITS < 8 ? BITS & bits : 0; }
    static constexpr bool divided = BITS & (BITS - 1);  // into parts
    static constexpr long plane = TILE * BLOCK / 8;  // bytes of one bit of all codes
    static constexpr long pairs_at = part(4) * plane, single_at = (part(4) + part(2)) * plane;

    // The codes of a group of a block for LANES weight rows from ``first`` on.
    static Words read(const uint8_t* from, int first, int group) {
        const auto vector = [&](long at) { return load<Words>(from + at + 4 * first); };
        if (BITS == 8) return vector(64 * group);
        Words codes = {};
        if (part(4)) codes = vector(64 * (group % 4)) >> group / 4 * 4 & 0x0f0f0f0fu;
        if (part(2)) codes |= shifted(vector(pairs_at + 64 * (group / 4)), part(4) - group % 4 * 2) & 0x03030303u << part(4);
        if (part(1)) codes |= shifted(vector(single_at), BITS - 1 - group) & 0x01010101u << (BITS - 1);
        return codes;
    }

    // Stores the codes of a block, words by group and weight row.
    static void write(const uint32_t (*words)[TILE], uint8_t* to) {
        for (long first = 0; first < TILE; first += LANES) {
            const auto word = [&](int group) { return load<Words>(words[group] + first); };
            const auto store = [&](long at, Words vector) { std::memcpy(to + at + 4 * first, &vector, sizeof(Words)); };
            if (BITS == 8)
                for (int group = 0; group < GROUPS; group++) store(64 * group, word(group));
            if (part(4))
                for (int group = 0; group < 4; group++)
                    store(64 * group, (word(group) & 0x0f0f0f0fu) | (word(group + 4) & 0x0f0f0f0fu) << 4);
            if (part(2))
                for (int half = 0; half < 2; half++) {
                    Words four = {};
                    for (int i = 0; i < 4; i++)
                        four |= (word(4 * half + i) >> part(4) & 0x03030303u) << 2 * i;
                    store(pairs_at + 64 * half, four);
                }
            if (part(1)) {
                Words eight = {};
                for (int group = 0; group < GROUPS; group++)
                    eight |= (word(group) >> (BITS - 1) & 0x01010101u) << group;
                store(single_at, eight);
            }
        }
    }

    // One code.
    static int one(const uint8_t* from, int row, int input) {
        const int group = input / 4;
        const uint8_t* own = from + 4 * row + input % 4;
        if (BITS == 8) return own[64 * group];
        int code = 0;
        if (part(4)) code = own[64 * (group % 4)] >> group / 4 * 4 & 15;
        if (part(2)) code |= (own[pairs_at + 64 * (group / 4)] >> group % 4 * 2 & 3) << part(4);
        if (part(1)) code |= (own[single_at] >> group & 1) << (BITS - 1);
        return code;
    }
};

// Numbers as floats, LANES of them.
inline Floats widen(const float* from) { return load<Floats>(from); }
inline Floats widen(const bf16* from) {
    return (Floats)(__builtin_convertvector(load<Vector<LANES / 2>::Halves>(from), Words) << 16);
}
struct f16 {
    uint16_t bits;
};
inline Floats widen(const f16* from) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(load<__m128i>(from));
#else
    const Words words = __builtin_convertvector(load<Vector<LANES / 2>::Halves>(from), Words);
    // The exponent gets its place by a multiplication, which is exact for small numbers that are not normal, too.
    const Floats size = (Floats)((words & 0x7fff) << 13) * 0x1p112f;
    return (Floats)((Words)size | (words & 0x8000) << 16);
#endif
}
// Bytes as floats, LANES of them. Compilers take them apart one by one where they are not told the instruction.
inline Floats widen(const uint8_t* from) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load<__m128i>(from)));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
    typedef uint8_t Bytes __attribute__((vector_size(LANES)));
    return __builtin_convertvector((Ints)__builtin_convertvector(load<Bytes>(from), Words), Floats);
#endif
}
inline Floats widen(const int8_t* from) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from)));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
    typedef int8_t Bytes __attribute__((vector_size(LANES)));
    return __builtin_convertvector(__builtin_convertvector(load<Bytes>(from), Ints), Floats);
#endif
}

// The nearest integers, of which those between two are even.
inline Ints nearest(Floats values) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtps_epi32(values);
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtps_epi32(values);
#elif defined(__x86_64__)
    return (Ints)_mm_cvtps_epi32((__m128)values);
#elif defined(__aarch64__)
    return (Ints)vcvtnq_s32_f32((float32x4_t)values);
#else
    Ints integers;
    for (int i = 0; i < LANES; i++) integers[i] = int32_t(std::nearbyint(values[i]));
    return integers;
#endif
}
// Writes integers that fit 16 bits, or bytes.
inline void narrow(Ints integers, int16_t* to) {
    typedef int16_t Narrow __attribute__((vector_size(2 * LANES)));
    const Narrow narrowed = __builtin_convertvector(integers, Narrow);
    std::memcpy(to, &narrowed, sizeof(Narrow));
}
inline void narrow(Ints integers, int8_t* to) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)integers));
#elif defined(__x86_64__)
    int16_t words[8] = {};
    narrow(integers, words);
    const __m128i bytes = load<__m128i>(words), narrowed = _mm_packs_epi16(bytes, bytes);
    std::memcpy(to, &narrowed, LANES);
#else
    for (int i = 0; i < LANES; i++) to[i] = int8_t(integers[i]);
#endif
}
inline Vector<4>::Ints swapped(Vector<4>::Ints vector, Vector<4>::Ints places) {
#if defined(__clang__)
    return Vector<4>::Ints{vector[places[0]], vector[places[1]], vector[places[2]], vector[places[3]]};
#else
    return __builtin_shuffle(vector, places);
#endif
}
// All integers in one by a function of two, with that of vectors of them.
template <int N, class Function> inline int32_t reduce(typename Vector<N>::Ints vector, const Function& function) {
    if constexpr (N == 4) {
        using Four = Vector<4>::Ints;
        vector = function(vector, swapped(vector, Four{2, 3, 0, 1}));
        return function(vector, swapped(vector, Four{1, 0, 3, 2}))[0];
    } else {
        typename Vector<N / 2>::Ints halves[2];
        std::memcpy(halves, &vector, sizeof(vector));
        return reduce<N / 2>(function(halves[0], halves[1]), function);
    }
}

}  // namespace
