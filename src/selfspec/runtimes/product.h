// rows * weights, for weights as the model has them, row-major, one row an output, or for low-bit copies of them.
//
// A product of few rows takes as long as reading its weights; one of many rows takes as long as its multiplications.
// Each weight is read once for ROWS rows. Some columns of a panel stay in the first cache while groups of rows pass; in that
// time those after them are fetched, so that a step takes the longer one of both times rather than their sum. Each sum
// runs over its inputs in one order, however many rows there are.
//
// Weights are fetched ahead of their use, so a thread gets panels that follow each other (OpenMP's guided schedule): were
// they dealt out in turns, half of what is fetched at the end of a panel would be for another thread.

#pragma once

#include "cores.h"
#include "packed.h"
#include "tiles.h"

namespace {

constexpr long ROWS = 96;      // most rows that are multiplied before the weights are read again
constexpr long STRIP = 1024;   // inputs of some columns and of a group that stay in the first cache while others pass
constexpr long RESIDENT = 4;   // most rows without strips: whole weight rows are read faster than parts of them
// Bytes of more rows that stay in the first cache beside the weights. On Zen 5 two and four times as much bring nothing.
constexpr long CACHED = 24 << 10;

// How weights in the dtype of the rows are read where they are read in memory's order: as many weight rows side by side as
// a tile has columns, WIDE for as many as the registers hold; or PAST, single weight rows past the outer caches.
template <class T> struct Reading {
    static constexpr int PAST = 0, WIDE = 4, NARROW = ProductLanes<T>::parts > 1 ? WIDE : 2;
    inline static Ways columns{{1, NARROW == WIDE ? WIDE : 1, NARROW}};
};

// Weights in the dtype of the rows, as the model has them.
template <class T> struct Dense {
    using L = ProductLanes<T>;
    using Row = Block<T>;
    static constexpr long width = L::width, columns_of_panel = 12, widest_panel = COLUMNS, strip = STRIP / width;
    static constexpr long columns_cached = 24;  // stay in the first cache while groups of rows pass
    static constexpr long group = REGISTERS == 32 ? 8 : 4;  // most rows of a tile, whose sums compilers keep in registers
    static constexpr bool paired = false, any_rows = false;
    const T* weights;
    long k;

    Dense(const Linear& linear, long k) : weights(static_cast<const T*>(linear.weights)), k(k) {}
    long blocks() const { return blocks_of<T>(k); }
    static void lay_out(const T* from, Row& to) {
        for (int p = 0; p < L::parts; p++) to.parts[p] = L::part(from, p);
    }

    // What is fetched ahead of weight rows: where these are multiplied in memory's order, what follows soon; else the rows
    // after them, a part for each of some groups of rows.
    Ahead ahead(long from, long to, bool in_order, long groups) const {
        if (in_order) return {reinterpret_cast<const char*>(weights + from * k) + AHEAD, LINE};
        return {reinterpret_cast<const char*>(weights + to * k), (LINE + groups - 1) / groups};
    }
    // Adds the products of R rows, laid out from block ``first`` on, and weight rows.
    template <int R>
    void band(const Row* rows, long from, long to, long first, long last, float* sums, long stride, bool in_order,
              Ahead& ahead) const {
        constexpr int MOST = columns<T>(R);
        const int chosen = in_order ? Reading<T>::columns.of(R) : MOST;
        long column = from;
        const auto tiles = [&](auto width, auto past) {
            constexpr int C = width.value;
            for (; column + C <= to; column += C)
                tile<R, C, past.value>(rows, column, first, last, sums + column - from, stride, ahead);
        };
        if (chosen >= MOST)
            tiles(std::integral_constant<int, MOST>(), std::false_type());
        else if (chosen == 2)
            tiles(std::integral_constant<int, std::min(2, MOST)>(), std::false_type());
        else if (chosen == Reading<T>::PAST)
            tiles(std::integral_constant<int, 1>(), std::true_type());
        tiles(std::integral_constant<int, 1>(), std::false_type());
    }
    // Adds the sums over some blocks to those of the blocks before, strip by strip.
    template <int R, int C, bool PAST>
    void tile(const Row* rows, long column, long first, long last, float* sums, long stride, Ahead& ahead) const {
        const T* from = weights + column * k;
        for (long start = first; start < last; start += strip) {
            const long end = std::min(last, start + strip), whole = std::min(end, k / L::width);
            Floats total[R][C] = {};
            add_blocks<R, C, T, PAST>(total, rows + (start - first) * R, from + start * L::width, k, whole - start,
                                {ahead.from, ahead.step * C});
            ahead.from += (whole - start) * ahead.step * C;
            if (whole < end) {
                T rest[2 * C][L::width] = {};
                for (int c = 0; c < C; c++) std::copy(from + c * k + whole * L::width, from + (c + 1) * k, rest[c]);
                add_blocks<R, C, T, PAST>(total, rows + (whole - first) * R, rest[0], L::width, 1, {ahead.from, 0});
            }
            add_sums<R, C>(total, sums, stride);
        }
    }
    // Adds the sums of the lanes of a tile.
    template <int R, int C> static void add_sums(Floats (*total)[C], float* sums, long stride) {
        constexpr int SOME = LANES / C;  // rows
        if constexpr (R > SOME) add_sums<R - SOME, C>(total + SOME, sums + SOME * stride, stride);
        constexpr int count = std::min(R, SOME) * C;
        const Floats found = sum_each<count>(total[0]);
        for (int i = 0; i < count; i++) sums[i / C * stride + i % C] += found[i];
    }
};

// Adds a branch to the stream. It rounds twice, like torch's multiplication and addition.
template <class T> void add_to(T* sums, const T* values, long count, float multiplier) {
    if (multiplier == 1.0f)
        for (long i = 0; i < count; i++) sums[i] = down<T>(up(sums[i]) + up(values[i]));
    else
        for (long i = 0; i < count; i++) sums[i] = down<T>(up(sums[i]) + rounded<T>(up(values[i]) * multiplier));
}

// At most ROWS rows, laid out in groups of about the same size, times one panel of weights after the other.
template <class T, class W> struct Product {
    using Row = typename W::Row;
    const W weights;
    const T* bias;
    T *out, *stream;  // results are written to ``out``, or multiplied by ``multiplier`` and added to ``stream``
    float multiplier;
    long count, k, n;  // rows, inputs, outputs
    Row* rows;         // count * blocks
    long stride = n;   // of the rows of results
    long blocks = weights.blocks();

    long groups = (count + W::group - 1) / W::group, most = (count + groups - 1) / groups;  // rows of a group

    long group_rows(long group) const { return std::min(most, count - group); }

    // Not inlined, like the panel: there are several callers, for whom a compiler would take its time.
    __attribute__((noinline)) void lay_out(const T* from, long row) const {
        const long group = row / most * most, stride = group_rows(group);
        Row* to = rows + group * blocks + row - group;
        for (long block = 0; block < blocks; block++, to += stride) {
            if constexpr (W::any_rows)
                if (weights.linear.order) {
                    weights.lay_out_in_order(from, block, *to);
                    continue;
                }
            const long start = block * W::width, end = std::min(k, start + W::width);
            if (end - start == W::width) {
                W::lay_out(from + start, *to);
            } else {
                T edge[W::width] = {};
                std::copy(from + start, from + end, edge);
                W::lay_out(edge, *to);
            }
        }
    }

    // The blocks of all groups. Where weights are ``paired``, the rows of each are rearranged once all are laid out.
    long blocks_of_groups() const { return (count + most - 1) / most * blocks; }
    void pair_up(long index) const {
        const long group = index / blocks * most, size = group_rows(group);
        W::pair_up(rows + group * blocks + index % blocks * size, size);
    }

    // Few rows stay in the first cache whole, beside weights that are read in memory's order, which is fastest.
    bool in_order() const {
        return count <= RESIDENT || (groups == 1 && count * blocks * long(sizeof(Row)) <= CACHED);
    }
    __attribute__((noinline)) void panel(long from, long to) const {
        alignas(64) float sums[ROWS * COLUMNS];
        const long stride = (to - from + 15) / 16 * 16, step = in_order() ? to - from : W::columns_cached;
        std::fill_n(sums, count * stride, 0.0f);
        for (long column = from; column < to; column += step)
            columns(column, std::min(to, column + step), sums + column - from, stride);
        for (long row = 0; row < count; row++) finish(row, from, to, sums + row * stride);
    }
    // Adds the products of all rows and some columns.
    void columns(long from, long to, float* sums, long stride) const {
        const long step = in_order() ? blocks : W::strip;
        Ahead ahead = weights.ahead(from, to, in_order(), groups);
        for (long first = 0; first < blocks; first += step)
            for (long group = 0; group < count; group += most) {
                const long last = std::min(blocks, first + step), size = group_rows(group);
                const Row* some = rows + group * blocks + first * size;
                float* own = sums + group * stride;
                if constexpr (W::any_rows)
                    weights.band(some, size, from, to, first, last, own, stride);
                else
                    band<W::group>(size, some, from, to, first, last, own, stride, in_order(), ahead);
            }
    }
    // Calls the band of as many rows as a group has, at most R.
    template <int R, class... Arguments> void band(long size, Arguments&&... arguments) const {
        if constexpr (R > 1)
            if (size < R) return band<R - 1>(size, arguments...);
        weights.template band<R>(arguments...);
    }
    // The sums of a row to outputs.
    void finish(long row, long from, long to, const float* sums) const {
        T values[W::widest_panel];
        T* results = out ? out + row * stride + from : values;
        for (long i = 0; i < to - from; i++) results[i] = down<T>(sums[i] + (bias ? up(bias[from + i]) : 0.0f));
        if (!out) add_to(stream + row * stride + from, values, to - from, multiplier);
    }
};

// Weight rows of a panel: few enough that every thread gets a panel, or some where panels are wide.
template <class W> long panel_width(long n, int threads, long rows) {
    const long step = W::columns_of_panel, widest = rows > ROWS * COLUMNS / W::widest_panel ? COLUMNS : W::widest_panel;
    const long share = widest > COLUMNS ? (n + 4 * threads - 1) / (4 * threads) : (n + threads - 1) / threads;
    return std::min(widest, (share + step - 1) / step * step);
}

// Room for a product's rows.
struct alignas(64) Line {
    char bytes[64];
};
template <class T> long lines_of(long rows, long k) {
    const long dense = blocks_of<T>(k) * long(sizeof(Block<T>));
    const long packed = (k / BLOCK + 2) * long(sizeof(RowBlock<sizeof(T) == 2 ? 2 : 3>));
    return rows * std::max(dense, packed) / long(sizeof(Line)) + 1;
}

#if defined(HAS_TILES)
// Weights that are not low-bit copies.
template <class T> using Whole = std::conditional_t<std::is_same_v<T, bf16>, Tiled, Dense<T>>;
#else
template <class T> using Whole = Dense<T>;
#endif

// Calls a function with the weights of a linear layer of k inputs.
template <class T, class Function> void with_weights(const Linear& linear, long k, const Function& function) {
    if (!linear.parts) return function(Whole<T>(linear, k));
    if (linear.short_rows) return function(Packed<T, 1>(linear, k));
    function(Packed<T, sizeof(T) == 2 ? 2 : 3>(linear, k));
}

// out[row][j] = sum over i of rows[row][i] * weights[j][i], plus bias[j]
template <class T> void product(const Linear& linear, const T* rows, T* out, long count, long k, long n, int threads) {
    if (n * k * (linear.parts ? 1 : 2 * long(sizeof(T))) < (2 << 20)) threads = 1;  // waking takes longer
    const std::unique_ptr<Line[]> laid{new Line[lines_of<T>(std::min(ROWS, count), k)]};
    const T* bias = static_cast<const T*>(linear.bias);
    with_weights<T>(linear, k, [&](const auto& weights) {
        using W = std::decay_t<decltype(weights)>;
        auto* laid_rows = reinterpret_cast<typename W::Row*>(laid.get());
        const long width = panel_width<W>(n, threads, std::min(ROWS, count));
        for (long start = 0; start < count; start += ROWS) {
            const long some = std::min(ROWS, count - start);
            const Product<T, W> task{weights, bias, out + start * n, nullptr, 1.0f, some, k, n, laid_rows};
#pragma omp parallel num_threads(threads) if (threads > 1)
            {
                run_on_chosen();
                [[maybe_unused]] const TilesOfThread tiles;
#pragma omp for
                for (long row = 0; row < task.count; row++) task.lay_out(rows + (start + row) * k, row);
                if constexpr (W::paired) {
#pragma omp for
                    for (long block = 0; block < task.blocks_of_groups(); block++) task.pair_up(block);
                }
#pragma omp for schedule(guided)
                for (long from = 0; from < n; from += width) task.panel(from, std::min(n, from + width));
            }
        }
    });
}

}  // namespace
