// Products of integers as processors have them: of bytes, of pairs of bytes, of pairs of 16 bits; and look-ups of bytes.

#pragma once

#include "row_blocks.h"

namespace {

#if defined(MULTIPLIES_BYTES)
// Adds the products of four inputs and the codes for them of each weight row. Codes have no sign, or one on Arm.
inline Ints add_bytes(Ints total, Words codes, int32_t inputs) {
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)codes, _mm512_set1_epi32(inputs));
#elif defined(__AVXVNNI__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)codes, _mm256_set1_epi32(inputs));
#else
    return (Ints)vdotq_s32((int32x4_t)total, (int8x16_t)codes, (int8x16_t)vdupq_n_s32(inputs));
#endif
}
#elif defined(MULTIPLIES_BYTE_PAIRS)
// The products of bytes without a sign and bytes with one, added in pairs, which have to fit 16 bits.
inline Shorts multiply_byte_pairs(Words codes, Words inputs) {
#if defined(__AVX512BW__)
    return (Shorts)_mm512_maddubs_epi16((__m512i)codes, (__m512i)inputs);
#else
    return (Shorts)_mm256_maddubs_epi16((__m256i)codes, (__m256i)inputs);
#endif
}
// Bytes times the signs of codes.
inline Words multiply_signs(Words inputs, Words codes) {
#if defined(__AVX512BW__)
    const __mmask64 negative = _mm512_movepi8_mask((__m512i)codes);
    return (Words)_mm512_mask_sub_epi8((__m512i)inputs, negative, _mm512_setzero_si512(), (__m512i)inputs);
#else
    return (Words)_mm256_sign_epi8((__m256i)inputs, (__m256i)codes);
#endif
}
// What bytes with a sign are without it.
inline Words magnitudes(Words codes) {
#if defined(__AVX512BW__)
    return (Words)_mm512_abs_epi8((__m512i)codes);
#else
    return (Words)_mm256_abs_epi8((__m256i)codes);
#endif
}
#endif
// Adds the products of pairs of 16-bit integers: those of each lane of ``weights`` with the same pair of inputs.
inline Ints add_pairs(Ints total, Words weights, int32_t inputs) {
#if defined(__AVX512BW__)
    return total + (Ints)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32(inputs));
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
    return total + (Ints)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(inputs));
#elif defined(__x86_64__) && !defined(__AVX512F__)
    return total + (Ints)_mm_madd_epi16((__m128i)weights, _mm_set1_epi32(inputs));
#else
    const Ints pairs = (Ints)weights;
    return total + (pairs << 16 >> 16) * int32_t(int16_t(inputs)) + (pairs >> 16) * (inputs >> 16);
#endif
}

// What codes are looked up in a table of 16 bytes.
inline Words look_up_each(const uint8_t (&table)[16], Words codes) {
#if defined(__AVX512BW__)
    return (Words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(table)), (__m512i)codes);
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
    return (Words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(table)), (__m256i)codes);
#elif defined(__aarch64__)
    return (Words)vqtbl1q_u8(load<uint8x16_t>(table), (uint8x16_t)codes);
#else
    uint8_t places[4 * LANES], values[4 * LANES];
    std::memcpy(places, &codes, sizeof(codes));
    for (int i = 0; i < 4 * LANES; i++) values[i] = table[places[i] & 15];
    return load<Words>(values);
#endif
}

}  // namespace
