// What is chosen from the logits of a row: the token of the largest or one drawn by noise, the probability of the largest,
// and whether all are numbers.

#pragma once

#include "vectors.h"

namespace {

constexpr long SPAN = 8192;  // logits of a task

// Divides and caps logits in place, rounding as transformers does. No cap where it is 0.
template <class T> void scale_logits(T* logits, long count, float divisor, float softcap) {
    if (divisor != 1)
#pragma omp simd
        for (long i = 0; i < count; i++) logits[i] = down<T>(up(logits[i]) / divisor);
    if (softcap != 0)
#pragma omp simd
        for (long i = 0; i < count; i++)
            logits[i] = down<T>(rounded<T>(hyperbolic_tangent(rounded<T>(up(logits[i]) / softcap))) * softcap);
}

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

// How the logits of a sequence change before a token is chosen, by the text before it; sampling/processors.py says how.
struct Changes {
    const long* tokens;   // whose logits change, each once
    const int* times;     // how often each was written; -1 for one that is not in the text
    const float* bias;    // of each
    long count;
    const long* ends;     // tokens that may not be chosen for a position before ``first_end``
    long end_count, first_end;
    float repetition, presence, frequency;
};

// How the token of a row is drawn: that of the largest sum of logit / temperature and Gumbel noise, which depends on key,
// position and token alone; sampling/rules.py says how. Nothing is drawn where the temperature is 0. Some draw from the most
// likely tokens alone; see filters.h. Logits are changed first, where there are changes.
struct Drawing {
    uint64_t key;   // of the seed
    long position;  // of the token
    float temperature;
    float top_p, min_p;  // 1 and 0 for all
    int top_k;           // 0 for all
    const Changes* changes;  // or null
    const long* path;        // tokens before the row that are not yet in the text, -1 for one that is not known
    long path_length;
    const uint8_t* allowed;  // a bit for each token that may be chosen; or null for all
    long allowed_bytes;
};
inline bool changes(const Drawing& drawing) { return drawing.changes || drawing.allowed; }
inline bool filters(const Drawing& drawing) { return drawing.top_k > 0 || drawing.top_p < 1 || drawing.min_p > 0; }

constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15;

inline uint64_t mix(uint64_t value) {
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9;
    value = (value ^ value >> 27) * 0x94D049BB133111EB;
    return value ^ value >> 31;
}
inline uint64_t stream_of(const Drawing& drawing) { return mix(uint64_t(drawing.position + 1) * GAMMA + drawing.key); }
// The bits of a token's uniform number, (bits + 0.5) / 2^52.
inline uint64_t uniform_bits(uint64_t stream, long token) { return mix(stream + uint64_t(token + 1) * GAMMA) >> 12; }
inline float gumbel(uint64_t bits) { return float(-std::log(-std::log((double(bits) + 0.5) * 0x1p-52))); }

// Whether a token's noise may be enough for the largest sum, whose difference from its logit is ``-above``: a number u gives
// noise above x only if 1 - u < exp(-x).
inline bool may_be_above(uint64_t bits, float above) {
    const uint32_t below = ~uint32_t(bits >> 20);  // of 1 - u, times 2^32
    return float(below) * 0x1p-32f <= exponential(above) * 1.001f;
}

constexpr float NEVER = -std::numeric_limits<float>::infinity();

// Changes the logits of a row by the text before it.
template <class T> void penalise(const T* logits, long count, const Drawing& by, float* to) {
    const Changes& changes = *by.changes;
    const auto write = [&](long token, float bias, int times) {
        if (token < 0 || token >= count) return;  // none, or one without a logit
        float score = up(logits[token]) + bias;
        if (times >= 0) score = score < 0 ? score * changes.repetition : score / changes.repetition;
        if (times > 0) score -= changes.frequency * float(times) + changes.presence;
        to[token] = score;
    };
    for (long i = 0; i < changes.count; i++) write(changes.tokens[i], changes.bias[i], changes.times[i]);
    for (const long* token = by.path; token < by.path + by.path_length; token++) {
        const long known = std::find(changes.tokens, changes.tokens + changes.count, *token) - changes.tokens;
        const bool found = known < changes.count;
        const int more = int(std::count(by.path, by.path + by.path_length, *token));
        write(*token, found ? changes.bias[known] : 0.0f, more + (found ? std::max(0, changes.times[known]) : 0));
    }
    for (long i = 0; i < changes.end_count && by.position < changes.first_end; i++)
        if (changes.ends[i] < count) to[changes.ends[i]] = NEVER;
}
inline void forbid_others(long count, const Drawing& by, float* to) {
    for (long first = 0; first < count; first += 8) {
        const uint8_t bits = first / 8 < by.allowed_bytes ? by.allowed[first / 8] : 0;
        if (bits == 0xff) continue;
        for (long token = first; token < std::min(first + 8, count); token++)
            to[token] = bits >> (token - first) & 1 ? to[token] : NEVER;
    }
}
// The logits of a row as they are after changes; returns how many tokens may be chosen.
template <class T> long change(const T* logits, long count, const Drawing& by, float* to) {
#pragma omp simd
    for (long token = 0; token < count; token++) to[token] = up(logits[token]);
    if (by.changes) penalise(logits, count, by, to);
    if (by.allowed) forbid_others(count, by, to);
    long possible = 0;
#pragma omp simd reduction(+ : possible)
    for (long token = 0; token < count; token++) possible += to[token] > NEVER;
    return possible;
}

// A token of a row, with its sum of logit and noise.
struct Draw {
    long token;
    float largest;
};

// The better of a draw and those from some scores, each of a token. Noise is computed for few of them.
template <class Score, class Token>
Draw draw_from(const Drawing& drawing, long from, long to, const Score& score, const Token& token, Draw drawn) {
    constexpr long SOME = 256;
    const uint64_t stream = stream_of(drawing);
    for (long start = from; start < to; start += SOME) {
        const long count = std::min(SOME, to - start);
        bool may[SOME];
        int any = 0;
#pragma omp simd reduction(| : any)
        for (long i = 0; i < count; i++) {
            may[i] = may_be_above(uniform_bits(stream, token(start + i)), score(start + i) - drawn.largest);
            any |= may[i];
        }
        for (long i = 0; any && i < count; i++) {
            if (!may[i]) continue;
            const long own = token(start + i);
            const float value = score(start + i) + gumbel(uniform_bits(stream, own));
            if (value > drawn.largest || (value == drawn.largest && own < drawn.token)) drawn = {own, value};
        }
    }
    return drawn;
}
// A draw from some logits of a row, of which ``likely`` is the largest.
template <class T> Draw draw(const T* logits, const Drawing& drawing, long likely, long from, long to) {
    const auto score = [&](long token) { return up(logits[token]) / drawing.temperature; };
    const Draw first{likely, score(likely) + gumbel(uniform_bits(stream_of(drawing), likely))};
    return draw_from(drawing, from, to, score, [](long token) { return token; }, first);
}

constexpr float UNLIKELY = 8;  // how far a logit, divided by the temperature, may be below the largest to be looked at

// The tokens of a row that would probably be chosen, the likeliest first: those of the largest logits, or of the largest sums of
// logit / temperature and noise where one is drawn. Returns their number, at most ``most``.
template <class T> long most_likely(const T* logits, long count, const Drawing& drawing, Draw* likely, long most) {
    constexpr long SOME = 256;
    const bool drawn = drawing.temperature > 0;
    const float scale = drawn ? 1 / drawing.temperature : 1;
    const uint64_t stream = stream_of(drawing);
    std::vector<float> largest;  // of some tokens
    for (long start = 0; start < count; start += SOME) {
        const long end = std::min(count, start + SOME);
        float own = NEVER;
#pragma omp simd reduction(max : own)
        for (long i = start; i < end; i++) own = up(logits[i]) > own ? up(logits[i]) : own;
        largest.push_back(own);
    }
    const float least = *std::max_element(largest.begin(), largest.end()) - UNLIKELY / scale;
    long found = 0;
    for (size_t some = 0; some < largest.size(); some++) {
        if (largest[some] < (drawn || found < most ? least : likely[most - 1].largest)) continue;
        for (long token = some * SOME; token < std::min(count, long(some + 1) * SOME); token++) {
            if (!(up(logits[token]) >= least)) continue;
            float value = up(logits[token]) * scale;
            if (drawn) value += gumbel(uniform_bits(stream, token));
            if (found == most && value <= likely[most - 1].largest) continue;
            long place = found < most ? found++ : most - 1;
            for (; place > 0 && likely[place - 1].largest < value; place--) likely[place] = likely[place - 1];
            likely[place] = {token, value};
        }
    }
    return found;
}

}  // namespace
