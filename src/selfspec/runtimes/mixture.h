// A mixture of experts: each row runs through those experts whose router logits are largest.
//
// Rows are sorted by expert, so that the weights of an expert are read once for all rows that chose it, and those of the
// others not at all. What a row gets is the sum over its experts in the order of its own logits: it does not depend on the
// other rows.

#pragma once

#include "product.h"
#include "rows.h"

namespace {

constexpr long MIXED = 256;  // most rows that are sorted together

struct MlpWeights {
    Linear gate_up, down;
    long inner;
    int activation;
    int gated;  // the first product gives the gate and what is multiplied by its activation, not the gate alone
    float alpha, limit;  // of the activation CLAMPED_GLU, for which gate and what it multiplies are pairs

    long entered() const { return (1 + gated) * inner; }  // outputs of the first product
};

struct MixtureWeights {
    Linear router;       // an output for each expert, and one for the gate of the shared expert
    MlpWeights experts;  // all of them: the outputs of one follow those of the one before
    MlpWeights shared;   // runs for every row; none where ``inner`` is 0
    long count, top;     // experts, and how many of them a row chooses
    int normalizes;      // the weights of a row's experts add up to one
    int sigmoid;         // an expert's score is the sigmoid of its logit, not its share in a softmax
    const float* bias;   // added to scores where experts are chosen, or null
    long groups, kept;   // of experts, which are chosen from as many of the groups
    long best_of_group;  // those with the best experts, or with the best two
    float scale;         // of the weights of a row's experts
    int exact;           // router logits are float; its weights are, or have the dtype of the rows where ``exact`` is 2
    int shared_gated;    // the shared expert has a gate, else its weight is 1

    long each() const { return top + (shared.inner > 0); }  // of a row
    long outputs() const { return count + (shared.inner > 0 && shared_gated); }
    long widest() const { return std::max(experts.inner, shared.inner); }
};

// The inputs of the second product, by the outputs of the first one.
template <class T> void activate(const MlpWeights& mlp, const T* entered, T* to) {
    if (mlp.activation == CLAMPED_GLU)
        clamped_glu<T>(mlp.alpha, mlp.limit, entered, to, mlp.inner);
    else
        activate<T>(mlp.activation, entered, mlp.gated ? entered + mlp.inner : nullptr, to, mlp.inner);
}

constexpr float LEAST_SUM = std::numeric_limits<float>::lowest(), TAKEN = -std::numeric_limits<float>::infinity();

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// The place of the largest value, which is taken.
inline long take_best(float* values, long count) {
    long best = -1;
    for (long i = 0; i < count; i++)
        if (values[i] > (best < 0 ? TAKEN : values[best])) best = i;
    values[best] = TAKEN;
    return best;
}
// Makes the values of experts of other groups than the best ones the least. ``sums`` has room for all groups.
inline void keep_groups(const MixtureWeights& m, float* values, float* sums) {
    const long size = m.count / m.groups;
    for (long group = 0; group < m.groups; group++) {
        float best = TAKEN, second = TAKEN;
        for (long i = group * size; i < (group + 1) * size; i++) {
            second = std::max(second, std::min(best, values[i]));
            best = std::max(best, values[i]);
        }
        sums[group] = std::max(LEAST_SUM, m.best_of_group > 1 ? best + second : best);
    }
    for (long place = 0; place < m.kept; place++) take_best(sums, m.groups);
    for (long i = 0; i < m.count; i++)
        if (sums[i / size] != TAKEN) values[i] = LEAST_SUM;
}

// Writes which experts a row chooses, the shared one last, and their weights. Not inlined: the compiler chooses the order of
// the sum, which has to be the same for every caller. ``values`` has room for all experts and groups.
template <class L>
__attribute__((noinline)) void choose_experts(const MixtureWeights& m, const L* logits, float* values, long* chosen,
                                              float* weights) {
    float largest = LEAST_SUM, all = 0;
    for (long i = 0; i < m.count; i++) largest = std::max(largest, up(logits[i]));
    if (m.bias || !m.normalizes)
        for (long i = 0; i < m.count; i++) all += exponential(up(logits[i]) - largest);
    const auto score = [&](long i) {
        return m.sigmoid ? sigmoid(up(logits[i])) : exponential(up(logits[i]) - largest) / all;
    };
    for (long i = 0; i < m.count; i++) {
        const float value = m.bias ? score(i) + m.bias[i] : up(logits[i]);
        values[i] = value > LEAST_SUM ? value : LEAST_SUM;
    }
    if (m.groups > 1) keep_groups(m, values, values + m.count);
    float sum = 0;
    for (long place = 0; place < m.top; place++) {
        chosen[place] = take_best(values, m.count);
        const float logit = up(logits[chosen[place]]);
        sum += weights[place] = m.sigmoid ? sigmoid(logit) : exponential(logit - largest);
    }
    if (!m.normalizes) sum = m.sigmoid ? 1 : all;
    for (long place = 0; place < m.top; place++) weights[place] = weights[place] / sum * m.scale;
    if (m.shared.inner) chosen[m.top] = m.count, weights[m.top] = m.shared_gated ? sigmoid(up(logits[m.count])) : 1;
}

// The sum of products in float. Not inlined; see ``choose_experts``.
template <class T, class W> __attribute__((noinline)) float inner_product(const T* row, const W* weights, long k) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < k; i++) sum += up(row[i]) * up(weights[i]);
    return sum;
}

