// Products of bfloat16 rows at odd shapes, in tiles: with AMX, or with TILE_INSTRUCTIONS="tile_emulation.h" anywhere.
//
// Checks that a row has the same bits alone and among others, and that all are close to sums in double precision. Prints
// a hash of the bits of the sums of each shape, before they are rounded to bfloat16, to compare processors.

#include "kernels.cpp"

#include <cstdio>
#include <cstdlib>

#include "permission.h"

namespace {

constexpr long FEWEST = 18;        // rows of a shape at least
constexpr double TINY = 0x1p-126;  // what is less is zero in tiles

void check(bool holds, const char* what) {
    if (!holds) std::fprintf(stderr, "%s\n", what), std::exit(1);
}

struct Random {
    uint64_t state = 1;
    float next() { return float((state = mix(state + GAMMA)) >> 40) / float(1 << 23) - 1; }
    std::vector<bf16> numbers(long size, float scale) {
        std::vector<bf16> values(size);
        for (bf16& value : values) value = down<bf16>(next() * scale);
        return values;
    }
};

uint64_t hash(const std::vector<float>& values) {
    uint64_t hash = 0;
    for (const float value : values) hash = mix(hash + GAMMA + load<uint32_t>(&value));
    return hash;
}

// The sums [R, n] of the first R rows, as a product has them before it rounds.
template <int R> std::vector<float> sums(const Linear& linear, const bf16* rows, long k, long n) {
    const Tiled weights(linear, k);
    std::vector<Tiled::Row> laid(R * weights.blocks());
    const Product<bf16, Tiled> task{weights, nullptr, nullptr, nullptr, 1, R, k, n, laid.data()};
    for (long row = 0; row < R; row++) task.lay_out(rows + row * k, row);
    for (long block = 0; block < task.blocks_of_groups(); block++) task.pair_up(block);
    std::vector<float> all(R * n);
    Ahead ahead = weights.ahead(0, n, true, 1);
    for (long from = 0; from < n; from += Tiled::widest_panel) {
        const long to = std::min(n, from + Tiled::widest_panel);
        float panel[R][Tiled::widest_panel] = {};
        weights.band<R>(laid.data(), from, to, 0, weights.blocks(), panel[0], Tiled::widest_panel, true, ahead);
        for (long row = 0; row < R; row++) std::copy_n(panel[row], to - from, all.data() + row * n + from);
    }
    return all;
}

void check_close(const std::vector<bf16>& out, const bf16* rows, const bf16* weights, const bf16* bias, long count, long k,
                 long n) {
    for (long row = 0; row < count; row++)
        for (long j = 0; j < n; j++) {
            double sum = up(bias[j]), size = 0;
            for (long i = 0; i < k; i++) {
                const double term = double(up(rows[row * k + i])) * up(weights[j * k + i]);
                sum += term, size += std::fabs(term);
            }
            check(std::fabs(up(out[row * n + j]) - sum) <= std::fabs(sum) / 256 + size * 1e-5 + k * TINY, "a sum is wrong");
        }
}

void run(long k, long n, std::initializer_list<long> counts, int threads, float scale = 1) {
    Random random;
    const long most = std::max(counts);
    const std::vector<bf16> rows = random.numbers(most * k, scale), weights = random.numbers(n * k, scale);
    const std::vector<bf16> bias = random.numbers(n, scale * scale);
    const Linear linear{weights.data(), bias.data(), nullptr, 0, int(BLOCK)};
    std::vector<bf16> alone(most * n);
    for (long row = 0; row < most; row++)
        product<bf16>(linear, rows.data() + row * k, alone.data() + row * n, 1, k, n, threads);
    check_close(alone, rows.data(), weights.data(), bias.data(), most, k, n);
    for (const long count : counts) {
        std::vector<bf16> together(count * n);
        product<bf16>(linear, rows.data(), together.data(), count, k, n, threads);
        check(!std::memcmp(together.data(), alone.data(), together.size() * sizeof(bf16)), "a row depends on others");
    }
    const std::vector<float> together = sums<FEWEST>(linear, rows.data(), k, n);
    for (long row = 0; row < FEWEST; row++) {
        const std::vector<float> own = sums<1>(linear, rows.data() + row * k, k, n);
        check(!std::memcmp(own.data(), together.data() + row * n, n * sizeof(float)), "a sum depends on other rows");
    }
    std::printf("%ld %ld %016lx\n", k, n, (unsigned long)hash(together));
}

}  // namespace

int main() {
    check(permits_tiles(), "the system does not permit tiles");
    run(1, 1, {2, 20}, 1);
    run(32, 16, {2, 3, 4, 5, 16, 17, 18}, 1);
    run(31, 15, {2, 7, 16, 33}, 1);
    run(33, 17, {2, 3, 15, 31, 32}, 1);
    run(100, 70, {2, 3, 4, 5, 8, 13, 16, 17, 19, 20, 96, 100, 200}, 1);
    run(1024, 33, {4, 5, 20}, 1);
    run(1025, 48, {4, 5, 20}, 1);
    run(2079, 20, {2, 4, 5, 33}, 1);
    run(1056, 600, {2, 18}, 2);  // more than 1 MB of weights, in threads
    run(96, 40, {2, 3, 18}, 1, 0x1p-63f);  // many products are denormal
#if defined(TILE_INSTRUCTIONS)
    check(tile_products > 0, "no product ran in tiles");
#endif
}
