// The tiles of AMX that a thread uses, and their shapes; words in and out of their order.

#pragma once

#include <algorithm>
#include <cstring>

#include "tile_instructions.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(HAS_TILES)

constexpr long TILE_ROWS = 16;  // most rows of a tile, each of up to 64 bytes

// Of some rows, how many are in the first or the second tile.
inline long part(long rows, int index) { return std::min(TILE_ROWS, std::max(0L, rows - TILE_ROWS * index)); }

// To give tiles their shapes takes as long as many products, so a thread keeps them from one product to the next, until
// the end of the parallel region, where this object is.
class TilesOfThread {
  public:
    TilesOfThread() = default;
    TilesOfThread(const TilesOfThread&) = delete;
    ~TilesOfThread() { release(); }

    // Gives the tiles shapes that ``set`` sets; others have other names, which are positive.
    template <class Function> static void shape(long name, const Function& set) {
        if (shaped == name) return;
        release();
        TileShapes shapes;
        set(shapes);
        configure_tiles(shapes);
        shaped = name;
    }

  private:
    static void release() {
        if (shaped) release_tiles();
        shaped = 0;
    }
    inline static thread_local long shaped = 0;
};

#if defined(__AVX512F__)
// Transposes a matrix of 32-bit words.
inline void transpose(__m512i (&lines)[TILE_ROWS]) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#pragma GCC unroll 4
    for (int step = 8; step; step /= 2) {  // exchanges squares of step x step words above the diagonal with those below
        const __mmask16 odd = _mm512_test_epi32_mask(lanes, _mm512_set1_epi32(step));
        const __m512i down = _mm512_sub_epi32(lanes, _mm512_set1_epi32(step));
        const __m512i upper = _mm512_mask_add_epi32(lanes, odd, down, _mm512_set1_epi32(16));
        const __m512i lower = _mm512_add_epi32(upper, _mm512_set1_epi32(step));
#pragma GCC unroll 16
        for (int row = 0; row < TILE_ROWS; row++)
            if (!(row & step)) {
                const __m512i a = lines[row], b = lines[row + step];
                lines[row] = _mm512_permutex2var_epi32(a, upper, b);
                lines[row + step] = _mm512_permutex2var_epi32(a, lower, b);
            }
    }
}
// The lanes of the first ``count`` words.
inline __mmask16 first_words(long count) { return __mmask16((1 << count) - 1); }
#endif

// Writes a matrix of 32-bit words, of at most 16 rows and columns, transposed. It may overlap the one that is read.
inline void transpose(const void* from, long from_stride, void* to, long to_stride, long rows, long columns) {
    const char* source = static_cast<const char*>(from);
    char* target = static_cast<char*>(to);
#if defined(__AVX512F__)
    __m512i lines[TILE_ROWS];
    for (long row = 0; row < TILE_ROWS; row++)
        lines[row] = row < rows ? _mm512_maskz_loadu_epi32(first_words(columns), source + 4 * row * from_stride) : __m512i{};
    transpose(lines);
    for (long row = 0; row < columns; row++) _mm512_mask_storeu_epi32(target + 4 * row * to_stride, first_words(rows), lines[row]);
#else
    uint32_t words[TILE_ROWS][TILE_ROWS];
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < columns; i++) std::memcpy(&words[i][row], source + 4 * (row * from_stride + i), 4);
    for (long i = 0; i < columns; i++) std::memcpy(target + 4 * i * to_stride, words[i], 4 * rows);
#endif
}

#else

struct TilesOfThread {};

#endif

}  // namespace
