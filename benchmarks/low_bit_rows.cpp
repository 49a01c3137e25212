// Picoseconds a weight of products of some rows by weights of few bits: from the second cache by one thread, which is what
// the arithmetic takes, and from memory by two.
//
//     g++ -O3 -std=c++17 -fno-math-errno -fno-trapping-math -ffp-contract=off -fopenmp LEVEL_FLAGS \
//         -I src/selfspec/runtimes benchmarks/low_bit_rows.cpp -o low_bit_rows
//     ./low_bit_rows [cache|memory]
//
// The flags of a level are in kernel_build.py. With another folder after -I it times kernels of another state.

#include "product.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#if defined(HAS_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr long INPUTS = 1536;
constexpr int COUNTS[] = {1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64};

uint32_t state = 7;
uint32_t next() { return state = state * 1664525 + 1013904223, state >> 8; }

// Memory in large pages, as weights are in the library.
template <class T> struct InLargePages {
    using value_type = T;
    T* allocate(size_t count) {
        const size_t page = 2 << 20, bytes = (count * sizeof(T) + page - 1) / page * page;
        void* memory = std::aligned_alloc(page, bytes);
        madvise(memory, bytes, MADV_HUGEPAGE);
        return static_cast<T*>(memory);
    }
    void deallocate(T* memory, size_t) { std::free(memory); }
};
using Bytes = std::vector<uint8_t, InLargePages<uint8_t>>;

// Tiles with any codes and small scales.
template <class F> Bytes make_tiles(long outputs) {
    Bytes made(outputs / TILE * (INPUTS / F::unit) * F::bytes);
    for (size_t i = 0; i + 4 <= made.size(); i += 4) {
        const uint32_t word = next() * 2654435761u;
        std::memcpy(made.data() + i, &word, 4);
    }
    for (size_t unit = 0; unit < made.size(); unit += F::bytes)
        for (int i = 0; i < 2 * TILE; i++) {
            const uint16_t number = 0x2000 + (next() & 0x7ff);
            std::memcpy(made.data() + unit + 2 * i, &number, 2);
        }
    return made;
}

template <class Function> double seconds_of(const Function& function) {
    const auto start = std::chrono::steady_clock::now();
    function();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The least picoseconds of each number of rows, which take turns; in brackets those of laying rows out, a number of a row.
template <int NUMBER, int PLANES> void measure(const char* name, long outputs, int parts, int threads, int repeats) {
    using W = Packed<bf16, PLANES>;
    std::vector<Bytes> tiles;
    for (int part = 0; part < parts; part++) tiles.push_back(make_tiles<Format<NUMBER>>(outputs));
    std::vector<bf16> rows(64 * INPUTS), out(64 * outputs);
    for (bf16& row : rows) row = down<bf16>(float(next() & 0xffff) / 65536 - 0.5f);
    std::vector<typename W::Row> laid(64 * (INPUTS / BLOCK));
    std::vector<double> best(std::size(COUNTS), 1e9), best_laid = best;
    for (int repeat = 0; repeat < repeats; repeat++)
        for (size_t i = 0; i < std::size(COUNTS); i++) {
            double seconds = 0;
            for (const auto& own : tiles) {
                const Stored part{own.data(), outputs, NUMBER};
                const Linear linear{nullptr, nullptr, &part, 1, PLANES == 1, nullptr};
                const W weights(linear, INPUTS);
                const Product<bf16, W> task{weights, nullptr, out.data(), nullptr, 1.0f, COUNTS[i], INPUTS, outputs, laid.data()};
                const long width = panel_width<W>(outputs, threads, COUNTS[i]);
                best_laid[i] = std::min(best_laid[i], seconds_of([&] {
                    for (long row = 0; row < COUNTS[i]; row++) task.lay_out(rows.data() + row * INPUTS, row);
                }));
                seconds += seconds_of([&] {
#pragma omp parallel for num_threads(threads) schedule(guided) if (threads > 1)
                    for (long from = 0; from < outputs; from += width) task.panel(from, std::min(outputs, from + width));
                });
            }
            best[i] = std::min(best[i], seconds);
        }
    std::printf("%s %d bits", name, 8 * PLANES);
    for (size_t i = 0; i < std::size(COUNTS); i++)
        std::printf("  %d: %.1f", COUNTS[i], best[i] * 1e12 / (double(outputs) * INPUTS * parts));
    std::printf("  (%.0f)\n", best_laid.back() * 1e12 / (64 * INPUTS));
    std::fflush(stdout);
}
template <int PLANES> void measure_all(bool memory) {
    const long outputs = memory ? 17920 : 512;
    const int parts = memory ? 8 : 1, threads = memory ? 2 : 1, repeats = memory ? 9 : 200;
    measure<Q4_K, PLANES>("Q4_K", outputs, parts, threads, repeats);
    measure<Q6_K, PLANES>("Q6_K", outputs, parts, threads, repeats);
    if (memory) return;
    measure<Q4_0, PLANES>("Q4_0", outputs, parts, threads, repeats);
    measure<Q8_0, PLANES>("Q8_0", outputs, parts, threads, repeats);
}

}  // namespace

int main(int count, char** arguments) {
#if defined(HAS_TILES)
    syscall(SYS_arch_prctl, 0x1023, 18);  // permission to use tiles
#endif
    const bool memory = count > 1 && !std::strcmp(arguments[1], "memory");
    measure_all<1>(memory);
    measure_all<2>(memory);
    measure_all<3>(memory);
}
