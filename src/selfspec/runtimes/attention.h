// Attention of a few rows of one sequence to slots of its cache.
//
// The sums of a query run over slots one by one, and a slot that it does not see adds zero. So a query gets the same
// bits whichever slots that it does not see stand between the others.

#pragma once

#include "slots.h"

namespace {

constexpr long DIM_STEP = 32;   // the size of a head is a multiple of it
constexpr float LOWEST = std::numeric_limits<float>::lowest();
constexpr long QUERIES = REGISTERS == 32 ? 6 : 4;  // most queries that read the keys and values of a key head together
constexpr int TOTALS = REGISTERS == 32 ? 24 : 8;   // vectors of outputs that fit the registers

// Sizes of an attention branch.
struct Heads {
    long heads, key_heads, dim;
    int shared;  // a key is the value, too
    long all() const { return heads + 2 * key_heads; }
    long group() const { return heads / key_heads; }
    long value_of(long key_head) const { return shared ? key_head : key_heads + key_head; }
};

// What the rows of a sequence see through a window. Without ``visible`` they are causal: a row sees the slots up to its
// own, of these the last ``window`` where that is not 0.
struct View {
    const bool* visible;  // [rows, slots from first on], or null
    long first, window;   // the first slot that any row sees
};

// Rows of all heads' queries, keys and values, [rows, all heads, dim]; out is [rows, heads * dim].
template <class T, class Slots> struct Attention {
    using L = Lanes<T>;
    using P = ProductLanes<T>;
    const Heads& sizes;
    const View& view;
    const T* queries;
    const Slots& cached;   // from slot ``view.first`` on
    long rows, slots;      // slots from ``view.first`` to the last row's
    float scale, softcap;  // scores are capped where ``softcap`` is not 0
    const T* sinks;        // by query head, the score of a slot without a value that every row sees; or null
    T* out;
    long dim = sizes.dim, group = sizes.group(), count = rows * group;  // queries of a key head

    // Some queries of a key head, at most R, from one on. scores has room for as many times the slots.
    template <int R = QUERIES> void run_some(long head, long query, long some, float* scores) const {
        if constexpr (R > 1)
            if (some < R) return run_some<R - 1>(head, query, some, scores);
        run<R>(head, query, scores);
    }

  private:
    // The slots that a query may see, counted from ``view.first``.
    struct Range {
        long from, to;
    };
    Range range(long query) const {
        if (view.visible) return {0, slots};
        const long to = slots - rows + query / group + 1;
        return {view.window ? std::max(0L, to - view.window) : 0, to};
    }

    template <int R> void run(long head, long query, float* scores) const {
        const Range seen{range(query).from, range(query + R - 1).to};
        score<R>(head, query, seen, scores);
        float whole[R];
        for (int r = 0; r < R; r++) whole[r] = soften(head, query + r, seen, scores + r * slots);
        constexpr int PARTS = power_below(std::min(TOTALS / R, 64 / LANES)), HALF = 32 / LANES;
        long start = 0;
        for (; start + PARTS * LANES <= dim; start += PARTS * LANES) mix<R, PARTS>(head, query, start, seen, scores, whole);
        if (start < dim) mix<R, std::min(PARTS, HALF)>(head, query, start, seen, scores, whole);
    }
    static constexpr int power_below(int most) { return most < 2 ? 1 : 2 * power_below(most / 2); }
    // PARTS vectors of each query's output, from entry ``start`` of the head on. Not inlined: a compiler that has the whole
    // attention before it keeps the totals in memory.
    template <int R, int PARTS>
    __attribute__((noinline)) void mix(long head, long query, long start, const Range& seen, const float* scores, const float* whole) const {
        Floats total[R][PARTS] = {};
        const typename Slots::Cached* row = cached.row(sizes.value_of(head), seen.from);
        for (long slot = seen.from; slot < seen.to; slot++, row += cached.width)
            add_value<R, PARTS>(total, row, start, scores + slot);
        for (int r = 0; r < R; r++) {
            for (int i = 0; i < PARTS; i++) total[r][i] /= whole[r];
            Slots::template store<PARTS>(
                out + ((query + r) / group * sizes.heads + head * group + (query + r) % group) * dim + start, total[r]);
        }
    }
    template <int R, int PARTS>
    void add_value(Floats (&total)[R][PARTS], const typename Slots::Cached* row, long start, const float* scores) const {
#pragma GCC unroll 8
        for (int i = 0; i < PARTS; i++) {
            const Floats part = cached.part(row, start, i);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) total[r][i] = L::add(total[r][i], spread(scores[r * slots]), part);
        }
    }
    template <int R> void score(long head, long query, const Range& seen, float* scores) const {
        const long blocks = dim / P::width;
        Block<T> laid[R * MOST_DIM / P::width];
        for (int r = 0; r < R; r++) {
            const T* from = queries + ((query + r) / group * sizes.all() + head * group + (query + r) % group) * dim;
            for (long block = 0; block < blocks; block++)
                for (int part = 0; part < P::parts; part++)
                    laid[block * R + r].parts[part] = P::part(from + block * P::width, part);
        }
        constexpr int C = R > 3 ? columns<T>(R) : std::min(LANES, 2 * columns<T>(R));
        T room[Slots::room];
        for (long first = seen.from, count; first < seen.to; first += count) {
            count = std::min(Slots::some, seen.to - first);
            const T* from = cached.rows(head, first, count, room);
            long i = 0;
            for (; i + C <= count; i += C) score_slots<R, C>(laid, from, i, scores + first);
            for (; i < count; i++) score_slots<R, 1>(laid, from, i, scores + first);
        }
    }
    template <int R, int C> void score_slots(const Block<T>* laid, const T* from, long slot, float* scores) const {
        Floats total[R][C] = {};
        const Ahead ahead{reinterpret_cast<const char*>(from + (slot + 3 * C) * dim), C * LINE};
        add_blocks<R, C, T>(total, laid, from + slot * dim, dim, dim / P::width, ahead);
        for (int r = 0; r < R; r++) {
            const Floats sums = scale * sum_each<C>(total[r]);
            std::memcpy(scores + r * slots + slot, &sums, C * sizeof(float));
        }
    }

