// Products a second of one thread with operands in registers: the bound of many rows. See rows.py.

#include "../src/selfspec/runtimes/product.h"

#include <chrono>
#include <cstdio>

namespace {

constexpr int SUMS = 12;  // independent, so that no addition waits for the one before it
constexpr long ROUNDS = 2000000;

// The best of several repeats of ROUNDS times SUMS steps of ``products`` products each.
template <class Sum, class Step> double products_per_second(int products, const Step& step) {
    double best = 0;
    for (int repeat = 0; repeat < 9; repeat++) {
        Sum sums[SUMS] = {};
        const auto start = std::chrono::steady_clock::now();
        for (long round = 0; round < ROUNDS; round++)
#pragma GCC unroll 12
            for (int i = 0; i < SUMS; i++) {
                sums[i] = step(sums[i]);
#if defined(__x86_64__)
                asm volatile("" : "+v"(sums[i]));  // every step is carried out
#else
                asm volatile("" : "+w"(sums[i]));
#endif
            }
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        best = std::max(best, double(products) * SUMS * ROUNDS / seconds);
    }
    return best;
}

template <class T> double of_dtype() {
    using L = ProductLanes<T>;
    T block[L::width] = {};
    typename L::Part part = L::part(block, 0);
    return products_per_second<Floats>(L::width / L::parts, [&](Floats sum) { return L::add(sum, part, part); });
}

}  // namespace

int main() {
    const Shorts weights = {};
    const double low = products_per_second<Ints>(2 * LANES, [&](Ints sum) { return add_pairs(sum, weights, 3); });
    std::printf("{\"float32\": %.4g, \"bfloat16\": %.4g, \"low_bit\": %.4g}\n", of_dtype<float>(), of_dtype<bf16>(), low);
}
