// Rows that are multiplied by weights of few bits, as integers.
//
// A block of a row is integers that share a scale. Their number of bits is that of a target's arithmetic: 24
// for float32 rows; 16 for bfloat16 rows, in which the values of a block that are at least 2^-7 of its largest are exact
// and the others are rounded to 2^-15 of it; 8 where activations are asked to be that.

#pragma once

#include "formats.h"

namespace {

#if (defined(__AVX512VNNI__) && defined(__AVX512F__)) || (defined(__AVXVNNI__) && !defined(__AVX512F__)) || \
    defined(__ARM_FEATURE_DOTPROD)
#define MULTIPLIES_BYTES
constexpr bool multiplies_bytes = true, multiplies_short_bytes = true;
#elif defined(__AVX2__) && defined(__FMA__)
#define MULTIPLIES_BYTE_PAIRS
constexpr bool multiplies_bytes = false, multiplies_short_bytes = true;
#else
constexpr bool multiplies_bytes = false, multiplies_short_bytes = false;
#endif
#if defined(MULTIPLIES_BYTES) && !defined(__ARM_FEATURE_DOTPROD)
constexpr bool multiplies_signs = false;  // codes have no sign
#else
constexpr bool multiplies_signs = true;  // those of eight bits have one
#endif

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool matches_rows = true;  // bytes are multiplied as matrices of two rows
#else
constexpr bool matches_rows = false;
#endif

// A block of a row: its values are ``scale`` times integers of 8 * PLANES bits. Planes start where lines of the cache do, or
// amid them.
template <int PLANES> struct alignas(BLOCK) RowBlock {
    static constexpr int VECTORS = BLOCK / LANES;
    static constexpr int PARTS = (PLANES + 1) / 2;  // sums that fit 32 bits: over all planes but a third, and over that
    static constexpr bool has_planes = multiplies_bytes || (multiplies_short_bytes && PLANES == 1);
    int8_t planes[has_planes ? PLANES : 0][BLOCK];      // the highest first
    int16_t pairs[has_planes ? 0 : PARTS][BLOCK];       // the even inputs of each group of four before the odd ones
    int32_t sums[PARTS][3];  // of the integers of each half and of both
    float scale;
    float scaled_sums[2], scaled_sum;  // of the values of each half and of both

    // 2^(exponent - 127)
    static float power(int exponent) {
        const uint32_t bits = uint32_t(exponent) << 23;
        float result;
        std::memcpy(&result, &bits, 4);
        return result;
    }
    // The largest integer: what it is split into has to fit planes with a sign.
    static constexpr float most = PLANES == 1 ? 127 : PLANES == 2 ? 32639 : 8355711;

    template <class T> void set(const T* from) {
        Floats values[VECTORS];
        Ints largest_bits = {};  // of magnitudes, which as integers are in the same order
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; i++) {
            values[i] = widen(from + i * LANES);
            const Ints bits = (Ints)values[i] & 0x7fffffff;
            largest_bits = bits > largest_bits ? bits : largest_bits;
        }
        const int32_t bits = reduce<LANES>(largest_bits, [](auto a, auto b) { return a > b ? a : b; });
        const bool is_number = bits < 0x7f800000;
        float largest, factor;
        std::memcpy(&largest, &bits, 4);
        if (PLANES == 1) {
            largest = std::max(largest, 1e-30f);
            factor = most / largest, scale = largest / most;
        } else {
            int exponent = std::max(bits >> 23, 8 * PLANES);  // largest < 2^(exponent - 126)
            exponent += std::nearbyint(largest * power(252 + 8 * PLANES - exponent)) > most;
            factor = power(252 + 8 * PLANES - exponent), scale = power(exponent + 2 - 8 * PLANES);
        }
        Ints integers[VECTORS];
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; i++) integers[i] = is_number ? nearest(values[i] * factor) : Ints{};
        if (!is_number) scale = std::numeric_limits<float>::quiet_NaN();
        store(integers);
    }
    void store(const Ints (&integers)[VECTORS]) {
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            // The third plane is a part of its own, the others are one.
            Ints own[VECTORS], halves[2] = {};
#pragma GCC unroll 8
            for (int i = 0; i < VECTORS; i++) {
                const Ints high = PLANES == 3 ? (integers[i] + 128) >> 8 : integers[i];
                own[i] = part ? integers[i] - (high << 8) : high;
                halves[2 * i / VECTORS] += own[i];
                if constexpr (has_planes) {
                    const bool is_high = PLANES > 1 && part == 0;
                    const Ints upper = (own[i] + 128) >> 8;
                    if (is_high) narrow(upper, planes[0] + i * LANES);
                    narrow(is_high ? own[i] - (upper << 8) : own[i], planes[is_high ? 1 : PLANES - 1] + i * LANES);
                }
            }
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) sums[part][half] = reduce<LANES>(halves[half], [](auto a, auto b) { return a + b; });
            sums[part][2] = sums[part][0] + sums[part][1];
            if constexpr (!has_planes) {
                int16_t each[BLOCK];
                for (int i = 0; i < VECTORS; i++) narrow(own[i], each + i * LANES);
                for (int i = 0; i < BLOCK; i += 4)
                    for (int input = 0; input < 4; input++) pairs[part][i + input] = each[i + (input % 2 * 2 + input / 2)];
            }
        }
        for (int half = 0; half < 2; half++)
            scaled_sums[half] = joined(float(sums[0][half]), float(sums[PARTS - 1][half])) * scale;
        scaled_sum = scaled_sums[0] + scaled_sums[1];
    }
    // The values that the integers stand for.
    void write(float* to) const {
#pragma omp simd
        for (int i = 0; i < BLOCK; i++) {
            int32_t integer = 0;
            if constexpr (has_planes)
                for (int plane = 0; plane < PLANES; plane++) integer = integer * 256 + planes[plane][i];
            else
                for (int part = 0; part < PARTS; part++)
                    integer = integer * 256 + pairs[part][i - i % 4 + (i % 2 * 2 + i % 4 / 2)];
            to[i] = float(integer) * scale;
        }
    }
    // What the sums of both parts are together.
    template <class V> static V joined(V high, V low) { return PARTS == 1 ? high : high * 256.0f + low; }
};

}  // namespace
