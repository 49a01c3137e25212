// What attention multiplies in the tiles of AMX: queries with keys, and weights with values.
//
// Both are products of bfloat16 numbers. A score is a sum over the numbers of a head, so it does not depend on what stands
// beside it. An output is a sum over slots, block after block of 32: the even slots of a block, the odd ones, and both
// together. So blocks begin where slots are multiples of 32 in the cache, and slots that a query sees go without those
// between them that it does not see.

#pragma once

#include "slots.h"
#include "thread_tiles.h"

namespace {

#if defined(HAS_TILES) && defined(__AVX512F__)
#define ATTENDS_IN_TILES
#endif

constexpr long PAIRED = 32;         // numbers of a sum that tiles multiply at a time
constexpr long TILED_QUERIES = 32;  // most queries that they multiply

// Whether attention of a dtype runs in tiles.
#if defined(ATTENDS_IN_TILES)
template <class T> constexpr bool attends_in_tiles = std::is_same_v<T, bf16>;
#else
template <class T> constexpr bool attends_in_tiles = false;
#endif

#if defined(ATTENDS_IN_TILES)
static_assert(TILED_QUERIES == 2 * TILE_ROWS, "queries are in two tiles");

// Queries that are multiplied with keys, 16 slots at a time. Sums are tiles 0 and 1, keys 4, queries 6 and 7.
class QueryTiles {
    static constexpr long SOON = 2 * TILE_ROWS;  // slots that keys are fetched ahead
    const long count, dim;
    alignas(64) uint32_t laid[2][MOST_DIM / PAIRED][TILE_ROWS][TILE_ROWS];  // pairs of numbers by query
    alignas(64) float found[2][TILE_ROWS][TILE_ROWS] = {};                  // by query

    template <int N> void multiply(const bf16* keys) {
        zero_tile<0>();
        if constexpr (N > 1) zero_tile<1>();
        const bf16* soon = keys + SOON * dim;
        for (long block = 0; block < dim / PAIRED; block++) {
            for (long line = 0; line < TILE_ROWS; line++, soon += PAIRED) __builtin_prefetch(soon);
            load_tile<4>(keys + block * PAIRED, 2 * dim);
            load_tile<6>(laid[0][block], sizeof(laid[0][0][0]));
            multiply_tiles<0, 4, 6>();
            if constexpr (N > 1) {
                load_tile<7>(laid[1][block], sizeof(laid[0][0][0]));
                multiply_tiles<1, 4, 7>();
            }
        }
        store_tile<0>(found[0], sizeof(found[0][0]));
        if constexpr (N > 1) store_tile<1>(found[1], sizeof(found[0][0]));
    }

    // Writes scaled sums [slots, queries] by query.
    static void write(const float (&from)[TILE_ROWS][TILE_ROWS], long slots, long queries, float scale, float* to, long stride) {
        if (queries == 0) return;
        __m512i lines[TILE_ROWS];
        for (long slot = 0; slot < TILE_ROWS; slot++) lines[slot] = (__m512i)(load<Floats>(from[slot]) * scale);
        transpose(lines);
        for (long query = 0; query < queries; query++) _mm512_mask_storeu_epi32(to + query * stride, first_words(slots), lines[query]);
    }

  public:
    // ``query`` gives the numbers of each.
    template <class Query> QueryTiles(long count, long dim, const Query& query) : count(count), dim(dim) {
        alignas(64) bf16 rows[TILE_ROWS][MOST_DIM];
        for (int n = 0; n < 2; n++) {
            const long some = part(count, n);
            for (long i = 0; i < some; i++) std::copy_n(query(n * TILE_ROWS + i), dim, rows[i]);
            for (long block = 0; some && block < dim / PAIRED; block++)
                transpose(rows[0] + block * PAIRED, MOST_DIM / 2, laid[n][block], TILE_ROWS, some, TILE_ROWS);
        }
        TilesOfThread::shape(1L << 32 | count, [=](TileShapes& shapes) {
            for (int n = 0; n < 2; n++)
                if (const long some = part(count, n)) shapes.set(n, TILE_ROWS, 4 * some), shapes.set(6 + n, TILE_ROWS, 4 * some);
            shapes.set(4, TILE_ROWS, 2 * PAIRED);
        });
    }
    // Writes the scaled scores of some keys, one after the other, [count, stride].
    void score(const bf16* keys, long some, float scale, float* scores, long stride) {
        for (long first = 0; first < some; first += TILE_ROWS, keys += TILE_ROWS * dim, scores += TILE_ROWS) {
            const long own = std::min(TILE_ROWS, some - first);
            const bf16* from = keys;
            alignas(64) bf16 last[TILE_ROWS * MOST_DIM];
            if (own < TILE_ROWS) {  // memory after the keys is not theirs
                std::copy_n(keys, own * dim, last);
                std::fill(last + own * dim, last + TILE_ROWS * dim, bf16{});
                from = last;
            }
            count > TILE_ROWS ? multiply<2>(from) : multiply<1>(from);
            for (int n = 0; n < 2; n++) write(found[n], own, part(count, n), scale, scores + n * TILE_ROWS * stride, stride);
        }
    }
};

// Values that are multiplied with the weights of queries, and the sums of each query, which begin as zeros. Sums are tiles 0
// to 3, weights 4 and 5, values 6 and 7.
class ValueTiles {
    static constexpr long BLOCKS = STRETCH / PAIRED;  // most at a time
    const long count, dim;
    alignas(64) float sums[TILED_QUERIES * MOST_DIM];  // [query, dim], even numbers of 32 before the odd ones
    alignas(64) uint32_t laid[BLOCKS][2][TILE_ROWS][TILE_ROWS];  // 32 numbers of pairs of slots, even and odd ones

