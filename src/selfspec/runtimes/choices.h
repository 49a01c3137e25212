// What is chosen from the logits of a row: the token of the largest or one drawn by noise, the probability of the largest,
// and whether all are numbers.

#pragma once

#include "vectors.h"

namespace {

constexpr long SPAN = 8192;  // logits of a task

// Of some logits of a row, or of all of them.
struct Choice {
    long token;
    float largest, sum;  // sum: of the logits, which is finite only if each of them is
    float exponentials;  // the sum of exp(logit - largest)
};

// Not inlined: the compiler chooses the order of the sums, which has to be the same for every caller.
template <class T> __attribute__((noinline)) Choice choose(const T* logits, long from, long to, bool probability) {
    Choice choice{from, -std::numeric_limits<float>::infinity(), 0, 0};
    float largest = choice.largest, sum = 0, exponentials = 0;
#pragma omp simd reduction(max : largest) reduction(+ : sum)
    for (long i = from; i < to; i++) {
        const float value = up(logits[i]);
        largest = value > largest ? value : largest;
        sum += value;
    }
    while (choice.token < to - 1 && !(up(logits[choice.token]) == largest)) choice.token++;
    if (probability)
#pragma omp simd reduction(+ : exponentials)
        for (long i = from; i < to; i++) exponentials += exponential(up(logits[i]) - largest);
    choice.largest = largest, choice.sum = sum, choice.exponentials = exponentials;
    return choice;
}

// Of consecutive spans of a row, the first before the second; of equal logits the first is chosen.
inline Choice join(const Choice& first, const Choice& second) {
    const bool later = second.largest > first.largest;
    Choice choice = later ? second : first;
    const Choice& other = later ? first : second;
    choice.sum = first.sum + second.sum;
    if (other.exponentials > 0) choice.exponentials += other.exponentials * exponential(other.largest - choice.largest);
    return choice;
}

// A draw from some logits of a row: the token of the largest sum of logit / temperature and noise.
struct Draw {
    long token;
    float largest;
};

template <class T> Draw draw(const T* logits, const float* noise, float temperature, long from, long to) {
    float largest = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : largest)
    for (long i = from; i < to; i++) {
        const float value = up(logits[i]) / temperature + noise[i];
        largest = value > largest ? value : largest;
    }
    Draw drawn{from, largest};
    while (drawn.token < to - 1 && !(up(logits[drawn.token]) / temperature + noise[drawn.token] == largest)) drawn.token++;
    return drawn;
}

}  // namespace
