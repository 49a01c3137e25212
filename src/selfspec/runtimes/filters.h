// The tokens of a row that may be drawn: its most likely ones, by top-k, top-p and min-p, one after the other as transformers
// has them. Sums of probabilities are of integers, so that they are the same in any order.

#pragma once

#include "choices.h"
#include "codes.h"

#include <algorithm>
#include <vector>

namespace {

// Filters the tokens of a row, of which ``largest`` is the largest logit. All are kept where that is no number, or infinite.
template <class T> class Filter {
    static constexpr long SOME = 256;  // tokens at a time
    static constexpr int BINS = 256;   // of scores
    struct Scored {
        float score;
        int32_t token;
        // The more likely one comes first; of equal ones the last, as a stable sort has them from its end.
        bool operator<(const Scored& other) const {
            return score != other.score ? score > other.score : token > other.token;
        }
    };
    const T* logits;
    const long count;
    const Drawing by;
    const float largest;
    const long possible;  // tokens with a score
    float span = 0;  // no score of ``kept`` is more than this below the largest, but for those of the last bin
    std::vector<Scored> kept;

    float score(long token) const { return up(logits[token]) / by.temperature; }
    // The weight of a token: its probability ÷ that of the most likely one, in units of 2^-40.
    int64_t weight(float score) const { return int64_t(exponential(score - largest) * 0x1p40f); }
    // That of several scores together, by halves of 20 bits: sums of some of them fit the vectors of any processor.
    template <class Score> int64_t weigh(long several, const Score& score_of) const {
        int64_t sum = 0;
        for (long start = 0; start < several; start += SOME) {
            const long end = std::min(several, start + SOME);
            int32_t highs = 0, lows = 0;
#pragma omp simd reduction(+ : highs, lows)
            for (long i = start; i < end; i++) {
                const float share = exponential(score_of(i) - largest) * 0x1p20f;
                const int32_t high = int32_t(share);
                highs += high, lows += int32_t((share - float(high)) * 0x1p20f);
            }
            sum += (int64_t(highs) << 20) + lows;
        }
        return sum;
    }
    int64_t weight_of_kept() const {
        return weigh(long(kept.size()), [own = kept.data()](long i) { return own[i].score; });
    }

    bool any_is_at_least(float least, long token, const long end) const {
        Ints found = {};
        for (; token + LANES <= end; token += LANES) found |= widen(logits + token) / by.temperature >= least;
        bool any = reduce<LANES>(found, [](auto a, auto b) { return a | b; });
        for (; token < end; token++) any |= score(token) >= least;
        return any;
    }
    // Keeps tokens whose scores are at most ``below`` less than the largest.
    void keep(float below) {
        const float least = largest - below;
        long some = 0;
        span = below;
        for (long start = 0; start < count; start += SOME) {
            const long end = std::min(count, start + SOME);
            if (!any_is_at_least(least, start, end)) continue;
            if (kept.size() < size_t(some + SOME)) kept.resize(2 * (some + SOME));
            Scored* const to = kept.data();
            for (long token = start; token < end; token++) {
                const float own = score(token);
                to[some] = {own, int32_t(token)};
                some += own >= least;
            }
        }
        kept.resize(some);
    }
    // The same with as many as a condition asks for, or all that are possible.
    template <class Condition> void keep_until(const Condition& is_enough) {
        for (float below = 4; below < 1000; below *= 1.5f) {
            keep(below);
            if (is_enough(below) || long(kept.size()) == possible) return;
        }
        keep(std::numeric_limits<float>::max());
    }
    template <class Condition> void keep_if(const Condition& condition) {
        kept.erase(std::remove_if(kept.begin(), kept.end(), [&](const Scored& each) { return !condition(each); }), kept.end());
    }
    // Those that are as likely as the last of the first ``top_k`` are kept, too.
    void keep_top_k() {
        if (long(kept.size()) <= by.top_k) return;
        std::nth_element(kept.begin(), kept.begin() + by.top_k - 1, kept.end());
        const float last = kept[by.top_k - 1].score;
        keep_if([=](const Scored& each) { return each.score >= last; });
    }
    // Those before which less than ``goal`` is: by bins of scores, and in the bin where it is reached in order.
    void keep_weight(double goal) {
        const float scale = float(BINS) / std::min(span, 1000.0f);
        const auto bin_of = [&](float score) { return int(std::min(float(BINS - 1), (largest - score) * scale)); };
        int64_t weights[BINS] = {}, before = 0;
        for (const Scored& each : kept) weights[bin_of(each.score)] += weight(each.score);
        int last = 0;
        while (last < BINS - 1 && double(before + weights[last]) < goal) before += weights[last++];
        const auto is_before = [&](const Scored& each) { return bin_of(each.score) < last; };
        const auto found = std::partition(kept.begin(), kept.end(), is_before);
        const auto end = std::partition(found, kept.end(), [&](const Scored& each) { return bin_of(each.score) == last; });
        std::sort(found, end);
        auto to = found;
        while (to < end && double(before) < goal) before += weight((to++)->score);
        kept.erase(to, kept.end());
    }

  public:
    Filter(const T* logits, long count, float largest, const Drawing& by, long possible)
        : logits(logits), count(count), by(by), largest(largest / by.temperature), possible(possible) {
        if (!std::isfinite(this->largest)) return;
        double goal = 0;
        if (by.top_k) {
            keep_until([&](float) { return long(kept.size()) >= by.top_k; });
            keep_top_k();
            goal = double(by.top_p) * double(weight_of_kept());
        } else if (by.top_p < 1) {
            goal = double(by.top_p) * double(weigh(count, [&](long token) { return score(token); }));
            keep_until([&](float) { return double(weight_of_kept()) >= goal; });
        } else {
            keep_until([&](float below) { return exponential(-below) < by.min_p; });
        }
        if (by.top_p < 1) keep_weight(goal);
        if (by.min_p > 0) keep_if([&](const Scored& each) { return exponential(each.score - this->largest) >= by.min_p; });
    }
    // The token that is drawn, or one that is likely where all are kept.
    long draw(long likely) const {
        if (kept.empty()) return likely;
        const auto score_of = [own = kept.data()](long i) { return own[i].score; };
        const auto token_of = [own = kept.data()](long i) { return long(own[i].token); };
        return draw_from(by, 0, long(kept.size()), score_of, token_of, {token_of(0), -std::numeric_limits<float>::infinity()}).token;
    }
    // The scores of those that are kept, and minus infinity for the others.
    void write(float* to) const {
        if (kept.empty()) return;
        std::fill_n(to, count, -std::numeric_limits<float>::infinity());
        for (const Scored& each : kept) to[each.token] = each.score;
    }
};

// The token that is drawn from the logits of a row, or where nothing is drawn, the one of the largest; ``choice`` is theirs.
template <class T> long draw_token(const T* logits, long count, const Choice& choice, const Drawing& by, long possible) {
    if (by.temperature == 0) return choice.token;
    if (filters(by)) return Filter<T>(logits, count, choice.largest, by, possible).draw(choice.token);
    return draw(logits, by, choice.token, 0, count).token;
}
// The same of logits that may change before; ``changed`` gives room for them.
template <class T>
long take_token(const T* logits, long count, const Choice& choice, const Drawing& by, std::vector<float>& changed) {
    if (!changes(by)) return draw_token(logits, count, choice, by, count);
    changed.resize(count);
    const long possible = change(logits, count, by, changed.data());
    return draw_token(changed.data(), count, choose(changed.data(), 0, count, false), by, possible);
}

// Filters rows of scores in place.
inline void keep_likely(float* scores, long rows, long count, int top_k, float top_p, float min_p, int threads) {
    const Drawing by{0, 0, 1.0f, top_p, min_p, top_k};
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long row = 0; row < rows; row++) {
        float* own = scores + row * count;
        Filter<float>(own, count, choose(own, 0, count, false).largest, by, count).write(own);
    }
}

}  // namespace
