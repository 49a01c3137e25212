// Bytes a second at which memory is read by OMP_NUM_THREADS threads: the bound of decoding. Prints one number a pass.
// It is in pages of 2 MB where Linux gives them, as the weights are. Arguments: mebibytes, larger than every cache; passes.

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace {

constexpr long SUMS = 32;  // independent, so that no addition waits for the one before it

std::uint64_t read_all(const std::uint64_t* values, long count) {
    std::uint64_t total = 0;
#pragma omp parallel for schedule(static) reduction(^ : total)
    for (long start = 0; start < count; start += 4096) {
        std::uint64_t sums[SUMS] = {};
        for (long i = start; i < start + 4096; i += SUMS)
            for (long j = 0; j < SUMS; j++) sums[j] ^= values[i + j];
        for (std::uint64_t sum : sums) total ^= sum;
    }
    return total;
}

}  // namespace

int main(int, char** arguments) {
    const long count = std::atol(arguments[1]) * (1L << 20) / 8;
    std::uint64_t* values = static_cast<std::uint64_t*>(std::aligned_alloc(1 << 21, 8 * count));
#ifdef __linux__
    madvise(values, 8 * count, MADV_HUGEPAGE);
#endif
#pragma omp parallel for schedule(static)
    for (long i = 0; i < count; i++) values[i] = i;
    volatile std::uint64_t kept = read_all(values, count);
    for (int pass = 0; pass < std::atoi(arguments[2]); pass++) {
        const auto begin = std::chrono::steady_clock::now();
        kept = read_all(values, count);
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
        std::printf("%.0f\n", 8.0 * count / seconds.count());
    }
    (void)kept;
}