    // The scores of a query to their exponentials, 0 for slots that it does not see; returns their sum, with that of the sink.
    float soften(long head, long query, const Range& all, float* scores) const {
        const Range seen = range(query);
        const bool* visible = view.visible ? view.visible + query / group * slots : nullptr;
        if (softcap != 0)
#pragma omp simd
            for (long slot = seen.from; slot < seen.to; slot++)
                scores[slot] = softcap * hyperbolic_tangent(scores[slot] / softcap);
        if (visible)
            for (long slot = seen.from; slot < seen.to; slot++)
                if (!visible[slot]) scores[slot] = LOWEST;
        const float sink = sinks ? up(sinks[head * group + query % group]) : LOWEST;
        float highest = sink;
#pragma omp simd reduction(max : highest)
        for (long slot = seen.from; slot < seen.to; slot++) highest = scores[slot] > highest ? scores[slot] : highest;
#pragma omp simd
        for (long slot = seen.from; slot < seen.to; slot++) scores[slot] = exponential(scores[slot] - highest);
        if (visible)
#pragma omp simd
            for (long slot = seen.from; slot < seen.to; slot++) scores[slot] *= float(visible[slot]);
        std::fill(scores + all.from, scores + seen.from, 0.0f);
        std::fill(scores + seen.to, scores + all.to, 0.0f);
        const float sum = whole(seen, visible, scores);
        return sinks ? sum + exponential(sink - highest) : sum;
    }
    // The sum of a query's exponentials: lane by lane, where a slot's lane is its place among those that the query sees.
    static float whole(Range seen, const bool* visible, const float* scores) {
        long straight = seen.to;  // the slots before it are seen, one after the other
        if (visible) {
            while (seen.from < seen.to && !visible[seen.from]) seen.from++;
            straight = std::find(visible + seen.from, visible + seen.to, false) - visible;
        }
        Floats sums = {};
        long slot = seen.from;
        for (; slot + LANES <= straight; slot += LANES) sums += load<Floats>(scores + slot);
        for (int lane = 0; slot < seen.to; slot++)
            if (!visible || visible[slot]) sums[lane++ % LANES] += scores[slot];
        return sum<LANES>(sums);
    }
};

}  // namespace
