// Products a second of one thread with operands in registers: the bound of many rows. See rows.py.

#include "../src/selfspec/runtimes/product.h"

#include <chrono>
#include <cstdio>
#include <utility>

namespace {

constexpr int SUMS = 12;  // independent, so that no addition waits for the one before it
constexpr long ROUNDS = 2000000;

// Hides from the compiler that an operand does not change, so that every step multiplies.
template <class V> inline void hide(V& operand) {
#if defined(__x86_64__)
    asm volatile("" : "+v"(operand));
#else
    asm volatile("" : "+w"(operand));
#endif
}

// Carried out by name, not by index, so that every sum stays in its register.
template <class Sum, class Step, int... I>
inline __attribute__((always_inline)) void advance(Sum* sums, const Step& step, std::integer_sequence<int, I...>) {
    const auto one = [&](Sum& sum) __attribute__((always_inline)) {
        sum = step(sum);
        hide(sum);  // every step is carried out
    };
    (one(sums[I]), ...);
}

// The best of several repeats of ROUNDS times SUMS steps of ``products`` products each.
template <class Sum, class Step> double products_per_second(int products, const Step& step) {
    double best = 0;
    for (int repeat = 0; repeat < 9; repeat++) {
        Sum sums[SUMS] = {};
        const auto start = std::chrono::steady_clock::now();
        for (long round = 0; round < ROUNDS; round++) advance(sums, step, std::make_integer_sequence<int, SUMS>());
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        best = std::max(best, double(products) * SUMS * ROUNDS / seconds);
    }
    return best;
}

template <class T> double of_dtype() {
    using L = ProductLanes<T>;
    T block[L::width] = {};
    typename L::Part part = L::part(block, 0);
    return products_per_second<Floats>(L::width / L::parts, [&](Floats sum) {
        hide(part);
        return L::add(sum, part, part);
    });
}

// Codes of few bits with rows of 16 bits, in two planes of bytes where the processor multiplies these.
double of_low_bits() {
    Words codes = {};
#if defined(MULTIPLIES_BYTES)
    return products_per_second<Ints>(4 * LANES / 2, [&](Ints sum) {
        hide(codes);
        return add_bytes(sum, codes, 3);
    });
#else
    return products_per_second<Ints>(2 * LANES, [&](Ints sum) {
        hide(codes);
        return add_pairs(sum, codes, 3);
    });
#endif
}

}  // namespace

int main() {
    std::printf("{\"float32\": %.4g, \"bfloat16\": %.4g, \"low_bit\": %.4g}\n", of_dtype<float>(), of_dtype<bf16>(),
                of_low_bits());
}
