// What is computed for each row by itself: norms, rope, activations.

#pragma once

#include "vectors.h"

namespace {

// An RMS norm; none where ``weight`` is null.
struct Norm {
    const void* weight;
    float epsilon;
    int rounds;   // rounds to the dtype before it multiplies by the weight
    float added;  // to the weight, in float
};

// ``to`` may be ``from``. Not inlined: the compiler chooses the order of its sum, which has to be the same for every
// caller.
template <class T> __attribute__((noinline)) void normalize(const Norm& norm, const T* from, T* to, long k) {
    const T* weight = static_cast<const T*>(norm.weight);
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (long i = 0; i < k; i++) squares += up(from[i]) * up(from[i]);
    const float scale = 1.0f / std::sqrt(squares / k + norm.epsilon);
    if (norm.rounds)
        for (long i = 0; i < k; i++) to[i] = down<T>((up(weight[i]) + norm.added) * rounded<T>(up(from[i]) * scale));
    else
        for (long i = 0; i < k; i++) to[i] = down<T>((up(weight[i]) + norm.added) * (up(from[i]) * scale));
}

// Cosine and signed sine, [rows, dim] each, float or the model's dtype.
struct CosSin {
    const void *cosine, *sine;
    long dim;
    int is_float;
};

// Rotates the first ``dim`` entries of a head in place. C, the dtype of cosine and sine, is also what products round to.
template <class T, class C> void rotate(T* head, const CosSin& turn, long row) {
    const C *cosine = static_cast<const C*>(turn.cosine) + row * turn.dim;
    const C *sine = static_cast<const C*>(turn.sine) + row * turn.dim;
    const long half = turn.dim / 2;
    for (long i = 0; i < half; i++) {
        const float a = up(head[i]), b = up(head[i + half]);
        head[i] = down<T>(rounded<C>(a * up(cosine[i])) + rounded<C>(b * up(sine[i])));
        head[i + half] = down<T>(rounded<C>(b * up(cosine[i + half])) + rounded<C>(a * up(sine[i + half])));
    }
}

enum Activation { SILU, GELU_TANH };

inline float silu(float x) { return x / (1.0f + exponential(-x)); }
inline float gelu_tanh(float x) {
    return 0.5f * x * (1.0f + hyperbolic_tangent(0.79788456f * (x + 0.044715f * (x * x * x))));
}

// activation(gate) * other
template <class T> void activate(int activation, const T* gate, const T* other, T* to, long count) {
    if (activation == SILU)
#pragma omp simd
        for (long i = 0; i < count; i++) to[i] = down<T>(rounded<T>(silu(up(gate[i]))) * up(other[i]));
    else
#pragma omp simd
        for (long i = 0; i < count; i++) to[i] = down<T>(rounded<T>(gelu_tanh(up(gate[i]))) * up(other[i]));
}

}  // namespace
