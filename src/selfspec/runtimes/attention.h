// Attention of a few rows of one sequence to slots of its cache.
//
// Queries of a key head run together, a stretch of slots at a time, so that its keys and values are in the first caches
// while tiles of queries pass; in that time those of the next stretch are fetched. The sums of a query run over slots one
// by one, and a slot that it does not see adds zero. So a query gets the same bits whichever slots that it does not see
// stand between the others, and whichever queries run beside it. With AMX, bfloat16 numbers are multiplied in its tiles.

#pragma once

#include "attention_tiles.h"

namespace {

constexpr long DIM_STEP = 32;   // the size of a head is a multiple of it
constexpr float LOWEST = std::numeric_limits<float>::lowest();
constexpr long QUERIES = attends_in_tiles<bf16> ? TILED_QUERIES : 24;  // most that read keys and values together
constexpr long MARGIN = attends_in_tiles<bf16> ? PAIRED : 0;  // numbers before and after the scores of a query
constexpr int QUERY_TILE = REGISTERS == 32 ? 6 : 4;  // most queries of a tile
constexpr int TOTALS = REGISTERS == 32 ? 24 : LANES == 8 ? 12 : 8;  // vectors of sums that fit the registers

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
template <class T> struct Attention {
    using L = Lanes<T>;
    using P = ProductLanes<T>;
    using V = ValueLanes<T>;
    const Heads& sizes;
    const View& view;
    const T* queries;
    const Slots<T>& cached;  // from slot ``view.first`` on
    long rows, slots;      // slots from ``view.first`` to the last row's
    float scale, softcap;  // scores are capped where ``softcap`` is not 0
    const T* sinks;        // by query head, the score of a slot without a value that every row sees; or null
    T* out;
    float* shares;  // [heads, share_blocks], of each block of SEEN slots in the weights of the first row, or null
    long share_blocks;
    long dim = sizes.dim, group = sizes.group(), count = rows * group;  // queries of a key head
    long pitch = slots + 2 * MARGIN;  // from the scores of a query to those of the next

    // Numbers of the scores of queries.
    static long room_of(long slots) { return QUERIES * (slots + 2 * MARGIN); }

    // At most QUERIES queries of a key head, from one on. ``room`` is that of their scores.
    void run(long head, long query, long some, float* room) const {
        const Range seen{range(query).from, range(query + some - 1).to};
        float *scores = room + MARGIN, sums[QUERIES];
        if constexpr (attends_in_tiles<T>)
            score_in_tiles(head, query, some, seen, scores);
        else
            score(head, query, some, seen, scores);
        for (long i = 0; i < some; i++) {
            float* own = scores + i * pitch;
            sums[i] = soften(head, query + i, seen, own);
            if (shares && query + i < group) note(shares + (head * group + query + i) * share_blocks, own, sums[i]);
            if constexpr (attends_in_tiles<T>)
                pack(seen, own);
            else
                V::lay_out(own + seen.from, seen.to - seen.from);
        }
        if constexpr (attends_in_tiles<T>)
            mix_in_tiles(head, query, some, seen, scores, sums);
        else
            mix(head, query, some, seen, scores, sums);
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
    // Where a query is among those of all heads, and its output among all outputs.
    const T* query_at(long head, long query) const {
        return queries + (query / group * sizes.all() + head * group + query % group) * dim;
    }
    T* out_at(long head, long query) const {
        return out + (query / group * sizes.heads + head * group + query % group) * dim;
    }
    // Calls a function for each tile of queries with its size, as a constant, and the first of them.
    template <class Function> static void each_tile(long some, const Function& function) {
        const long tiles = (some + QUERY_TILE - 1) / QUERY_TILE;
        for (long i = 0; i < tiles; i++) call<QUERY_TILE>(i * some / tiles, (i + 1) * some / tiles, function);
    }
    template <int R, class Function> static void call(long from, long to, const Function& function) {
        if constexpr (R > 1)
            if (to - from < R) return call<R - 1>(from, to, function);
        function(std::integral_constant<int, R>(), from);
    }

    void score(long head, long query, long some, const Range& seen, float* scores) const {
        const long blocks = dim / P::width, stretch = std::min(STRETCH / 2, cached.stretch);
        Block<T> laid[QUERIES * MOST_DIM / P::width];  // by tile
        each_tile(some, [&](auto size, long first) {
            for (long i = 0; i < blocks * size; i++) {
                const T* from = query_at(head, query + first + i % size) + i / size * P::width;
                for (int part = 0; part < P::parts; part++) laid[first * blocks + i].parts[part] = P::part(from, part);
            }
        });
        T room[STRETCH * MOST_DIM];
        for (long slot = seen.from, count; slot < seen.to; slot += count) {
            count = std::min(stretch, seen.to - slot);
            const T* keys = cached.rows(head, slot, count, room);
            const void* coming = cached.at(head, slot + count);
            each_tile(some, [&](auto size, long first) {
                const T* next = static_cast<const T*>(coming) + stretch * first / some * dim;  // each tile fetches its share
                score_tile<size>(laid + first * blocks, keys, count, scores + first * pitch + slot, next, some);
            });
        }
    }
    template <int R>
    void score_tile(const Block<T>* laid, const T* keys, long count, float* scores, const T* next, long some) const {
        // With AVX2 as many as make one vector of scores.
        constexpr int C = LANES == 8 ? LANES / R : R > 3 ? columns<T>(R) : std::min(LANES, 2 * columns<T>(R));
        Ahead ahead{reinterpret_cast<const char*>(next), C * LINE * R / some};
        long slot = 0;
        for (; slot + C <= count; slot += C, ahead.from += dim / P::width * ahead.step)
            score_slots<R, C>(laid, keys + slot * dim, ahead, scores + slot);
        for (; slot < count; slot++) score_slots<R, 1>(laid, keys + slot * dim, ahead, scores + slot);
    }
    template <int R, int C> void score_slots(const Block<T>* laid, const T* keys, const Ahead& ahead, float* scores) const {
        Floats total[R][C] = {};
        add_blocks<R, C, T>(total, laid, keys, dim, dim / P::width, ahead);
        sum_lanes<R, C>(total, scores);
    }
    template <int R, int C> void sum_lanes(Floats (*total)[C], float* scores) const {
        constexpr int MOST = LANES / C, SOME = std::min(R, MOST);  // queries
        if constexpr (R > MOST) sum_lanes<R - MOST, C>(total + MOST, scores + MOST * pitch);
        float sums[LANES];
        const Floats found = scale * sum_each<SOME * C>(total[0]);
        std::memcpy(sums, &found, sizeof(sums));
        for (int r = 0; r < SOME; r++) std::copy_n(sums + r * C, C, scores + r * pitch);
    }

    void mix(long head, long query, long some, const Range& seen, const float* scores, const float* sums) const {
        const long vectors = dim / LANES;
        Floats totals[QUERIES * (MOST_DIM / LANES)];
        std::fill_n(totals, some * vectors, Floats{});
        T room[STRETCH * MOST_DIM];
        for (long slot = seen.from, count; slot < seen.to; slot += count) {
            count = std::min(cached.stretch, seen.to - slot);
            const T* values = cached.rows(sizes.value_of(head), slot, count, room);
            const void* coming = cached.at(sizes.value_of(head), slot + count);
            each_tile(some, [&](auto size, long first) {
                const T* next = static_cast<const T*>(coming) + cached.stretch * first / some * dim;
                const float* weights = V::weights(scores + first * pitch + seen.from, slot - seen.from);
                mix_tile<size>(values, count, weights, totals + first * vectors, next, some);
            });
        }
        for (long i = 0; i < some; i++) finish(head, query + i, totals + i * vectors, sums[i]);
    }
    // Writes an output, whose sums are overwritten.
    void finish(long head, long query, Floats* total, float sum) const {
        T* to = out_at(head, query);
        for (long part = 0; part < dim / LANES; part++) total[part] /= sum;
        for (long part = 0; part < dim / LANES; part += L::parts) L::store(to + part * LANES, total + part);
    }
    template <int R>
    void mix_tile(const T* values, long count, const float* weights, Floats* totals, const T* next, long some) const {
        constexpr int PARTS = power_below(std::min(TOTALS / R, 64 / LANES)), HALF = std::min(PARTS, 32 / LANES);
        const long step = PARTS * LANES * V::slots * R / some;
        long start = 0;
        for (; start + PARTS * LANES <= dim; start += PARTS * LANES, next += cached.stretch / V::slots * step)
            add_values<R, PARTS>(values + start, count, weights, totals + start / LANES, next, step);
        if (start < dim) add_values<R, HALF>(values + start, count, weights, totals + start / LANES, next, step);
    }
    static constexpr int power_below(int most) { return most < 2 ? 1 : 2 * power_below(most / 2); }
    // Adds weighted values to PARTS vectors of the totals of R queries; meanwhile fetches ``step`` numbers with each. Not
    // inlined: a compiler that has the whole attention before it keeps the totals in memory.
    template <int R, int PARTS>
    __attribute__((noinline)) void add_values(const T* row, long count, const float* weights, Floats* totals, const T* next,
                                              long step) const {
        constexpr int LINES = (PARTS * LANES * V::slots * sizeof(T) + LINE - 1) / LINE;
        const long vectors = dim / LANES;
        Floats total[R][PARTS];
        for (int r = 0; r < R; r++) std::copy_n(totals + r * vectors, PARTS, total[r]);
        for (long slot = 0; slot < count; slot += V::slots, row += V::slots * dim, weights++, next += step) {
            const T* second = slot + 1 < count ? row + dim : row;  // of a pair
#pragma GCC unroll 8
            for (int i = 0; i < LINES; i++) __builtin_prefetch(reinterpret_cast<const char*>(next) + i * LINE, 0, 2);
#pragma GCC unroll 8
            for (int i = 0; i < PARTS; i++) {
                const long entry = i / L::parts * L::width;
                const auto part = V::part(row + entry, second + entry, i % L::parts);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) total[r][i] = V::add(total[r][i], weights + r * pitch, part);
            }
        }
        for (int r = 0; r < R; r++) std::copy_n(total[r], PARTS, totals + r * vectors);
    }

#if defined(ATTENDS_IN_TILES)
    void score_in_tiles(long head, long query, long some, const Range& seen, float* scores) const {
        QueryTiles tiles(some, dim, [&](long i) { return query_at(head, query + i); });
        T room[STRETCH * MOST_DIM];
        for (long slot = seen.from, count; slot < seen.to; slot += count) {
            count = std::min(cached.stretch, seen.to - slot);
            tiles.score(cached.rows(head, slot, count, room), count, scale, scores + slot, pitch);
        }
    }
    // The slot at which the block of a slot begins; perhaps before the first one.
    long block_of(long slot) const { return slot - (view.first + slot) % PAIRED; }
    // Packs the weights of a query from the beginning of a block to the end of one. What no query sees is zero.
    void pack(const Range& seen, float* scores) const {
        const long from = block_of(seen.from), to = block_of(seen.to + PAIRED - 1);
        std::fill(scores + from, scores + seen.from, 0.0f);
        std::fill(scores + seen.to, scores + to, 0.0f);
        pack_weights(scores + from, to - from);
    }
    void mix_in_tiles(long head, long query, long some, const Range& seen, const float* scores, const float* sums) const {
        ValueTiles tiles(some, dim);
        const long value = sizes.value_of(head), start = block_of(seen.from), straight = straight_slots(query, some, seen);
        const T* packed = reinterpret_cast<const T*>(scores + start);
        T room[STRETCH * MOST_DIM];
        for (long slot = seen.from, end; slot < straight; slot = end) {
            const long from = block_of(slot);
            end = std::min(straight, from + cached.stretch);
            const T* values = cached.rows(value, slot, end - slot, room);
            tiles.add(values, slot - from, end - from, packed + from - start, 4 * pitch, cached.at(value, end));
        }
        for (long i = 0; straight < seen.to && i < some; i++) mix_alone(tiles, value, query + i, i, {straight, seen.to}, packed - start);
        for (long i = 0; i < some; i++) {
            Floats totals[MOST_DIM / LANES];
            std::memcpy(totals, tiles.of(i), dim * sizeof(float));
            finish(head, query + i, totals, sums[i]);
        }
    }
    // Up to which slot all of some queries see every slot after their first ones: whole blocks, or the end.
    long straight_slots(long query, long some, const Range& seen) const {
        if (!view.visible) return seen.to;
        long end = seen.to;
        for (long row = query / group; row <= (query + some - 1) / group; row++) {
            const bool* visible = view.visible + row * slots;
            const bool* first = std::find(visible + seen.from, visible + seen.to, true);
            end = std::min(end, long(std::find(first, visible + seen.to, false) - visible));
        }
        return end < seen.to ? std::max(seen.from, block_of(end)) : end;
    }
    // Adds what a query sees of the last slots, as if nothing were between them.
    void mix_alone(ValueTiles& tiles, long value, long query, long place, const Range& last, const T* weights) const {
        const bool* visible = view.visible + query / group * slots;
        const long first = std::find(visible, visible + last.to, true) - visible;
        T room[MOST_DIM], values[PAIRED * MOST_DIM];
        long slot = std::max(first, last.from), begin = (view.first + slot) % PAIRED;
        for (; slot < last.to; begin = 0) {
            T own[TILED_QUERIES][PAIRED] = {};
            long count = begin;
            for (; count < PAIRED && slot < last.to; slot++)
                if (visible[slot]) {
                    own[place][count] = weights[2 * place * pitch + slot];
                    std::copy_n(cached.rows(value, slot, 1, room), dim, values + (count++ - begin) * dim);
                }
            tiles.add(values, begin, count, own[0], sizeof(own[0]), values);
        }
    }
#endif

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
        for (long slot = seen.from; slot < seen.to; slot++) scores[slot] = exponential_below(scores[slot] - highest);
        if (visible)
#pragma omp simd
            for (long slot = seen.from; slot < seen.to; slot++) scores[slot] *= float(visible[slot]);
        std::fill(scores + all.from, scores + seen.from, 0.0f);
        std::fill(scores + seen.to, scores + all.to, 0.0f);
        const float sum = whole(seen, visible, scores);
        return sinks ? sum + exponential(sink - highest) : sum;
    }
    // Moves the shares of blocks halfway to those of a query, whose exponentials are ``scores``.
    void note(float* to, const float* scores, float sum) const {
        for (long from = 0; from < slots; from += SEEN, to++) {
            const long end = std::min(from + SEEN, slots);
            float own = 0;
#pragma omp simd reduction(+ : own)
            for (long slot = from; slot < end; slot++) own += scores[slot];
            *to = 0.5f * (*to + own / sum);
        }
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
