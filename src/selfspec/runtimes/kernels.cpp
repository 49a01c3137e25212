// The kernels of the CPU: rows of Llama-like sublayers, from the model's own row-major weights or
// low-bit copies of them.
//
// A row gets the same bits whichever rows run with it. bfloat16 is rounded where transformers rounds it.

#include "mtp.h"

namespace {

constexpr long VERIFIED = 128;  // most rows of a verification

// Up to how many rows a product runs in these kernels; beyond, torch is faster, as measured with AVX2 and AVX-512. In
// bfloat16 all rows of a verification stay in them, so that its tokens are exactly those of single steps, and so do whole
// prompts on x86 without AMX: torch takes longer for 512 rows with AVX512_BF16, and multiplies element by element without.
template <class T> constexpr long most_rows() {
#if defined(__x86_64__) && !defined(__AMX_BF16__)
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

// The same for the rows of one sequence in attention, which is faster than torch's with the instructions for bfloat16.
template <class T> constexpr long most_attending() {
#if defined(__AVX512BF16__)
    return most_rows<T>();
#else
    return std::min(VERIFIED, most_rows<T>());
#endif
}

}  // namespace

#include "grids.h"
#include "layout.h"
#include "selective_scan.h"

extern "C" void run_on(const int* processors, int count) { choose_processors(processors, count); }

// Weight rows of a GGUF file, in an order if one is given, as tiles.
extern "C" void lay_out_gguf(int format, const uint8_t* from, const int64_t* order, uint8_t* to, long k, long n, int threads) {
    lay_out(format, from, order, to, k, n, threads);
}

// Weights of a quantised checkpoint as tiles; see grids.h.
extern "C" void lay_out_grid(int format, const uint8_t* bytes, const int64_t* outputs, const int64_t* inputs, int bits,
                             int flipped, const float* scales, const int8_t* zeros, uint8_t* to, long k, long n, int threads) {
    lay_out(format, {bytes, outputs, inputs, bits, flipped}, scales, zeros, to, k, n, threads);
}

// Floats of four bits as tiles; see grids.h.
extern "C" void lay_out_mxfp4_blocks(const uint8_t* blocks, const uint8_t* scales, uint8_t* to, long k, long n, int threads) {
    lay_out_mxfp4(blocks, scales, to, k, n, threads);
}

// Scores of tokens that top-k, top-p and min-p do not keep become minus infinity; see filters.h.
extern "C" void keep_likely_float32(float* scores, long rows, long count, int top_k, float top_p, float min_p, int threads) {
    keep_likely(scores, rows, count, top_k, top_p, min_p, threads);
}

#define READING(SUFFIX, WAYS)                                                                                          \
    extern "C" void read_##SUFFIX(const int* ways) { std::copy_n(ways, Ways::KINDS, WAYS.each); }                      \
    extern "C" void reading_##SUFFIX(int* ways) { std::copy_n(WAYS.each, Ways::KINDS, ways); }

#define EXPORT(T, SUFFIX)                                                                                              \
    extern "C" void product_##SUFFIX(const Linear* linear, const T* rows, T* out, long count, long k, long n,          \
                                     int threads) {                                                                    \
        product<T>(*linear, rows, out, count, k, n, threads);                                                          \
    }                                                                                                                  \
    extern "C" void pack_##SUFFIX(const T* weights, int format, uint8_t* to, long k, long n, int threads) {            \
        pack<T>(weights, format, to, k, n, threads);                                                                   \
    }                                                                                                                  \
    extern "C" void unpack_##SUFFIX(const Linear* linear, const int64_t* rows, T* out, long count, long k,             \
                                    int threads) {                                                                     \
        unpack<T>(*linear, rows, out, count, k, threads);                                                              \
    }                                                                                                                  \
    extern "C" void state_net_##SUFFIX(const StateNet* net, const T* window, long channels, const T* times,            \
                                       const T* shares, const T* gate, const float* before, float* const* states,      \
                                       long kept, T* out, long rows, int threads) {                                    \
        run_state_net<T>(*net, window, channels, times, shares, gate, before, states, kept, out, rows, threads);       \
    }                                                                                                                  \
    extern "C" void selective_scan_##SUFFIX(const float* decay, const float* skip, const float* bias, const T* values, \
                                            const T* times, const T* keys, const T* queries, const T* gate,            \
                                            const float* before, float* const* states, long kept, T* out, long rows,   \
                                            long channels, long size, int threads) {                                   \
        selective_scan<T>(decay, skip, bias, values, times, keys, queries, gate, before, states, kept, out, rows,      \
                          channels, size, threads);                                                                    \
    }                                                                                                                  \
    extern "C" void forward_##SUFFIX(const Forward* f, T* stream, long rows) { Team<T>(*f, stream, rows).run(); }      \
    extern "C" void draft_##SUFFIX(const Chain* chain) {                                                               \
        chain->head ? HeadRun<T>(*chain).draft() : Links<T>(*chain).draft();                                           \
    }                                                                                                                  \
    extern "C" void enter_##SUFFIX(const HeadEntry* entry, const T* embeddings, const T* states, T* stream, long rows, \
                                   int threads) {                                                                      \
        enter_head<T>(*entry, embeddings, states, stream, rows, threads);                                              \
    }                                                                                                                  \
    extern "C" void verify_##SUFFIX(const Chain* chain) { Links<T>(*chain).verify(); }                                 \
    READING(SUFFIX, Reading<T>::columns)                                                                               \
    extern "C" long most_rows_##SUFFIX() { return most_rows<T>(); }                                                    \
    extern "C" long most_attending_##SUFFIX() { return most_attending<T>(); }

READING(packed, fetched_soon)
EXPORT(float, float32)
EXPORT(bf16, bfloat16)
