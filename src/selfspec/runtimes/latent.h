// Attention to latents, as DeepSeek has it: keys and values of all heads are linear functions of one row a slot.
//
// The rows of the cache are latents, each with the rotated entries of the keys after it. Slots are not expanded: a query is
// multiplied by what would expand keys, so that its product with a latent is that with the key; latents are mixed, and the
// mixture is expanded to a value.

#pragma once

#include "mixture.h"

namespace {

struct LatentWeights {
    Linear inputs;   // queries, or what they are made of; then a latent and the entries of a key that are rotated
    Linear queries;  // of the first ``rank`` outputs, normed; none where ``rank`` is 0
    Linear output;
    const void* expanding;  // keys and values by latents, [heads, key + value, latent]
    Norm query_norm, latent_norm;
    long rank, heads;
    long key, value, turned, latent;  // entries: of a head's key that are not rotated, of its value, rotated ones, of a latent
    int halves;  // rotated neighbours are put into two halves
    float scale;
    int layer;

    long query() const { return key + turned; }
    long width() const { return latent + turned; }  // of a row of the cache
    long first() const { return rank ? rank : heads * query(); }
    long entered() const { return first() + width(); }
    Heads sizes() const { return {heads, 1, width(), 1}; }
};

// Rotates neighbouring entries, and may put the first and the second ones into two halves.
template <class T> void rotate_neighbours(T* entries, const CosSin& turn, long row, bool halves) {
    turn.is_float ? rotate<T, float>(entries, turn, row, true) : rotate<T, T>(entries, turn, row, true);
    if (!halves) return;
    T turned[MOST_DIM];
    std::copy_n(entries, turn.dim, turned);
    for (long i = 0; i < turn.dim; i++) entries[i / 2 + i % 2 * (turn.dim / 2)] = turned[i];
}

// to[j] = sum over i of from[i] * weights[i][j]. Not inlined; see ``choose_experts``.
template <class T> __attribute__((noinline)) void combine_rows(const T* from, const T* weights, T* to, long count, long width) {
    constexpr long SOME = 64;
    for (long start = 0; start < width; start += SOME) {
        const long some = std::min(SOME, width - start);
        float sums[SOME] = {};
        for (long i = 0; i < count; i++) {
            const float factor = up(from[i]);
            const T* row = weights + i * width + start;
#pragma omp simd
            for (long j = 0; j < some; j++) sums[j] += factor * up(row[j]);
        }
        for (long j = 0; j < some; j++) to[start + j] = down<T>(sums[j]);
    }
}

// Rows on their way through attention to latents. All threads of a team call the same functions, except for ``reserve``.
template <class T> class LatentRows {
  public:
    void reserve(const LatentWeights& l, long rows) {
        sizes[0] = std::max(sizes[0], l.rank ? rows * l.heads * l.query() : 0);
        sizes[1] = std::max(sizes[1], rows * l.sizes().all() * l.width());
        sizes[2] = std::max(sizes[2], rows * l.heads * l.width());
    }
    // Once everything is reserved.
    void allocate() {
        for (int i = 0; i < 3; i++)
            if (sizes[i]) memory[i].reset(new T[sizes[i]]);
    }
    T* queries() const { return memory[0].get(); }   // [rows, heads, query]
    T* absorbed() const { return memory[1].get(); }  // [rows, heads and the two of a key head, width]
    T* mixed() const { return memory[2].get(); }     // [rows, heads, width], of which the latent counts

    // Absorbs the queries of some rows, of which ``from`` gives that of a row and a head.
    template <class From> void absorb(const LatentWeights& l, const CosSin& turn, long rows, const From& from) const {
#pragma omp for
        for (long item = 0; item < l.heads * rows; item++) {
            const long head = item / rows, row = item % rows;  // the weights of a head serve all rows
            T *query = from(row, head), *to = absorbed() + (row * l.sizes().all() + head) * l.width();
            rotate_neighbours(query + l.key, turn, row, l.halves);
            combine_rows(query, weights(l, head), to, l.key, l.latent);
            std::copy_n(query + l.key, l.turned, to + l.latent);
        }
    }
    // Expands the mixed latents of some rows to values, [rows, heads, value].
    void expand(const LatentWeights& l, long rows, T* to) const {
#pragma omp for
        for (long item = 0; item < l.heads * rows; item++) {
            const long head = item / rows, row = item % rows, place = row * l.heads + head;
            const T *from = mixed() + place * l.width(), *own = weights(l, head) + l.key * l.latent;
            for (long i = 0; i < l.value; i++)
                to[place * l.value + i] = down<T>(inner_product(from, own + i * l.latent, l.latent));
        }
    }

  private:
    long sizes[3] = {};
    std::unique_ptr<T[]> memory[3];

    static const T* weights(const LatentWeights& l, long head) {
        return static_cast<const T*>(l.expanding) + head * (l.key + l.value) * l.latent;
    }
};

}  // namespace
