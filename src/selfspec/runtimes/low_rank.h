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
    static constexpr long STEP = W::columns_of_panel, WIDE = 64;
    std::vector<Task> firsts;  // of the runs
    std::vector<Run> runs_of;

    static void add_row(const LowRank& added, const T* reduced, long from, long to, const Results<T>& results) {
        for (long i = 0; i < added.count; reduced += added.outputs[i].rank, i++) {
            const LowRankOutputs& each = added.outputs[i];
            T* sums = (results.out ? results.out : results.sums) + each.first;
            const float multiplier = (results.out ? 1.0f : results.multiplier) * each.scale;
            const long end = std::min(each.outputs, to - each.first);
            for (long first = std::max(0L, from - each.first); first < end; first += WIDE)
                add_columns(each, reduced, first, std::min(WIDE, end - first), sums + first, multiplier);
        }
    }
    // Each sum runs over the rank in one order.
    static void add_columns(const LowRankOutputs& each, const T* reduced, long first, long count, T* to, float multiplier) {
        const T* weights = static_cast<const T*>(each.weights) + first;
        float sums[WIDE] = {};
        for (long i = 0; i < each.rank; i++, weights += each.outputs) {
            const float factor = up(reduced[i]);
            if (count == WIDE)
                for (long j = 0; j < WIDE; j++) sums[j] += factor * up(weights[j]);
            else
                for (long j = 0; j < count; j++) sums[j] += factor * up(weights[j]);
        }
        T values[WIDE];
        for (long j = 0; j < count; j++) values[j] = down<T>(sums[j]);
        add_to(to, values, count, multiplier);
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
