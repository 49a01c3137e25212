// The low-rank products of adapters. The first factors of a product run ahead of it over all rows that have an adapter;
// the second ones run with its panels, so that no thread waits for them.

#pragma once

#include <memory>
#include <vector>

#include "product.h"

namespace {

// The second factor of a low-rank product, [rank, outputs], whose sums are added to a product's outputs from ``first`` on.
struct LowRankOutputs {
    const void* weights;
    long rank, outputs, first;
    float scale;
};

// The low-rank products that an adapter adds to a product of a sublayer; none where the count is 0.
struct LowRank {
    Linear inputs;  // the first factors, one after the other, [rank of all, inputs]
    long rank;      // of all
    const LowRankOutputs* outputs;
    long count;
};

// What an adapter adds to the two products of a sublayer.
struct AdaptedSublayer {
    LowRank entering, leaving;
};

// Where the results of a product go: they are written to ``out``, or multiplied and added to ``sums`` where there is no
// ``out``. Both point to the first row.
template <class T> struct Results {
    T *out, *sums;
    float multiplier;
    long stride;  // of rows

    Results from(long row) const {
        return {out ? out + row * stride : nullptr, sums ? sums + row * stride : nullptr, multiplier, stride};
    }
};

// What first factors read and write: rows laid out, [rows, rank] of what comes out.
template <class T> struct ReductionRoom {
    std::unique_ptr<Line[]> laid;
    std::unique_ptr<T[]> reduced;

    void reserve(long rows, long k, long rank) {
        laid.reset(new Line[lines_of<T>(rows, k) + rows]);  // each run of rows may have a line that is not full
        reduced.reset(new T[rows * rank]);
    }
};

// The low-rank products of at most ROWS rows of a product, as one thread knows them.
template <class T> class AddedProducts {
    using W = Whole<T>;
    using Task = Product<T, W>;

  public:
    void clear() { firsts.clear(), runs_of.clear(); }
    bool empty() const { return firsts.empty(); }

    // Rows that follow each other and have the same adapter, the first one counted from that of the product. What its
    // first factors read and write is in ``room``, which has ``rank`` numbers for each row.
    void add_run(const LowRank& added, long k, long first, long count, const ReductionRoom<T>& room, long rank) {
        Line* lines = firsts.empty() ? room.laid.get() : end_of(firsts.back());
        T* out = room.reduced.get() + first * rank;
        firsts.push_back({W(added.inputs, k), nullptr, out, nullptr, 1.0f, count, k, added.rank,
                          reinterpret_cast<typename W::Row*>(lines)});
        runs_of.push_back({&added, first});
    }

    // The first factors: rows are laid out, paired up where weights are, and multiplied, item by item.
    void lay_out(const T* from, long row) const {
        for (size_t run = 0; run < firsts.size(); run++)
            if (const long own = row - runs_of[run].first; own >= 0 && own < firsts[run].count)
                firsts[run].lay_out(from, own);
    }
    long runs() const { return firsts.size(); }
    void pair_up(long run) const { pair_up(firsts[run]); }
    long items() const {
        long count = 0;
        for (const Task& task : firsts) count += items_of(task);
        return count;
    }
    void reduce(long item) const {
        for (const Task& task : firsts) {
            if (item < items_of(task)) {
                const long from = item * STEP;
                return task.panel(from, std::min(task.n, from + STEP));
            }
            item -= items_of(task);
        }
    }

    void reduce_all() const {
        for (long run = 0; run < runs(); run++) pair_up(run);
        for (long item = 0; item < items(); item++) reduce(item);
    }

    // Adds to some columns of the results of a product what the second factors make of that.
    void add(long from, long to, const Results<T>& results) const {
        for (size_t run = 0; run < firsts.size(); run++)
            for (long row = 0; row < firsts[run].count; row++) {
                const Results<T> own = results.from(runs_of[run].first + row);
                add_row(*runs_of[run].added, firsts[run].out + row * firsts[run].n, from, to, own);
            }
    }

  private:
    struct Run {
        const LowRank* added;
        long first;  // row
    };
    using L = Lanes<T>;
    static constexpr long STEP = W::columns_of_panel;
    std::vector<Task> firsts;  // of the runs
    std::vector<Run> runs_of;

    static void add_row(const LowRank& added, const T* reduced, long from, long to, const Results<T>& results) {
        for (long i = 0; i < added.count; reduced += added.outputs[i].rank, i++) {
            const LowRankOutputs& each = added.outputs[i];
            T* sums = (results.out ? results.out : results.sums) + each.first;
            const float multiplier = (results.out ? 1.0f : results.multiplier) * each.scale;
            const long first = std::max(0L, from - each.first), end = std::min(each.outputs, to - each.first);
            if (first < end) add_columns(each, reduced, first, end, sums, multiplier);
        }
    }
    static void add_columns(const LowRankOutputs& each, const T* reduced, long first, long end, T* to, float multiplier) {
        constexpr long WIDTH = L::width;
        for (; first + 4 * WIDTH <= end; first += 4 * WIDTH) add_blocks<4>(each, reduced, first, WIDTH, to + first, multiplier);
        for (; first + WIDTH <= end; first += WIDTH) add_blocks<1>(each, reduced, first, WIDTH, to + first, multiplier);
        if (first == end) return;
        T rest[WIDTH] = {};
        std::copy(to + first, to + end, rest);
        add_blocks<1>(each, reduced, first, end - first, rest, multiplier);
        std::copy(rest, rest + end - first, to + first);
    }
    // Adds to C blocks of columns, of which only ``count`` of a single one may be there. Each sum runs over the rank in one
    // order.
    template <int C>
    static void add_blocks(const LowRankOutputs& each, const T* reduced, long first, long count, T* to, float multiplier) {
        Floats sums[C * L::parts] = {};
        const T* weights = static_cast<const T*>(each.weights) + first;
        T rest[L::width] = {};
        for (long i = 0; i < each.rank; i++, weights += each.outputs) {
            const Floats factor = spread(up(reduced[i]));
            const bool whole = count == L::width;
            if (!whole) std::copy_n(weights, count, rest);
#pragma GCC unroll 8
            for (int p = 0; p < C * L::parts; p++)
                sums[p] = multiply_add(sums[p], factor, L::part((whole ? weights : rest) + p / L::parts * L::width, p % L::parts));
        }
        for (int c = 0; c < C; c++) {
            T* block = to + c * L::width;
            Floats values[L::parts];
            for (int p = 0; p < L::parts; p++)
                values[p] = L::part(block, p) + sums[c * L::parts + p] * spread(multiplier);
            L::store(block, values);
        }
    }
    static Line* end_of(const Task& task) {
        const long bytes = task.count * task.blocks * long(sizeof(typename W::Row));
        return reinterpret_cast<Line*>(task.rows) + (bytes + long(sizeof(Line)) - 1) / long(sizeof(Line));
    }
    static long items_of(const Task& task) { return (task.n + STEP - 1) / STEP; }
    static void pair_up(const Task& task) {
        if constexpr (W::paired)
            for (long block = 0; block < task.blocks_of_groups(); block++) task.pair_up(block);
    }
};

}  // namespace
