// A few rows of a Llama-like sublayer on the CPU, straight from the model's own row-major weights.
//
// A product of few rows takes as long as reading its weights, if nothing else gets in the way. Every weight is read
// once for up to four rows at a time; a panel of weights stays in the cache while the other rows pass. Each sum runs
// over its inputs in one order, however many rows there are, and bfloat16 is rounded where transformers rounds it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

struct bf16 {
    uint16_t bits;
};

inline float up(float value) { return value; }
inline float up(bf16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

template <class T> T down(float value);
template <> inline float down<float>(float value) { return value; }
template <> inline bf16 down<bf16>(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (value != value) return {0x7fc0};
    return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
// Cephes' expf, which compilers turn into vector code; good to two units in the last place.
inline float exponential(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    const float n = std::nearbyint(x * 1.44269504f);
    const float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * r + 1.3981999507e-3f;
    sum = sum * r + 8.3334519073e-3f;
    sum = sum * r + 4.1665795894e-2f;
    sum = sum * r + 1.6666665459e-1f;
    sum = sum * r + 5.0000001201e-1f;
    const int32_t bits = (int32_t(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return (sum * r * r + r + 1.0f) * power;
}

template <class T> inline float rounded(float value) { return up(down<T>(value)); }

// The R x C sums of products of R rows and C weight rows, all of them k long.
template <int R, int C, class T> struct Sums {
    static void run(const T* rows, const T* weights, long k, float (*sums)[C]) {
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) {
                float sum = 0;
                const T *row = rows + r * k, *weight = weights + c * k;
#pragma omp simd reduction(+ : sum)
                for (long i = 0; i < k; i++) sum += up(row[i]) * up(weight[i]);
                sums[r][c] = sum;
            }
    }
};

#if defined(__AVX512F__)
// Vectors of one dtype: how to load all or the first few of their elements, and how to add products to float sums.
template <class T> struct Lanes;
template <> struct Lanes<float> {
    using Vector = __m512;
    static constexpr long width = 16;
    static Vector load(const float* from) { return _mm512_loadu_ps(from); }
    static Vector load(const float* from, long count) { return _mm512_maskz_loadu_ps((1u << count) - 1, from); }
    static __m512 add(__m512 total, Vector a, Vector b) { return _mm512_fmadd_ps(a, b, total); }
};
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
template <> struct Lanes<bf16> {
    using Vector = __m512bh;
    static constexpr long width = 32;
    static Vector load(const bf16* from) { return (__m512bh)_mm512_loadu_si512(from); }
    static Vector load(const bf16* from, long count) {
        return (__m512bh)_mm512_maskz_loadu_epi16((1u << count) - 1, from);
    }
    static __m512 add(__m512 total, Vector a, Vector b) { return _mm512_dpbf16_ps(total, a, b); }
};
#endif

inline __m128 quarter(__m512 total) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(total),
                                      _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(total), 1)));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// Adds up the elements of each vector: four at once, or one, in the same order.
template <int C> void collapse(const __m512* total, float* sums) {
    const __m128 zero = _mm_setzero_ps();
    const __m128 left = _mm_hadd_ps(quarter(total[0]), C == 4 ? quarter(total[C == 4 ? 1 : 0]) : zero);
    const __m128 right = C == 4 ? _mm_hadd_ps(quarter(total[C == 4 ? 2 : 0]), quarter(total[C == 4 ? 3 : 0])) : zero;
    const __m128 all = _mm_hadd_ps(left, right);
    if (C == 4) _mm_storeu_ps(sums, all);
    else sums[0] = _mm_cvtss_f32(all);
}

template <int R, int C, class T> struct VectorSums {
    static void run(const T* rows, const T* weights, long k, float (*sums)[C]) {
        using L = Lanes<T>;
        __m512 total[R][C];
        typename L::Vector weight[C];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) total[r][c] = _mm512_setzero_ps();
        long i = 0;
        for (; i + L::width <= k; i += L::width) {
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) weight[c] = L::load(weights + c * k + i);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const auto row = L::load(rows + r * k + i);
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) total[r][c] = L::add(total[r][c], row, weight[c]);
            }
        }
        if (i < k) {
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) weight[c] = L::load(weights + c * k + i, k - i);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const auto row = L::load(rows + r * k + i, k - i);
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) total[r][c] = L::add(total[r][c], row, weight[c]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) collapse<C>(total[r], sums[r]);
    }
};
template <int R, int C> struct Sums<R, C, float> : VectorSums<R, C, float> {};
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
template <int R, int C> struct Sums<R, C, bf16> : VectorSums<R, C, bf16> {};
#endif
#endif

template <class T> struct Product {
    const T *weights, *bias, *rows;
    T* out;
    long k, n;

    template <int R, int C> void tile(long row, long column) const {
        float sums[R][C];
        Sums<R, C, T>::run(rows + row * k, weights + column * k, k, sums);
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++)
                out[(row + r) * n + column + c] = down<T>(sums[r][c] + (bias ? up(bias[column + c]) : 0.0f));
    }
    template <int R> void band(long row, long first, long last) const {
        long column = first;
        for (; column + 4 <= last; column += 4) tile<R, 4>(row, column);
        for (; column < last; column++) tile<R, 1>(row, column);
    }
    void panel(long count, long first, long last) const {
        long row = 0;
        for (; row + 4 <= count; row += 4) band<4>(row, first, last);
        if (count - row == 3) band<3>(row, first, last);
        if (count - row == 2) band<2>(row, first, last);
        if (count - row == 1) band<1>(row, first, last);
    }
};