    template <int N> void add(long blocks, const bf16* weights, long stride, float* sums, const bf16* coming) {
        each_sum<N>([&](auto tile, long place) { load_tile<tile>(sums + place, 4 * dim); });
        for (long block = 0; block < blocks; block++, weights += PAIRED) {
            for (long i = 0; i < TILE_ROWS; i++, coming += 2 * PAIRED) __builtin_prefetch(coming + PAIRED, 0, 2);
            load_tile<4>(weights, stride);
            load_tile<6>(laid[block][0], sizeof(laid[0][0][0]));
            load_tile<7>(laid[block][1], sizeof(laid[0][0][0]));
            multiply_tiles<0, 4, 6>();
            multiply_tiles<1, 4, 7>();
            if constexpr (N > 1) {
                load_tile<5>(weights + TILE_ROWS * stride / 2, stride);
                multiply_tiles<2, 5, 6>();
                multiply_tiles<3, 5, 7>();
            }
        }
        each_sum<N>([&](auto tile, long place) { store_tile<tile>(sums + place, 4 * dim); });
    }
    // Calls a function with each tile of sums, and its place among them.
    template <int N, class Function> void each_sum(const Function& function) const {
        function(std::integral_constant<int, 0>(), 0);
        function(std::integral_constant<int, 1>(), TILE_ROWS);
        if constexpr (N > 1) function(std::integral_constant<int, 2>(), TILE_ROWS * dim);
        if constexpr (N > 1) function(std::integral_constant<int, 3>(), TILE_ROWS * dim + TILE_ROWS);
    }
    // Arranges 32 numbers of each slot of a block in pairs.
    void lay_out(const bf16* values, uint32_t (*to)[TILE_ROWS][TILE_ROWS], const bf16* coming) const {
        for (long pair = 0; pair < TILE_ROWS; pair++, values += 2 * dim, coming += 2 * PAIRED) {
            __builtin_prefetch(coming, 0, 2);
            const Words one = load<Words>(values), other = load<Words>(values + dim);
            const Words even = (one & 0xffffu) | other << 16, odd = one >> 16 | (other & 0xffff0000u);
            std::memcpy(to[0][pair], &even, sizeof(even));
            std::memcpy(to[1][pair], &odd, sizeof(odd));
        }
    }

  public:
    ValueTiles(long count, long dim) : count(count), dim(dim) {
        std::fill_n(sums, count * dim, 0.0f);
        TilesOfThread::shape(2L << 32 | count, [=](TileShapes& shapes) {
            for (int n = 0; n < 2; n++)
                if (const long some = part(count, n)) {
                    shapes.set(2 * n, some, 64), shapes.set(2 * n + 1, some, 64);
                    shapes.set(4 + n, some, 2 * PAIRED);
                }
            for (int tile : {6, 7}) shapes.set(tile, TILE_ROWS, 64);
        });
    }
    // Adds the products of weights, rounded and packed, ``stride`` bytes from query to query, and the values of slots from
    // ``first`` on in a block, [slots, dim], up to ``last``; at most STRETCH. The others of their blocks count as zeros.
    // Meanwhile those that are added next are fetched.
    void add(const bf16* values, long first, long last, const bf16* weights, long stride, const void* coming) {
        const long blocks = (last + PAIRED - 1) / PAIRED;
        const bf16* from[BLOCKS];
        bf16 edges[2][PAIRED * MOST_DIM];
        for (long block = 0; block < blocks; block++) {
            const long begin = std::max(first, block * PAIRED), end = std::min(last, (block + 1) * PAIRED);
            const bf16* own = from[block] = values + (begin - first) * dim;
            if (end - begin == PAIRED) continue;
            bf16* edge = edges[block > 0];
            std::fill_n(edge, PAIRED * dim, bf16{});
            std::copy_n(own, (end - begin) * dim, edge + begin % PAIRED * dim);
            from[block] = edge;
        }
        // While values are arranged and multiplied, even and odd lines of those that come are fetched.
        const auto* soon = static_cast<const bf16*>(coming);
        for (long start = 0; start < dim; start += PAIRED, soon += blocks * PAIRED * PAIRED) {
            for (long block = 0; block < blocks; block++)
                lay_out(from[block] + start, laid[block], soon + block * PAIRED * PAIRED);
            if (count > TILE_ROWS)
                add<2>(blocks, weights, stride, sums + start, soon);
            else
                add<1>(blocks, weights, stride, sums + start, soon);
        }
    }
    // The sums of a query: of 32 numbers after each other a vector of the even ones, then one of the odd ones.
    const float* of(long query) const { return sums + query * dim; }
};

// Rounds weights and packs them in place, after each other; ``count`` is a multiple of PAIRED.
inline void pack_weights(float* weights, long count) {
    for (long i = 0; i < count; i += PAIRED) {
#if defined(__AVX512BF16__)
        const auto packed = (Words)_mm512_cvtne2ps_pbh(load<__m512>(weights + i + LANES), load<__m512>(weights + i));
        std::memcpy(weights + i / 2, &packed, sizeof(packed));
#else
        bf16 packed[PAIRED];
        for (long j = 0; j < PAIRED; j++) packed[j] = down<bf16>(weights[i + j]);
        std::memcpy(weights + i / 2, packed, sizeof(packed));
#endif
    }
}
#endif

}  // namespace
