// Layers with a state for each head, which decays, to which each row adds its value by its key, and which its query reads:
// gated delta nets, as Qwen3-Next and Qwen3.5 have them (Yang et al. 2025), which add what the state does not hold yet, and
// Mamba-2 (Dao and Gu 2024).

#pragma once

#include "mixture.h"

#include <vector>

namespace {

struct StateNet {
    const float *conv, *conv_bias;  // [taps, channels], [channels]
    const float *decay, *bias;      // by head: what the logarithm of its decay is multiplied by, what a step is added to
    const float* skip;              // by head: the share of the value that is read beside the state, or null
    const float* norm;              // [size], of what is read, before its gate, or null
    float epsilon, lowest, highest;  // of the norm; the bounds of a step
    long queries, keys, values;      // their first channels
    long groups, heads, state, size, taps;  // heads of queries and keys, of values; sizes of a key and of a value
    int delta;
};

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

constexpr float UNIT_EPSILON = 1e-6f;  // of the norms of queries and keys

// The convolution of some channels of a row, whose window are its own and the rows before it, and what activates it.
template <class T>
__attribute__((noinline)) void convolve(const StateNet& net, const T* window, long channels, long first, long count, float* to) {
#pragma omp simd
    for (long i = 0; i < count; i++) {
        float sum = net.conv_bias[first + i];
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

// One row of a head: ``to`` [keys, values] is the state after it, which may be the one before it.
template <int N, bool DELTA>
void step(const float* from, float* to, const float* query, const float* key, const float* value, float decay, float beta,
          float* out, long keys, long values) {
    for (long at = 0; at < values; at += N * LANES) {
        Floats held[N] = {}, change[N], read[N] = {};
        for (long i = 0; DELTA && i < keys; i++)
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
__attribute__((noinline)) void gate_read(const StateNet& net, const float* read, const T* gate, T* to) {
    float sum = 0.0f;
    for (long i = 0; i < net.size; i++) sum += read[i] * read[i];
    const float factor = 1.0f / std::sqrt(sum / net.size + net.epsilon);
#pragma omp simd
    for (long i = 0; i < net.size; i++) to[i] = down<T>(net.norm[i] * (read[i] * factor) * silu(up(gate[i])));
}

// Runs consecutive rows of a sequence. ``window`` [taps - 1 + rows, channels] are queries, keys and values, after those of
// the rows before; ``times`` and ``shares`` (of delta nets) [rows, heads]; ``gate`` [rows, heads * size] where there is a
// norm. ``before`` [heads, state, size] is the state before the first row, ``states`` are those after each of the last
// ``kept`` rows, ``out`` [rows, heads * size].
template <class T>
void run_state_net(const StateNet& net, const T* window, long channels, const T* times, const T* shares, const T* gate,
                   const float* before, float* const* states, long kept, T* out, long rows, int threads) {
    const long whole = net.state * net.size, shared = net.heads / net.groups;
    const bool wide = net.size % (4 * LANES) == 0;
    const auto run = net.delta ? (wide ? step<4, true> : step<1, true>) : (wide ? step<4, false> : step<1, false>);
    std::vector<float> asked(rows * net.groups * 2 * net.state);  // query and key of each group of heads of each row
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long at = 0; at < rows * net.groups; at++) {
        const T* own = window + at / net.groups * channels;
        const long first = at % net.groups * net.state;
        float *query = asked.data() + at * 2 * net.state, *key = query + net.state;
        convolve(net, own, channels, net.queries + first, net.state, query);
        convolve(net, own, channels, net.keys + first, net.state, key);
        if (net.delta) {
            scale_to(1.0f / std::sqrt(float(net.state)), query, net.state);
            scale_to(1.0f, key, net.state);
        }
    }
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long head = 0; head < net.heads; head++) {
        const float* from = before + head * whole;
        float value[MOST_DIM], read[MOST_DIM];
        for (long row = 0; row < rows; row++) {
            const float* query = asked.data() + (row * net.groups + head / shared) * 2 * net.state;
            convolve(net, window + row * channels, channels, net.values + head * net.size, net.size, value);
            const float time = up(times[row * net.heads + head]) + net.bias[head];
            const float taken = std::min(std::max(softplus(time), net.lowest), net.highest);
            const float share = net.delta ? sigmoid(up(shares[row * net.heads + head])) : taken;
            float* to = states[std::max(0L, row - (rows - kept))] + head * whole;
            run(from, to, query, query + net.state, value, std::exp(-net.decay[head] * taken), share, read, net.state, net.size);
            from = to;
            const long place = (row * net.heads + head) * net.size;
            if (net.norm)
                gate_read(net, read, gate + place, out + place);
            else
#pragma omp simd
                for (long i = 0; i < net.size; i++) out[place + i] = down<T>(read[i] + net.skip[head] * value[i]);
        }
    }
}

}  // namespace