// out[row][j] = sum over i of rows[row][i] * weights[j][i], plus bias[j]
template <class T>
void product(const T* weights, const T* bias, const T* rows, T* out, long count, long k, long n, int threads) {
    const long bytes = k * long(sizeof(T));
    if (n * bytes < (1 << 20)) threads = 1;  // waking a thread takes longer
    long width = std::max(4L, std::min((128L << 10) / bytes, (n + threads - 1) / threads));
    width = (width + 3) / 4 * 4;
    const Product<T> task{weights, bias, rows, out, k, n};
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
    for (long first = 0; first < n; first += width) task.panel(count, first, std::min(n, first + width));
}

template <class T> void norm(const T* rows, const T* weight, float epsilon, T* out, long count, long k) {
    for (long row = 0; row < count; row++) {
        const T* from = rows + row * k;
        T* to = out + row * k;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (long i = 0; i < k; i++) squares += up(from[i]) * up(from[i]);
        const float scale = 1.0f / std::sqrt(squares / k + epsilon);
        for (long i = 0; i < k; i++) to[i] = down<T>(up(weight[i]) * rounded<T>(up(from[i]) * scale));
    }
}

template <class T> void turn(T* head, const T* cosine, const T* sine, long dim) {
    const long half = dim / 2;
    for (long i = 0; i < half; i++) {
        const float a = up(head[i]), b = up(head[i + half]);
        head[i] = down<T>(rounded<T>(a * up(cosine[i])) + rounded<T>(b * up(sine[i])));
        head[i + half] = down<T>(rounded<T>(b * up(cosine[i + half])) + rounded<T>(a * up(sine[i + half])));
    }
}

struct Projection {
    const void *norm, *weights, *bias;
    float epsilon;
    int threads;
    long hidden, heads, key_heads, head_dim;
};

// Norm, queries, keys and values, rope in place, keys and values into the cache [2, key_heads, capacity, head_dim].
template <class T>
void project(const Projection& p, const T* states, const T* cosine, const T* sine, long turned, T* out, T* cache,
             long capacity, long start, long count) {
    const long all = p.heads + 2 * p.key_heads, dim = p.head_dim;
    std::vector<T> normed(count * p.hidden);
    norm<T>(states, static_cast<const T*>(p.norm), p.epsilon, normed.data(), count, p.hidden);
    product<T>(static_cast<const T*>(p.weights), static_cast<const T*>(p.bias), normed.data(), out, count, p.hidden,
               all * dim, p.threads);
    for (long row = 0; row < count; row++) {
        T* heads = out + row * all * dim;
        if (turned)
            for (long head = 0; head < p.heads + p.key_heads; head++)
                turn<T>(heads + head * dim, cosine + row * turned, sine + row * turned, turned);
        for (long head = 0; head < 2 * p.key_heads; head++)
            std::memcpy(cache + (head * capacity + start + row) * dim, heads + (p.heads + head) * dim,
                        dim * sizeof(T));
    }
}

struct Mlp {
    const void *norm, *gate_up, *gate_up_bias, *down, *down_bias;
    float epsilon;
    int threads;
    long hidden, inner;
};

// Norm, gate and up, silu(gate) * up, down.
template <class T> void mlp(const Mlp& p, const T* states, T* out, long count) {
    std::vector<T> normed(count * p.hidden), both(count * 2 * p.inner), inner(count * p.inner);
    norm<T>(states, static_cast<const T*>(p.norm), p.epsilon, normed.data(), count, p.hidden);
    product<T>(static_cast<const T*>(p.gate_up), static_cast<const T*>(p.gate_up_bias), normed.data(), both.data(),
               count, p.hidden, 2 * p.inner, p.threads);
    for (long row = 0; row < count; row++) {
        const T *gate = both.data() + row * 2 * p.inner, *other = gate + p.inner;
        T* to = inner.data() + row * p.inner;
#pragma omp simd
        for (long i = 0; i < p.inner; i++) {
            const float value = up(gate[i]);
            to[i] = down<T>(rounded<T>(value / (1.0f + exponential(-value))) * up(other[i]));
        }
    }
    product<T>(static_cast<const T*>(p.down), static_cast<const T*>(p.down_bias), inner.data(), out, count, p.inner,
               p.hidden, p.threads);
}

}  // namespace

#define EXPORT(T, SUFFIX)                                                                                              \
    extern "C" void project_##SUFFIX(const Projection* p, const T* states, const T* cosine, const T* sine,             \
                                     long turned, T* out, T* cache, long capacity, long start, long count) {           \
        project<T>(*p, states, cosine, sine, turned, out, cache, capacity, start, count);                              \
    }                                                                                                                  \
    extern "C" void mlp_##SUFFIX(const Mlp* p, const T* states, T* out, long count) { mlp<T>(*p, states, out, count); } \
    extern "C" void product_##SUFFIX(const T* weights, const T* bias, const T* rows, T* out, long count, long k,       \
                                     long n, int threads) {                                                            \
        product<T>(weights, bias, rows, out, count, k, n, threads);                                                    \
    }

EXPORT(float, float32)
EXPORT(bf16, bfloat16)
