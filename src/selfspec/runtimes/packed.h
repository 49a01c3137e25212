// rows * weights of few bits (formats.h).
//
// A block of a row is multiplied as integers that share a scale (row_blocks.h). Sums of a block are integers, so that
// they are the same on every processor, and rows are independent of each other. Weights that are floats are multiplied
// with what the integers stand for.

#pragma once

#include "byte_tiles.h"

namespace {

// Most weight rows of a panel, which one thread multiplies at a time, for many rows. Few rows take as long with half as
// many to four times as many, as measured on Zen 5.
constexpr long COLUMNS = 48;

// Weights of some outputs of a linear layer, tile after tile.
struct Stored {
    const void* tiles;
    long outputs;  // a multiple of TILE but in the last ones
    int format;
};

// A linear layer: weights [outputs, inputs] with the dtype of the rows, or ``count`` parts of few bits that follow each other.
struct Linear {
    const void *weights, *bias;  // bias: [outputs] or null
    const Stored* parts;
    int count;
    int short_rows;  // rows are rounded to 8 bits
    const int32_t* order;  // of the parts' inputs: the place of each in a row, or null for the same
};

// Adds the products of R rows and a block of floats of a tile.
template <class F, int R, int PLANES>
void add_floats(const uint8_t* unit, const RowBlock<PLANES>* rows, float* sums, long stride) {
    constexpr int PARTS = TILE / LANES;
    float values[R][BLOCK];
    Floats products[2][R][PARTS] = {};  // of the even and of the odd inputs: a sum waits for each of its additions
    for (int row = 0; row < R; row++) rows[row].write(values[row]);
    for (int input = 0; input < BLOCK; input += 2)
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++)
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) {
                const Floats weight = F::read(unit, input + odd, part * LANES);
#pragma GCC unroll 4
                for (int row = 0; row < R; row++) {
                    Floats& own = products[odd][row][part];
                    own = multiply_add(own, weight, spread(values[row][input + odd]));
                }
            }
#pragma GCC unroll 4
    for (int row = 0; row < R; row++)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) {
            float* own = sums + row * stride + part * LANES;
            const Floats total = load<Floats>(own) + (products[0][row][part] + products[1][row][part]);
            std::memcpy(own, &total, sizeof(Floats));
        }
}
// The same for all rows, at most R at a time.
template <class F, int R, int PLANES>
void add_floats(const uint8_t* unit, const RowBlock<PLANES>* rows, long count, float* sums, long stride) {
    long row = 0;
    for (; row + R <= count; row += R) add_floats<F, R>(unit, rows + row, sums + row * stride, stride);
    if constexpr (R > 1) add_floats<F, R / 2>(unit, rows + row, count - row, sums + row * stride, stride);
}
// The same for the blocks of a tile from ``first`` to ``last``.
template <class F, int PLANES>
__attribute__((noinline)) void add_float_tile(const uint8_t* tile, const RowBlock<PLANES>* rows, long count, long first,
                                              long last, float* sums, long stride) {
    constexpr int MOST = REGISTERS == 32 ? 4 : 2, R = std::min(MOST, std::max(1, MOST * 2 * LANES / int(TILE)));
    const long soon = SIDES * fetched_soon.of(count);
    for (long block = first; block < last; block++, rows += count) {
        const uint8_t* unit = tile + block * F::bytes;
        fetch(unit, F::bytes, soon);
        add_floats<F, R>(unit, rows, count, sums, stride);
    }
}

// Weights of few bits of a product of rows that are multiplied as integers of 8 * PLANES bits.
template <class T, int PLANES> struct Packed {
    using Row = RowBlock<PLANES>;
    static constexpr long width = BLOCK, columns_of_panel = TILE, widest_panel = 4 * COLUMNS;
    static constexpr long columns_cached = TILE;
    // Most rows for which weights are read from codes once, and blocks of them that stay in the first cache.
    static constexpr long group = std::max(PLANES == 1 ? 24L : 16L, MOST_TILED<PLANES>), strip = group > 24 ? 48 : 16;
    static constexpr bool paired = false, any_rows = true;
    const Linear& linear;
    long k;

    Packed(const Linear& linear, long k) : linear(linear), k(k) {}
    long blocks() const { return k / BLOCK; }
    Ahead ahead(long, long, bool, long) const { return {}; }  // tiles fetch for themselves
    static void lay_out(const T* from, Row& to) { to.set(from); }
    void lay_out_in_order(const T* row, long block, Row& to) const {
        T values[BLOCK];
        for (int i = 0; i < BLOCK; i++) values[i] = row[linear.order[block * BLOCK + i]];
        lay_out(values, to);
    }
    // Adds the products of rows, laid out from block ``first`` on, and the weight rows from one on.
    void band(const Row* rows, long count, long from, long to, long first, long last, float* sums, long stride) const {
        const Stored* part = linear.parts;
        long before = 0;  // outputs of the parts before
        for (long column = from; column < to; column += TILE) {
            while (column >= before + part->outputs) before += part++->outputs;
            with_format(part->format, [&](auto number) {
                using F = Format<number>;
                const long bytes = blocks() / F::blocks * F::bytes;
                const auto* tile = static_cast<const uint8_t*>(part->tiles) + (column - before) / TILE * bytes;
                float* own = sums + column - from;
                if constexpr (F::is_float)
                    add_float_tile<F>(tile, rows, count, first, last, own, stride);
                else if (!add_in_tiles<F>(tile, rows, count, first, last, own, stride))
                    add_all<F>(tile, rows, count, first, last, own, stride);
            });
        }
    }
};

}  // namespace
