// Gated delta nets, as Qwen3-Next and Qwen3.5 have them (Yang et al. 2025): a state for each head, which decays, and which
// each row changes by what it does not hold yet.

#pragma once

#include "mixture.h"

namespace {

struct DeltaNet {
    const float *conv, *decay, *bias;  // [taps, channels]; by head, what the logarithm of its decay is multiplied by, and what a step is added to
    const void* norm;                  // [value]
    float epsilon;
    long key_heads, heads, key, value, taps;
};

constexpr float UNIT_EPSILON = 1e-6f;  // of the norms of queries and keys

// The convolution of some channels of a row, whose window are its own and the rows before it, and what activates it.
template <class T>
__attribute__((noinline)) void convolve(const DeltaNet& net, const T* window, long channels, long first, long count, float* to) {
#pragma omp simd
    for (long i = 0; i < count; i++) {
        float sum = 0.0f;
        for (long tap = 0; tap < net.taps; tap++)
            sum += net.conv[tap * channels + first + i] * up(window[tap * channels + first + i]);
        to[i] = silu(sum);
    }
}

// Makes a vector one of length ``length``.
inline void scale_to(float length, float* vector, long count) {
    float sum = 0.0f;
    for (long i = 0; i < count; i++) sum += vector[i] * vector[i];
    const float factor = length / std::sqrt(sum + UNIT_EPSILON);
    for (long i = 0; i < count; i++) vector[i] *= factor;
}

// One row of a head: ``to`` [key, value] is the state after it, which may be the one before it.
template <int N>
void step(const float* from, float* to, const float* query, const float* key, const float* value, float decay, float beta,
          float* out, long keys, long values) {
    for (long at = 0; at < values; at += N * LANES) {
        Floats held[N] = {}, change[N], read[N] = {};
        for (long i = 0; i < keys; i++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++)
                held[n] = multiply_add(held[n], load<Floats>(from + i * values + at + n * LANES), spread(key[i]));
        for (int n = 0; n < N; n++) change[n] = (load<Floats>(value + at + n * LANES) - held[n] * decay) * beta;
        for (long i = 0; i < keys; i++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                const long place = i * values + at + n * LANES;
                const Floats state = multiply_add(change[n] * key[i], load<Floats>(from + place), spread(decay));
                std::memcpy(to + place, &state, sizeof(state));
                read[n] = multiply_add(read[n], state, spread(query[i]));
            }
        for (int n = 0; n < N; n++) std::memcpy(out + at + n * LANES, &read[n], sizeof(read[n]));
    }
}

// A norm of what a head has read, and its gate.
template <class T>
__attribute__((noinline)) void gate_read(const DeltaNet& net, const float* read, const T* gate, T* to) {
    const T* weight = static_cast<const T*>(net.norm);
    float sum = 0.0f;
    for (long i = 0; i < net.value; i++) sum += read[i] * read[i];
    const float factor = 1.0f / std::sqrt(sum / net.value + net.epsilon);
#pragma omp simd
    for (long i = 0; i < net.value; i++) to[i] = down<T>(up(weight[i]) * (read[i] * factor) * silu(up(gate[i])));
}

// Runs consecutive rows of a sequence. ``window`` [taps - 1 + rows, channels] are queries, keys and values, after those of
// the rows before; ``gate`` [rows, heads * value]; ``beta`` and ``alpha`` [rows, heads]. ``state`` [heads, key, value] is
// that before the first row, ``states`` are those after each of the last ``kept`` rows, ``out`` [rows, heads * value].
template <class T>
void run_delta_net(const DeltaNet& net, const T* window, const T* gate, const T* beta, const T* alpha, const float* state,
                   float* const* states, long kept, T* out, long rows, int threads) {
    const long keys = net.key_heads * net.key, channels = 2 * keys + net.heads * net.value, size = net.key * net.value;
    const bool wide = net.value % (4 * LANES) == 0;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long head = 0; head < net.heads; head++) {
        const long key_head = head / (net.heads / net.key_heads);
        const float* from = state + head * size;
        float query[MOST_DIM], key[MOST_DIM], value[MOST_DIM], read[MOST_DIM];
        for (long row = 0; row < rows; row++) {
            const T* own = window + row * channels;
            convolve(net, own, channels, key_head * net.key, net.key, query);
            convolve(net, own, channels, keys + key_head * net.key, net.key, key);
            convolve(net, own, channels, 2 * keys + head * net.value, net.value, value);
            scale_to(1.0f / std::sqrt(float(net.key)), query, net.key);
            scale_to(1.0f, key, net.key);
            const float time = up(alpha[row * net.heads + head]) + net.bias[head];
            const float steps = time > 20.0f ? time : std::log1p(std::exp(time));
            const float decay = std::exp(-net.decay[head] * steps), share = sigmoid(up(beta[row * net.heads + head]));
            float* to = states[std::max(0L, row - (rows - kept))] + head * size;
            (wide ? step<4> : step<1>)(from, to, query, key, value, decay, share, read, net.key, net.value);
            from = to;
            const long place = (row * net.heads + head) * net.value;
            gate_read(net, read, gate + place, out + place);
        }
    }
}

}  // namespace
