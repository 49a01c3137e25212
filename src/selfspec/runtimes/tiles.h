// bfloat16 rows times weights as the model has them, in the tiles of AMX.
//
// A tile of 16 weight rows and 32 inputs is loaded from where the model has it. The rows of the stream are the other
// factor, for which 32 inputs of up to 16 rows are rearranged in pairs: [pair of inputs][row][input of the pair]. A sum
// adds up block after block of 32 inputs in its place of a tile, which no other row or weight row touches. So a row gets
// the same bits whichever rows run with it, and a row alone goes through tiles too: a core multiplies 64 bytes of weights
// a cycle then, more than memory gives it.

#pragma once

#include <type_traits>

#include "packed.h"

#if defined(HAS_TILES)

namespace {

constexpr long BLOCKS_AHEAD = 4;   // blocks that each weight row is fetched ahead

// Weights of a product of bfloat16 rows.
struct Tiled {
    static constexpr long width = 32;  // inputs of a block
    static constexpr long columns_of_panel = TILE_ROWS, widest_panel = 2 * TILE_ROWS, group = 2 * TILE_ROWS;
    static constexpr long strip = 256 / width, columns_cached = widest_panel;  // sums of a group by weight row need a panel to themselves
    static constexpr bool paired = true, any_rows = false;
    struct alignas(64) Row {
        bf16 values[width];
    };
    const bf16* weights;
    long k;

    Tiled(const Linear& linear, long k) : weights(static_cast<const bf16*>(linear.weights)), k(k) {}
    long blocks() const { return (k + width - 1) / width; }
    Ahead ahead(long, long, bool, long) const { return {}; }  // tiles fetch for themselves
    static void lay_out(const bf16* from, Row& to) { std::copy_n(from, width, to.values); }

    // Rearranges a block of some rows of a group in pairs: 16 rows, and then the others.
    static void pair_up(Row* rows, long count) {
        if (count == 1) return;  // is in pairs as it is
        for (long first = 0; first < count; first += TILE_ROWS) {
            const long some = std::min(TILE_ROWS, count - first);
            transpose(rows + first, TILE_ROWS, rows + first, some, some, TILE_ROWS);
        }
    }

    // Adds the products of R rows from block ``first`` on. Sums that later blocks are added to stand by weight row.
    template <int R>
    void band(const Row* rows, long from, long to, long first, long last, float* sums, long stride, bool, Ahead&) const {
        constexpr int N = R > TILE_ROWS ? 2 : 1;
        shape(to - from, R);
        if (to - from > TILE_ROWS)
            multiply<2, N>(rows, R, from, to - from, first, last, sums, stride);
        else
            multiply<1, N>(rows, R, from, to - from, first, last, sums, stride);
    }
    // Sums are tiles 0 to 3, weights 4 and 5, rows 6 and 7.
    static void shape(long outputs, long rows) {
        TilesOfThread::shape(outputs * 64 + rows, [=](TileShapes& shapes) {
            for (int m = 0; m < 2; m++) {
                const long height = part(outputs, m);
                if (height) shapes.set(4 + m, height, 64);
                for (int n = 0; n < 2; n++)
                    if (height && part(rows, n)) shapes.set(2 * m + n, height, 4 * part(rows, n));
                if (part(rows, m)) shapes.set(6 + m, TILE_ROWS, 4 * part(rows, m));
            }
        });
    }
    // M tiles of weight rows times N of rows.
    template <int M, int N>
    void multiply(const Row* rows, long count, long from, long outputs, long first, long last, float* sums,
                  long stride) const {
        const bf16* block = weights + from * k + first * width;
        const long whole = std::min(last, k / width);
        if (first)
            each_sum<M, N>([&](auto tile, long place) { load_tile<tile>(sums + place, 4 * count); }, count);
        else
            each_sum<M, N>([&](auto tile, long) { zero_tile<tile>(); }, count);
        // After the last block of these weight rows the first ones of those after them.
        add_blocks<M, N>(rows, count, block, k, whole - first, last < blocks() ? 0 : M * TILE_ROWS * k - whole * width);
        if (whole < last) {
            bf16 rest[2 * TILE_ROWS][width] = {};
            for (long i = 0; i < outputs; i++) {
                const bf16* row = weights + (from + i) * k;
                std::copy(row + whole * width, row + k, rest[i]);
            }
            add_blocks<M, N>(rows + (whole - first) * count, count, rest[0], width, 1, 0);
        }
        if (last < blocks())
            each_sum<M, N>([&](auto tile, long place) { store_tile<tile>(sums + place, 4 * count); }, count);
        else
            store_by_row<M, N>(count, outputs, sums, stride);
    }
    // Calls a function with each tile of sums, and its place among sums [outputs, count].
    template <int M, int N, class Function> static void each_sum(const Function& function, long count) {
        function(std::integral_constant<int, 0>(), 0);
        if constexpr (N > 1) function(std::integral_constant<int, 1>(), TILE_ROWS);
        if constexpr (M > 1) function(std::integral_constant<int, 2>(), TILE_ROWS * count);
        if constexpr (M > 1 && N > 1) function(std::integral_constant<int, 3>(), TILE_ROWS * count + TILE_ROWS);
    }
    // ``beyond``: numbers from the end of the blocks to what is fetched after them.
    template <int M, int N>
    static void add_blocks(const Row* rows, long count, const bf16* weights, long stride, long blocks, long beyond) {
        for (long block = 0; block < blocks; block++, rows += count, weights += width) {
            const bf16* soon = weights + BLOCKS_AHEAD * width + (block + BLOCKS_AHEAD < blocks ? 0 : beyond);
            for (long i = 0; i < M * TILE_ROWS; i++) __builtin_prefetch(soon + i * stride);
            load_tile<6>(rows, 4 * (N > 1 ? TILE_ROWS : count));
            if constexpr (N > 1) load_tile<7>(rows + TILE_ROWS, 4 * (count - TILE_ROWS));
            load_tile<4>(weights, 2 * stride);
            multiply_tiles<0, 4, 6>();
            if constexpr (N > 1) multiply_tiles<1, 4, 7>();
            if constexpr (M > 1) {
                load_tile<5>(weights + TILE_ROWS * stride, 2 * stride);
                multiply_tiles<2, 5, 6>();
                if constexpr (N > 1) multiply_tiles<3, 5, 7>();
            }
        }
    }
    // Writes finished sums as ``Product`` reads them, [rows, stride].
    template <int M, int N> static void store_by_row(long count, long outputs, float* sums, long stride) {
        alignas(64) float totals[M * TILE_ROWS][N * TILE_ROWS];
        each_sum<M, N>([&](auto tile, long place) { store_tile<tile>(totals[0] + place, sizeof(totals[0])); },
                       N * TILE_ROWS);
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++)
                transpose(totals[m * TILE_ROWS] + n * TILE_ROWS, N * TILE_ROWS,
                          sums + n * TILE_ROWS * stride + m * TILE_ROWS, stride, part(outputs, m), part(count, n));
    }
};

}  // namespace

#endif
