// The kernels of the CPU: rows of Llama-like sublayers, from the model's own row-major weights or
// low-bit copies of them.
//
// A row gets the same bits whichever rows run with it. bfloat16 is rounded where transformers rounds it.

#include "chain.h"

namespace {

constexpr long VERIFIED = 128;  // most rows of a verification

// Up to how many rows a product runs in these kernels; beyond, torch is faster, as measured with AVX2 and AVX-512. In
// bfloat16 all rows of a verification stay in them, so that its tokens are exactly those of single steps. On x86 without
// AVX512_BF16, torch multiplies bfloat16 element by element.
template <class T> constexpr long most_rows() {
#if defined(__x86_64__) && !defined(__AVX512BF16__)
    if (sizeof(T) == 2) return std::numeric_limits<long>::max();
#else
    if (sizeof(T) == 2) return VERIFIED;
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
    return ROWS;
#else
    return 16;
#endif
}

// The same for the rows of one sequence in attention, where the kernel is the faster one up to some four rows.
template <class T> constexpr long most_attending() { return std::min(VERIFIED, most_rows<T>()); }

}  // namespace

#define EXPORT(T, SUFFIX)                                                                                              \
    extern "C" void product_##SUFFIX(const Linear* linear, const T* rows, T* out, long count, long k, long n,          \
                                     int threads) {                                                                    \
        product<T>(*linear, rows, out, count, k, n, threads);                                                          \
    }                                                                                                                  \
    extern "C" void pack_##SUFFIX(const T* weights, const Linear* packed, long k, long n, int threads) {               \
        pack<T>(weights, *packed, k, n, threads);                                                                      \
    }                                                                                                                  \
    extern "C" void unpack_##SUFFIX(const Linear* linear, const int64_t* rows, T* out, long count, long k) {           \
        unpack<T>(*linear, rows, out, count, k);                                                                       \
    }                                                                                                                  \
    extern "C" void forward_##SUFFIX(const Forward* f, T* stream, long rows) { Team<T>(*f, stream, rows).run(); }      \
    extern "C" void chain_##SUFFIX(const Chain* chain) { Links<T>(*chain).run(); }                                     \
    extern "C" long most_rows_##SUFFIX() { return most_rows<T>(); }                                                    \
    extern "C" long most_attending_##SUFFIX() { return most_attending<T>(); }

EXPORT(float, float32)
EXPORT(bf16, bfloat16)
