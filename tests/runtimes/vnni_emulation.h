// The instruction of AVX-VNNI in those of AVX2, for processors that lack it.

#pragma once

#include <immintrin.h>

#define __AVXVNNI__ 1
#define _mm256_dpbusd_avx_epi32 add_products_of_bytes

inline __m256i add_products_of_bytes(__m256i total, __m256i bytes, __m256i signed_bytes) {
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(bytes, _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(signed_bytes, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(bytes, 8), _mm256_srai_epi16(signed_bytes, 8));
    return _mm256_add_epi32(total, _mm256_add_epi32(even, odd));
}
