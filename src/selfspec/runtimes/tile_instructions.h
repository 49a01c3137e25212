// The instructions of AMX: eight registers, tiles of up to 16 rows of 64 bytes, and products of two of them.
//
// Where TILE_INSTRUCTIONS is defined, it names a header that defines the same functions in plain C++, for tests.

#pragma once

#include <cstdint>

namespace {

// The shape of each tile, as LDTILECFG reads it. A tile without rows must not be used.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};  // of a row
    uint8_t rows[16] = {};

    void set(int tile, long row_count, long row_bytes) { rows[tile] = uint8_t(row_count), bytes[tile] = uint16_t(row_bytes); }
};

}  // namespace

#if defined(TILE_INSTRUCTIONS)
#define HAS_TILES
#include TILE_INSTRUCTIONS
#elif defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define HAS_TILES

namespace {

// Written out, because the compilers' own functions take only numbers that are literals, not arguments of templates.
inline void configure_tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
// Tiles that are in use make a switch of threads slower, and keep an idle core awake.
inline void release_tiles() { asm volatile("tilerelease"); }

template <int TILE> inline void zero_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(TILE)); }
// Rows of a tile are ``stride`` bytes apart in memory.
template <int TILE> inline void load_tile(const void* from, long stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE> inline void store_tile(void* to, long stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}
// C[i][j] += sum over p of A[i][2p] * B[p][2j] + sum over p of A[i][2p + 1] * B[p][2j + 1], of bfloat16 numbers as floats.
// Both sums are fused multiply-adds in the order of p from 0; they are added to each other, and then to C. Each operation
// rounds to nearest, and takes and gives zero for denormal numbers.
template <int C, int A, int B> inline void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
// C[i][j] += sum over p and t < 4 of A[i][4p + t] * B[p][4j + t], of bytes with a sign as integers of 32 bits.
template <int C, int A, int B> inline void multiply_tiles_of_bytes() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

}  // namespace

#endif
