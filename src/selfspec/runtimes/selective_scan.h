// Mamba (Gu and Dao 2023): each channel has a state, of which each number decays by itself.

#pragma once

#include "state_net.h"

namespace {

// Runs consecutive rows of a sequence. ``decay`` [channels, size] is what steps are multiplied by; ``skip`` and ``bias``
// are by channel: the share of the value that is read beside the state, and what a step is added to. ``values``, ``times``
// and ``gate`` are [rows, channels], ``keys`` and ``queries`` [rows, size]. ``before`` [channels, size] is the state before
// the first row, ``states`` are those after each of the last ``kept`` rows, ``out`` [rows, channels].
template <class T>
void selective_scan(const float* decay, const float* skip, const float* bias, const T* values, const T* times, const T* keys,
                    const T* queries, const T* gate, const float* before, float* const* states, long kept, T* out, long rows,
                    long channels, long size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long channel = 0; channel < channels; channel++) {
        const float *from = before + channel * size, *own = decay + channel * size;
        for (long row = 0; row < rows; row++) {
            const long place = row * channels + channel;
            const float value = up(values[place]), length = softplus(up(times[place]) + bias[channel]);
            const T *key = keys + row * size, *query = queries + row * size;
            float *to = states[std::max(0L, row - (rows - kept))] + channel * size, read = 0.0f;
#pragma omp simd reduction(+ : read)
            for (long i = 0; i < size; i++) {
                to[i] = from[i] * exponential(length * own[i]) + length * value * up(key[i]);
                read += to[i] * up(query[i]);
            }
            out[place] = down<T>((read + skip[channel] * value) * silu(up(gate[place])));
            from = to;
        }
    }
}

}  // namespace