// The linear layer of one expert of several with n outputs each. ``part`` holds its place among low-bit weights.
template <class T> Linear one_of(const Linear& all, long expert, long k, long n, Stored& part) {
    Linear own = all;
    if (all.bias) own.bias = static_cast<const T*>(all.bias) + expert * n;
    if (!all.parts) {
        own.weights = static_cast<const T*>(all.weights) + expert * n * k;
        return own;
    }
    with_format(all.parts->format, [&](auto number) {
        using F = Format<number>;
        const long bytes = k / F::unit * F::bytes;
        part = {static_cast<const uint8_t*>(all.parts->tiles) + expert * n / TILE * bytes, n, all.parts->format};
    });
    own.parts = &part;
    return own;
}

// Some rows on their way through the experts of a mixture. All threads of a team call the same functions, except for
// ``reserve``.
template <class T> class MixedRows {
  public:
    void reserve(const MixtureWeights& m, long rows, long size) {
        const long some = std::min(MIXED, rows), most = some * m.each();
        hidden = size, width = std::max(width, std::max(hidden, 2 * m.widest())), inner = std::max(inner, m.widest());
        lines = lines_of<T>(1, std::max(hidden, inner));
        inputs.resize(std::max<size_t>(inputs.size(), some * hidden));
        logits.resize(std::max<size_t>(logits.size(), some * m.outputs()));
        if (m.exact) exact.resize(std::max<size_t>(exact.size(), some * m.outputs()));
        pairs = std::max(pairs, most);
    }
    // Once everything is reserved.
    void allocate() {
        if (!pairs) return;
        between.reset(new T[pairs * width]), joined.reset(new T[pairs * inner]), laid.reset(new Line[pairs * lines]);
        chosen.resize(pairs), places.resize(pairs), order.resize(pairs), batch_of.resize(pairs), weights.resize(pairs);
    }
    T* input(long row) { return inputs.data() + row * hidden; }
    T* outputs() { return logits.data(); }  // of the router
    // Float logits of the router for rows whose inputs are there.
    void score(const MixtureWeights& m, long rows) {
        const long count = m.outputs();
#pragma omp for
        for (long task = 0; task < rows * count; task++) {
            const T* row = input(task / count);
            const long first = task % count * hidden;
            exact[task] = m.exact == 2 ? inner_product(row, static_cast<const T*>(m.router.weights) + first, hidden)
                                       : inner_product(row, static_cast<const float*>(m.router.weights) + first, hidden);
        }
    }

    // The experts of rows, whose inputs and router logits are there; what they add up to is given by ``output``.
    void run(const MixtureWeights& m, long rows, int threads, std::vector<float>& values) {
        const long each = m.each(), count = rows * each;
        values.resize(m.count + m.groups);
#pragma omp for
        for (long row = 0; row < rows; row++) {
            const auto choose = [&](const auto& of) {
                choose_experts(m, of.data() + row * m.outputs(), values.data(), chosen.data() + row * each,
                               weights.data() + row * each);
            };
            m.exact ? choose(exact) : choose(logits);
        }
#pragma omp single
        sort(m, count, threads);
#pragma omp for
        for (long place = 0; place < count; place++)
            lay_out(batches[batch_of[place]], false, place, input(order[place] / each));
        multiply(false);
#pragma omp for
        for (long place = 0; place < count; place++) {
            const Batch& batch = batches[batch_of[place]];
            const MlpWeights& mlp = *batch.mlp;
            T* to = joined.get() + place * inner;
            activate<T>(mlp, row_of(batch, place, mlp.entered()), to);
            lay_out(batch, true, place, to);
        }
        multiply(true);
    }
    // The sum of what the experts of a row give, times their weights.
    void output(const MixtureWeights& m, long row, T* to) const {
        const long each = m.each();
        float sums[ADDED];
        for (long from = 0; from < hidden; from += ADDED) {
            const long some = std::min(ADDED, hidden - from);
            std::fill_n(sums, some, 0.0f);
            for (long pair = row * each; pair < (row + 1) * each; pair++) {
                const T* values = row_of(batches[batch_of[places[pair]]], places[pair], hidden) + from;
                for (long i = 0; i < some; i++) sums[i] += up(values[i]) * weights[pair];
            }
            for (long i = 0; i < some; i++) to[from + i] = down<T>(sums[i]);
        }
    }

  private:
    static constexpr long ADDED = 256, SHARED = -1;

    // Rows of one expert, which follow each other in ``order``.
    struct Batch {
        const MlpWeights* mlp;
        long expert, first, count;
    };
    struct Task {
        long batch, from, to;  // outputs
    };
    long hidden = 0, width = 0, inner = 0, pairs = 0, lines = 0;
    std::vector<T> inputs, logits;
    std::vector<float> exact;  // logits of a router whose logits are float
    std::unique_ptr<T[]> between, joined;  // outputs of the first product and of the second; inputs of the second
    std::unique_ptr<Line[]> laid;
    std::vector<long> chosen;           // by row and choice, the expert
    std::vector<float> weights;         // likewise
    std::vector<long> places;           // likewise, where it stands among those sorted by expert
    std::vector<long> order, batch_of;  // by this place, row and choice, and its batch
    std::vector<Batch> batches;
    std::vector<Task> tasks[2];  // of the first product and of the second

    void sort(const MixtureWeights& m, long count, int threads) {
        const long experts = m.count + (m.shared.inner > 0);
        std::vector<long> ends(experts + 1);  // of each expert in the order
        for (long pair = 0; pair < count; pair++) ends[chosen[pair] + 1]++;
        batches.clear(), tasks[0].clear(), tasks[1].clear();
        for (long expert = 0; expert < experts; expert++) {
            const long end = ends[expert] + ends[expert + 1];
            for (long first = ends[expert]; first < end; first += ROWS) {
                const bool is_shared = expert == m.count;
                batches.push_back({is_shared ? &m.shared : &m.experts, is_shared ? SHARED : expert, first,
                                   std::min(ROWS, end - first)});
                std::fill_n(batch_of.begin() + first, batches.back().count, batches.size() - 1);
            }
            ends[expert + 1] = end;
        }
        for (long pair = 0; pair < count; pair++) {
            const long place = ends[chosen[pair]]++;
            places[pair] = place, order[place] = pair;
        }
        for (const bool second : {false, true})
            for (size_t index = 0; index < batches.size(); index++)
                with_product(batches[index], second, [&](const auto& product, auto type) {
                    using W = typename decltype(type)::type;
                    const long step = panel_width<W>(product.n, threads, product.count);
                    for (long from = 0; from < product.n; from += step)
                        tasks[second].push_back({long(index), from, std::min(product.n, from + step)});
                });
    }
    T* row_of(const Batch& batch, long place, long size) const {
        return between.get() + batch.first * width + (place - batch.first) * size;
    }
    template <class W> struct Type {
        using type = W;
    };
    // Calls a function with a product of a batch.
    template <class Function> void with_product(const Batch& batch, bool second, const Function& function) const {
        const MlpWeights& mlp = *batch.mlp;
        const long k = second ? mlp.inner : hidden, n = second ? hidden : mlp.entered();
        Stored part;
        const Linear& all = second ? mlp.down : mlp.gate_up;
        const Linear linear = batch.expert == SHARED ? all : one_of<T>(all, batch.expert, k, n, part);
        with_weights<T>(linear, k, [&](const auto& weights) {
            using W = std::decay_t<decltype(weights)>;
            auto* rows = reinterpret_cast<typename W::Row*>(laid.get() + batch.first * lines);
            T* out = row_of(batch, batch.first, n);
            function(Product<T, W>{weights, static_cast<const T*>(linear.bias), out, nullptr, 1.0f, batch.count, k, n, rows},
                     Type<W>());
        });
    }
    void lay_out(const Batch& batch, bool second, long place, const T* from) const {
        with_product(batch, second, [&](const auto& product, auto) { product.lay_out(from, place - batch.first); });
    }
    // A product of all batches, whose rows are laid out.
    void multiply(bool second) const {
        if constexpr (Whole<T>::paired) {
#pragma omp for
            for (size_t index = 0; index < batches.size(); index++)
                with_product(batches[index], second, [&](const auto& product, auto type) {
                    if constexpr (decltype(type)::type::paired)
                        for (long block = 0; block < product.blocks_of_groups(); block++) product.pair_up(block);
                });
        }
#pragma omp for schedule(guided)
        for (size_t index = 0; index < tasks[second].size(); index++) {
            const Task& task = tasks[second][index];
            with_product(batches[task.batch], second, [&](const auto& product, auto) { product.panel(task.from, task.to); });
        }
    }
};

}  // namespace
