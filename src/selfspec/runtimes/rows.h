// What is computed for each row by itself: norms, rope, activations.

#pragma once

#include "vectors.h"

namespace {

enum NormKind { NO_NORM, RMS_NORM, LAYER_NORM };

// A norm of a row; its bias, of a layer norm, may be null.
struct Norm {
    const void *weight, *bias;
    float epsilon;
    int kind;
    int rounds;   // an RMS norm rounds to the dtype before it multiplies by the weight
    float added;  // to the weight, in float
};

// A layer norm; see ``normalize``.
template <class T> __attribute__((noinline)) void centre(const Norm& norm, const T* from, T* to, long k) {
    const T *weight = static_cast<const T*>(norm.weight), *bias = static_cast<const T*>(norm.bias);
    float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < k; i++) sum += up(from[i]);
    const float mean = sum / k;
#pragma omp simd reduction(+ : squares)
    for (long i = 0; i < k; i++) squares += (up(from[i]) - mean) * (up(from[i]) - mean);
    const float scale = 1.0f / std::sqrt(squares / k + norm.epsilon);
    for (long i = 0; i < k; i++) {
        const float normed = (up(from[i]) - mean) * scale * (up(weight[i]) + norm.added);
        to[i] = down<T>(bias ? normed + up(bias[i]) : normed);
    }
}

// ``to`` may be ``from``. Not inlined: the compiler chooses the order of its sum, which has to be the same for every
// caller.
template <class T> __attribute__((noinline)) void normalize(const Norm& norm, const T* from, T* to, long k) {
    const T* weight = static_cast<const T*>(norm.weight);
    if (norm.kind == LAYER_NORM) return centre<T>(norm, from, to, k);
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

// Rotates two entries of a head against each other. C, the dtype of cosine and sine, is also what products round to.
template <class T, class C> void rotate_pair(T* head, const C* cosine, const C* sine, long one, long other) {
    const float a = up(head[one]), b = up(head[other]);
    head[one] = down<T>(rounded<C>(a * up(cosine[one])) + rounded<C>(b * up(sine[one])));
    head[other] = down<T>(rounded<C>(b * up(cosine[other])) + rounded<C>(a * up(sine[other])));
}
// Rotates the first ``dim`` entries of a head in place: neighbours, or an entry of the first half and one of the second.
template <class T, class C> void rotate(T* head, const CosSin& turn, long row, bool neighbours) {
    const C *cosine = static_cast<const C*>(turn.cosine) + row * turn.dim;
    const C *sine = static_cast<const C*>(turn.sine) + row * turn.dim;
    const long half = turn.dim / 2;
    if (neighbours)
        for (long i = 0; i < turn.dim; i += 2) rotate_pair<T, C>(head, cosine, sine, i, i + 1);
    else
        for (long i = 0; i < half; i++) rotate_pair<T, C>(head, cosine, sine, i, i + half);
}

enum Activation { SILU, GELU_TANH, RELU_SQUARED, CLAMPED_GLU };

inline float silu(float x) { return x / (1.0f + exponential(-x)); }
inline float gelu_tanh(float x) {
    return 0.5f * x * (1.0f + hyperbolic_tangent(0.79788456f * (x + 0.044715f * (x * x * x))));
}

inline float relu_squared(float x) { return std::max(x, 0.0f) * std::max(x, 0.0f); }

// activation(gate) * other, or activation(gate) where there is no other.
template <class T, class Function>
void activate(const Function& activation, const T* gate, const T* other, T* to, long count) {
    if (other)
#pragma omp simd
        for (long i = 0; i < count; i++) to[i] = down<T>(rounded<T>(activation(up(gate[i]))) * up(other[i]));
    else
#pragma omp simd
        for (long i = 0; i < count; i++) to[i] = down<T>(activation(up(gate[i])));
}
template <class T> void activate(int activation, const T* gate, const T* other, T* to, long count) {
    if (activation == SILU)
        activate<T>([](float x) { return silu(x); }, gate, other, to, count);
    else if (activation == GELU_TANH)
        activate<T>([](float x) { return gelu_tanh(x); }, gate, other, to, count);
    else
        activate<T>([](float x) { return relu_squared(x); }, gate, other, to, count);
}

// The clamped gated unit of gpt-oss, of pairs of a gate and what its activation is multiplied by, with one added to it.
template <class T> void clamped_glu(float alpha, float limit, const T* pairs, T* to, long count) {
#pragma omp simd
    for (long i = 0; i < count; i++) {
        const float gate = std::min(up(pairs[2 * i]), limit), other = std::min(std::max(up(pairs[2 * i + 1]), -limit), limit);
        to[i] = down<T>(rounded<T>(gate / (1.0f + exponential(-alpha * gate))) * rounded<T>(other + 1.0f));
    }
}

}  // namespace
