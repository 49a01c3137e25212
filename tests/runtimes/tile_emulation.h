// The instructions of AMX in plain C++, as Intel's manual describes them, for processors without them.
//
// Each thread has its own tiles. What a processor refuses, ends the program.

#pragma once

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

std::atomic<long> tile_products{0}, byte_tile_products{0};

struct EmulatedTiles {
    TileShapes shapes;
    bool configured = false;
    unsigned char tiles[8][16][64];
};
thread_local EmulatedTiles emulated;

inline void demand(bool holds, const char* what) {
    if (!holds) std::fprintf(stderr, "tiles: %s\n", what), std::abort();
}
inline long rows_of(int tile) {
    demand(emulated.configured && emulated.shapes.rows[tile] > 0, "a tile without a shape is used");
    return emulated.shapes.rows[tile];
}
inline long bytes_of(int tile) { return rows_of(tile) ? emulated.shapes.bytes[tile] : 0; }

inline void configure_tiles(const TileShapes& shapes) {
    demand(!emulated.configured, "the tiles of other code are lost");
    demand(shapes.palette == 1 && shapes.start == 0, "there is no such palette");
    for (int tile = 0; tile < 16; tile++) {
        demand(shapes.rows[tile] <= (tile < 8 ? 16 : 0) && shapes.bytes[tile] <= 64, "a tile is too large");
        demand((shapes.rows[tile] == 0) == (shapes.bytes[tile] == 0), "a tile has rows or bytes alone");
    }
    emulated.shapes = shapes, emulated.configured = true;
    std::memset(emulated.tiles, 0, sizeof(emulated.tiles));
}
inline void release_tiles() { emulated.configured = false; }

template <int TILE> inline void zero_tile() {
    if (rows_of(TILE)) std::memset(emulated.tiles[TILE], 0, sizeof(emulated.tiles[TILE]));
}
template <int TILE> inline void load_tile(const void* from, long stride) {
    std::memset(emulated.tiles[TILE], 0, sizeof(emulated.tiles[TILE]));
    for (long row = 0; row < rows_of(TILE); row++)
        std::memcpy(emulated.tiles[TILE][row], static_cast<const char*>(from) + row * stride, bytes_of(TILE));
}
template <int TILE> inline void store_tile(void* to, long stride) {
    for (long row = 0; row < rows_of(TILE); row++)
        std::memcpy(static_cast<char*>(to) + row * stride, emulated.tiles[TILE][row], bytes_of(TILE));
}

inline float flushed(float value) { return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value; }

// Number ``index`` of a row of a tile.
inline float emulated_bf16(int tile, long row, long index) {
    uint16_t bits;
    std::memcpy(&bits, emulated.tiles[tile][row] + 2 * index, 2);
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return flushed(value);
}

inline void demand_shapes(int sums, int a, int b) {
    demand(rows_of(sums) == rows_of(a) && bytes_of(sums) == bytes_of(b), "the shapes of sums and factors differ");
    demand(bytes_of(a) == 4 * rows_of(b), "the shapes of the factors differ");
}

template <int C, int A, int B> inline void multiply_tiles() {
    demand_shapes(C, A, B);
    for (long i = 0; i < rows_of(C); i++)
        for (long j = 0; j < bytes_of(C) / 4; j++) {
            float sums[2] = {};
            for (long p = 0; p < rows_of(B); p++)
                for (int odd = 0; odd < 2; odd++)
                    sums[odd] = flushed(std::fma(emulated_bf16(A, i, 2 * p + odd), emulated_bf16(B, p, 2 * j + odd), sums[odd]));
            float total;
            std::memcpy(&total, emulated.tiles[C][i] + 4 * j, 4);
            total = flushed(flushed(total) + flushed(sums[0] + sums[1]));
            std::memcpy(emulated.tiles[C][i] + 4 * j, &total, 4);
        }
    tile_products++;
}

template <int C, int A, int B> inline void multiply_tiles_of_bytes() {
    demand_shapes(C, A, B);
    for (long i = 0; i < rows_of(C); i++)
        for (long j = 0; j < bytes_of(C) / 4; j++) {
            int32_t total;
            std::memcpy(&total, emulated.tiles[C][i] + 4 * j, 4);
            for (long p = 0; p < rows_of(B); p++)
                for (int t = 0; t < 4; t++)
                    total += int8_t(emulated.tiles[A][i][4 * p + t]) * int8_t(emulated.tiles[B][p][4 * j + t]);
            std::memcpy(emulated.tiles[C][i] + 4 * j, &total, 4);
        }
    byte_tile_products++;
}

}  // namespace

extern "C" long emulated_tile_products() { return tile_products; }
