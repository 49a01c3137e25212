// Products of bfloat16 rows at odd shapes, in tiles: with AMX, or with TILE_INSTRUCTIONS="tile_emulation.h" anywhere.
//
// Checks that a row has the same bits alone and among others, and that all are close to sums in double precision. Prints
// a hash of the bits of each shape, to compare processors.

#include "kernels.cpp"

#include <cstdio>
#include <cstdlib>

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

void check(bool holds, const char* what) {
    if (!holds) std::fprintf(stderr, "%s\n", what), std::exit(1);
}

struct Random {
    uint64_t state = 1;
    float next() { return float((state = mix(state + GAMMA)) >> 40) / float(1 << 23) - 1; }
    std::vector<bf16> numbers(long size) {
        std::vector<bf16> values(size);
        for (bf16& value : values) value = down<bf16>(next());
        return values;
    }
};

uint64_t hash(const std::vector<bf16>& values) {
    uint64_t hash = 0;
    for (const bf16& value : values) hash = mix(hash + GAMMA + value.bits);
    return hash;
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
            check(std::fabs(up(out[row * n + j]) - sum) <= std::fabs(sum) / 256 + size * 1e-5, "a sum is wrong");
        }
}

void run(long k, long n, std::initializer_list<long> counts, int threads) {
    Random random;
    const long most = std::max(counts);
    const std::vector<bf16> rows = random.numbers(most * k), weights = random.numbers(n * k), bias = random.numbers(n);
    const Linear linear{weights.data(), bias.data(), nullptr, 0, int(BLOCK), 0};
    std::vector<bf16> alone(most * n);
    for (long row = 0; row < most; row++)
        product<bf16>(linear, rows.data() + row * k, alone.data() + row * n, 1, k, n, threads);
    check_close(alone, rows.data(), weights.data(), bias.data(), most, k, n);
    for (const long count : counts) {
        std::vector<bf16> together(count * n);
        product<bf16>(linear, rows.data(), together.data(), count, k, n, threads);
        check(!std::memcmp(together.data(), alone.data(), together.size() * sizeof(bf16)), "a row depends on others");
    }
    std::printf("%ld %ld %016lx\n", k, n, (unsigned long)hash(alone));
}

}  // namespace

int main() {
#if defined(__AMX_BF16__)
    check(!syscall(SYS_arch_prctl, 0x1023, 18), "the system does not permit tiles");
#endif
    run(1, 1, {2, 20}, 1);
    run(32, 16, {2, 3, 4, 5, 16, 17}, 1);
    run(31, 15, {2, 7, 16, 33}, 1);
    run(33, 17, {2, 3, 15, 31, 32}, 1);
    run(100, 70, {2, 3, 4, 5, 8, 13, 16, 17, 19, 20, 96, 100, 200}, 1);
    run(1024, 33, {4, 5, 20}, 1);
    run(1025, 48, {4, 5, 20}, 1);
    run(2079, 20, {2, 4, 5, 33}, 1);
    run(1056, 600, {2, 18}, 2);  // more than 1 MB of weights, in threads
#if defined(TILE_INSTRUCTIONS)
    check(tile_products > 0, "no product ran in tiles");
#endif
}
