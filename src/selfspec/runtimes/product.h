// rows * weights, for weights as the model has them: row-major, one row an output.
//
// A product of few rows takes as long as reading its weights; one of many rows takes as long as its multiplications.
// Each weight is read once for ROWS rows. A panel of weights stays in the cache while groups of rows pass. Each sum runs
// over its inputs in one order, however many rows there are.

#pragma once

#include "vectors.h"

namespace {

constexpr long GROUP = 6;      // most rows of a tile
constexpr long ROWS = 96;      // most rows that are multiplied before the weights are read again
constexpr long COLUMNS = 48;   // most weight rows of a panel, which one thread multiplies at a time
constexpr long STRIP = 1024;   // inputs of a panel and of a group that stay in the caches while others pass
constexpr long RESIDENT = 4;   // most rows without strips: whole weight rows are read faster than parts of them

// A linear layer: weights [outputs, inputs], bias [outputs] or null.
struct Linear {
    const void *weights, *bias;
};

// At most ROWS rows, laid out in groups of at most GROUP, times one panel of weights after the other.
template <class T> struct Product {
    using L = ProductLanes<T>;
    static constexpr long strip = STRIP / L::width;
    const T *weights, *bias;
    T *out, *stream;  // results are written to ``out``, or multiplied by ``multiplier`` and added to ``stream``
    float multiplier;
    long count, k, n;  // rows, inputs, outputs
    Block<T>* rows;    // count * blocks
    long blocks = blocks_of<T>(k);

    long group_rows(long group) const { return std::min(GROUP, count - group); }

    void lay_out(const T* from, long row) const {
        const long group = row / GROUP * GROUP, stride = group_rows(group);
        Block<T>* to = rows + group * blocks + row - group;
        for (long block = 0; block < blocks; block++, to += stride) {
            T last[L::width] = {};
            const T* values = from + block * L::width;
            if (k < (block + 1) * L::width) values = std::copy(values, from + k, last) - (k - block * L::width);
            for (int p = 0; p < L::parts; p++) to->parts[p] = L::part(values, p);
        }
    }

    // Adds the sums over some blocks to those of the blocks before, strip by strip.
    template <int R, int C> void tile(long group, long column, long first, long last, float* sums, long stride) const {
        const Block<T>* group_rows = rows + group * blocks;
        const T* from = weights + column * k;
        for (long start = first; start < last; start += strip) {
            const long end = std::min(last, start + strip), whole = std::min(end, k / L::width);
            Floats total[R][C] = {};
            add_blocks<R, C, T>(total, group_rows + start * R, from + start * L::width, k, whole - start);
            if (whole < end) {
                T rest[2 * C][L::width] = {};
                for (int c = 0; c < C; c++) std::copy(from + c * k + whole * L::width, from + (c + 1) * k, rest[c]);
                add_blocks<R, C, T>(total, group_rows + whole * R, rest[0], L::width, 1);
            }
            for (int r = 0; r < R; r++)
                for (int c = 0; c < C; c++) sums[r * stride + c] += sum<LANES>(total[r][c]);
        }
    }
    template <int R> void band(long group, long from, long to, long first, long last, float* sums) const {
        constexpr int C = columns<T>(R);
        long column = from;
        for (; column + C <= to; column += C) tile<R, C>(group, column, first, last, sums + column - from, to - from);
        for (; column < to; column++) tile<R, 1>(group, column, first, last, sums + column - from, to - from);
    }
    void panel(long from, long to) const {
        float sums[ROWS * COLUMNS] = {};
        const long step = count > RESIDENT ? strip : blocks;
        for (long first = 0; first < blocks; first += step)
            for (long group = 0; group < count; group += GROUP) {
                const long last = std::min(blocks, first + step);
                float* to_sums = sums + group * (to - from);
                switch (group_rows(group)) {
                    case 1: band<1>(group, from, to, first, last, to_sums); break;
                    case 2: band<2>(group, from, to, first, last, to_sums); break;
                    case 3: band<3>(group, from, to, first, last, to_sums); break;
                    case 4: band<4>(group, from, to, first, last, to_sums); break;
                    case 5: band<5>(group, from, to, first, last, to_sums); break;
                    default: band<6>(group, from, to, first, last, to_sums);
                }
            }
        for (long row = 0; row < count; row++) finish(row, from, to, sums + row * (to - from));
    }
    // The sums of a row to outputs.
    void finish(long row, long from, long to, const float* sums) const {
        T values[COLUMNS];
        T* results = out ? out + row * n + from : values;
        for (long i = 0; i < to - from; i++) results[i] = down<T>(sums[i] + (bias ? up(bias[from + i]) : 0.0f));
        if (!out) add_to(stream + row * n + from, values, to - from, multiplier);
    }
    // Adds a branch to the stream. It rounds twice, like torch's multiplication and addition.
    static void add_to(T* sums, const T* values, long count, float multiplier) {
        if (multiplier == 1.0f)
            for (long i = 0; i < count; i++) sums[i] = down<T>(up(sums[i]) + up(values[i]));
        else
            for (long i = 0; i < count; i++) sums[i] = down<T>(up(sums[i]) + rounded<T>(up(values[i]) * multiplier));
    }
};

// Weight rows of a panel: few enough that every thread gets a panel.
inline long panel_width(long n, int threads) { return std::min(COLUMNS, ((n + threads - 1) / threads + 11) / 12 * 12); }

// out[row][j] = sum over i of rows[row][i] * weights[j][i], plus bias[j]
template <class T> void product(const Linear& linear, const T* rows, T* out, long count, long k, long n, int threads) {
    if (n * k * long(sizeof(T)) < (1 << 20)) threads = 1;  // waking a thread takes longer
    const long width = panel_width(n, threads);
    const std::unique_ptr<Block<T>[]> laid{new Block<T>[std::min(ROWS, count) * blocks_of<T>(k)]};
    for (long start = 0; start < count; start += ROWS) {
        const Product<T> task{static_cast<const T*>(linear.weights),
                              static_cast<const T*>(linear.bias),
                              out + start * n,
                              nullptr,
                              1.0f,
                              std::min(ROWS, count - start),
                              k,
                              n,
                              laid.get()};
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
#pragma omp for
            for (long row = 0; row < task.count; row++) task.lay_out(rows + (start + row) * k, row);
#pragma omp for schedule(dynamic)
            for (long from = 0; from < n; from += width) task.panel(from, std::min(n, from + width));
        }
    }
}

}  // namespace
