// Products of rows and a tile of weights of few bits, in the tiles of AMX.
//
// The codes of a block of 16 weight rows, in groups of four inputs, are one factor once they are bytes with a sign; a plane
// of the integers of up to 16 rows is the other one as it stands. Products are integers, the same as in vectors, and are
// scaled and added up by the same operations, so that both give equal bits. In vectors a row takes eight products of each
// block, here a share of one.

#pragma once

#include "block_products.h"
#include "thread_tiles.h"

namespace {

#if defined(HAS_TILES)
// Most rows that are multiplied by codes that are read once; 0 where vectors are as fast: a plane is a product more.
template <int PLANES>
constexpr long MOST_TILED = LANES == TILE && multiplies_bytes && PLANES < 3 ? 2 * TILE_ROWS / PLANES : 0;

// Fewest rows that are multiplied in tiles, which take as long for one row as for 16.
constexpr long FEWEST_TILED = 10;

// Weights of a format times rows of integers of 8 * PLANES bits.
template <class F, int PLANES> class ByteTiles {
    using Row = RowBlock<PLANES>;
    using Bytes = int8_t __attribute__((vector_size(4 * LANES)));
    static constexpr int halves = F::scaled < BLOCK ? 2 : 1;
    static constexpr long most = MOST_TILED<PLANES>;
    static constexpr long READ = 8, ADDED = 4;  // blocks whose codes are read, and that are added to a sum, at a time

    // What the products of a block are scaled by.
    struct Scale {
        static constexpr int halves = ByteTiles::halves;
        Floats scales[halves], minima[F::has_minimum ? halves : 0];
        Floats scale(int, int half) const { return scales[half]; }
        Floats minimum(int, int half) const { return minima[half]; }
    };
    alignas(64) Bytes codes[READ][GROUPS];
    alignas(64) Ints products[ADDED][halves][PLANES][most];
    Scale scales[READ];
    const long count, soon;

    // Sums are tiles 0 and 1, rows 4 and 5, weights 6.
    void shape() const {
        TilesOfThread::shape((halves << 8 | count) << 16, [=](TileShapes& shapes) {
            for (int m = 0; m < 2; m++)
                if (const long own = part(count, m)) shapes.set(m, own, 64), shapes.set(4 + m, own, BLOCK / halves);
            shapes.set(6, GROUPS / halves, 64);
        });
    }
    // Reads the codes and scales of some blocks.
    void read(const uint8_t* unit, long some) {
        for (long first = 0; first < some; first += F::blocks, unit += F::bytes) {
            const typename F::Scales own(unit, 0);
            fetch(unit, F::head, soon);
            for (int i = 0; i < F::blocks; i++) {
                const uint8_t* from = unit + F::head + i * Codes<F::bits>::bytes;
                fetch(from, Codes<F::bits>::bytes, soon);
                const CodedBlock<F, PLANES> block{from, 0, own, i};
                Scale& to = scales[first + i];
#pragma GCC unroll 2
                for (int half = 0; half < halves; half++) {
                    to.scales[half] = block.scale(0, half);
                    if constexpr (F::has_minimum) to.minima[half] = block.minimum(0, half);
                }
#pragma GCC unroll 8
                for (int group = 0; group < GROUPS; group++)
                    codes[first + i][group] = (Bytes)block.factor(0, group).codes[0] - int8_t(Factor<F, PLANES>::offset);
            }
        }
    }
    void multiply(const Bytes (&factors)[GROUPS], const Row* rows, Ints (&to)[halves][PLANES][most]) const {
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++) {
            load_tile<6>(&factors[half * GROUPS / halves], sizeof(Bytes));
#pragma GCC unroll 3
            for (int plane = 0; plane < PLANES; plane++) {
                multiply_some<0>(rows->planes[plane] + half * BLOCK / halves, to[half][plane]);
                if (count > TILE_ROWS)
                    multiply_some<1>(rows[TILE_ROWS].planes[plane] + half * BLOCK / halves, to[half][plane] + TILE_ROWS);
            }
        }
    }
    template <int M> static void multiply_some(const int8_t* rows, Ints* to) {
        zero_tile<M>();
        load_tile<4 + M>(rows, sizeof(Row));
        multiply_tiles_of_bytes<M, 4 + M, 6>();
        store_tile<M>(to, sizeof(Ints));
    }
    // Adds the products of BLOCKS blocks to the sums.
    template <int BLOCKS> void add(long first, const Row* rows, float* sums, long stride) {
        Scale own[BLOCKS];
#pragma GCC unroll 4
        for (int i = 0; i < BLOCKS; i++) {
            own[i] = scales[first + i];
            multiply(codes[first + i], rows + i * count, products[i]);
        }
        for (long row = 0; row < count; row++, sums += stride) {
            Floats total = load<Floats>(sums);
#pragma GCC unroll 4
            for (int i = 0; i < BLOCKS; i++)
                total = add_scaled<F>(total, joined(products[i][0], row), joined(products[i][halves - 1], row), own[i], 0,
                                      rows[i * count + row]);
            std::memcpy(sums, &total, sizeof(Floats));
        }
    }
    static Floats joined(const Ints (&planes)[PLANES][most], long row) {
        const auto floats = [](Ints sums) { return __builtin_convertvector(sums, Floats); };
        Ints high = planes[0][row];
        if constexpr (PLANES > 1) high = (high << 8) + planes[1][row];
        return Row::joined(floats(high), floats(planes[PLANES - 1][row]));
    }

  public:
    explicit ByteTiles(long count) : count(count), soon(fetched_soon.of(count)) {}
    // Adds the products of rows and blocks from a unit on to the sums.
    void add_all(const uint8_t* unit, const Row* rows, long blocks, float* sums, long stride) {
        shape();
        for (; blocks > 0; blocks -= READ, unit += READ / F::blocks * F::bytes) {
            const long some = std::min(READ, blocks);
            read(unit, some);
            long first = 0;
            for (; first + ADDED <= some; first += ADDED, rows += ADDED * count) add<ADDED>(first, rows, sums, stride);
            for (; first < some; first++, rows += count) add<1>(first, rows, sums, stride);
        }
    }
};
#else
template <int PLANES> constexpr long MOST_TILED = 0;
#endif

// Adds the products of rows and a tile over the blocks from ``first`` to ``last``, if tiles are faster.
template <class F, int PLANES>
__attribute__((noinline)) bool add_in_tiles(const uint8_t* tile, const RowBlock<PLANES>* rows, long count, long first,
                                            long last, float* sums, long stride) {
#if defined(HAS_TILES)
    if constexpr (MOST_TILED<PLANES> > 0 && (PLANES == 1 || F::scaled >= BLOCK))
        if (count >= FEWEST_TILED) {
            ByteTiles<F, PLANES>(count).add_all(tile + first / F::blocks * F::bytes, rows, last - first, sums, stride);
            return true;
        }
#endif
    return false;
}

}  // namespace
