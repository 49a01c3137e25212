// A forward: sublayer after sublayer over the rows of one or several sequences, in one call, by one team of threads that
// meet at barriers. Everything but attention runs over all rows at once; attention goes by sequence.

#pragma once

#include "filters.h"
#include "sublayers.h"

namespace {

constexpr long FEW = 4;          // most rows that every thread lays out for itself, which is faster than a barrier
constexpr long ACTIVATED = 512;  // inputs of a task of an activation

// What attention of rows needs besides their views: queries [rows, all heads, dim], and where [rows, heads * dim] goes.
template <class T> struct Attended {
    Heads sizes;
    float scale, softcap;
    const T *sinks, *queries;
    T* out;
    int layer;
};

// The threads that run a forward, and what they share.
template <class T> class Team {
  public:
    Team(const Forward& forward, T* stream, long rows)
        : f(forward), stream(stream), rows(rows), most_unpacked(f.part_count), unpacked(f.part_count) {
        for (long i = 0; i < f.count; i++) measure(f.sublayers[f.which[i]]);
        if (f.head) hidden = f.head->hidden, widest = std::max(widest, hidden);
        if (f.entry) widest = std::max(widest, 2 * hidden);
        mixed.allocate();
        latents.allocate();
        between.reset(new T[most_between]);
        joined.reset(new T[most_joined]);
        if (most_rank) reductions.reserve(std::min(ROWS, rows), widest, most_rank);
        if (rows > FEW) laid.reset(new Line[lines_of<T>(std::min(ROWS, rows), widest)]);
        if (f.head && f.head->tokens) choices.resize(rows_of(*f.head) * spans_of(*f.head));
        if (f.head && f.head->drawings) {
            draws.resize(choices.size());
            for (long row = 0; f.head->tokens && row < rows_of(*f.head); row++) any_whole |= takes_whole(*f.head, row);
        }
        for (long part = 0; part < f.part_count; part++)
            if (most_unpacked[part]) unpacked[part].reset(new T[most_unpacked[part]]);
        part_of.resize(rows);
        for (long part = 0; part < f.part_count; part++)
            std::fill_n(part_of.begin() + f.parts[part].first_row, f.parts[part].rows, part);
    }

    // Changes the stream [rows, hidden] in place.
    void run() {
#pragma omp parallel num_threads(f.threads) if (f.threads > 1)
        {
            run_on_chosen();
            [[maybe_unused]] const TilesOfThread tiles;
            Own own{std::unique_ptr<T[]>(new T[std::max(hidden, widest)]), std::unique_ptr<float[]>(new float[Attention<T>::room_of(most_slots)]),
                    std::unique_ptr<Line[]>(new Line[lines_of<T>(std::min(FEW, rows), widest)]),
                    std::vector<long>(f.part_count), {}, {}, {}, {}};
            if (most_rank && reduces_alone()) own.reductions.reserve(rows, widest, most_rank);
            if (f.entry) start(own);
            for (long i = 0; i < f.count; i++) {
#pragma omp master  // the stream changes only after the next barrier
                if (f.kept && f.kept[i]) keep(static_cast<T*>(f.kept[i]), f.kept_rows[i]);
                const Sublayer& s = f.sublayers[f.which[i]];
                if (s.attention)
                    attend(s, *s.attention, own);
                else if (s.latent)
                    attend_latents(s, *s.latent, own);
                else if (s.mixture)
                    mix(s, *s.mixture, own);
                else
                    transform(s, *s.mlp, own);
            }
            if (f.head) finish(*f.head, own);
        }
        if (f.head && f.head->tokens)
            for (long row = 0; row < rows_of(*f.head); row++) tell(*f.head, row);
    }

  private:
    const Forward& f;
    T* stream;
    long rows, hidden = 0, widest = 0, most_between = 0, most_joined = 0, most_rank = 0, most_slots = 0;
    std::unique_ptr<T[]> between, joined;  // outputs of a branch's first product; inputs of its second
    ReductionRoom<T> reductions;           // of low-rank products
    std::unique_ptr<Line[]> laid;
    MixedRows<T> mixed;
    LatentRows<T> latents;
    std::vector<long> part_of;  // by row
    std::vector<long> most_unpacked;
    std::vector<std::unique_ptr<T[]>> unpacked;  // by part, keys and values of the slots that a sublayer sees, or null
    std::vector<Choice> choices;  // of the spans of the logits of each row
    std::vector<Draw> draws;      // likewise, where tokens are drawn
    bool any_whole = false;       // the token of some row depends on all of its logits at once

    // What a thread has to itself.
    struct Own {
        std::unique_ptr<T[]> normed;
        std::unique_ptr<float[]> scores;
        std::unique_ptr<Line[]> laid;
        std::vector<long> tasks;  // attention tasks up to the end of each part
        std::vector<float> values;  // of experts
        std::vector<float> changed;  // logits of a row
        AddedProducts<T> added;
        ReductionRoom<T> reductions;  // where each thread runs the first factors for itself
    };

    // What the buffers need for a sublayer. An MLP runs over at most ROWS rows at a time.
    void measure(const Sublayer& s) {
        hidden = s.hidden;
        if (s.mixture) {
            mixed.reserve(*s.mixture, rows, hidden);
            widest = std::max(widest, hidden);
            return;
        }
        long outputs, inputs, some = rows;
        if (s.attention) {
            outputs = s.attention->sizes.all() * s.attention->sizes.dim;
            inputs = s.attention->sizes.heads * s.attention->sizes.dim;
            for (long part = 0; part < f.part_count; part++) {
                const Heads& sizes = s.attention->sizes;
                const long slots = slots_of(s, f.parts[part]);
                most_slots = std::max(most_slots, slots);
                if (f.packed && !f.parts[part].seen && tasks_of(sizes, f.parts[part]) > 1)
                    most_unpacked[part] = std::max(most_unpacked[part], 2 * sizes.key_heads * slots * sizes.dim);
            }
        } else if (s.latent) {
            latents.reserve(*s.latent, rows);
            outputs = s.latent->entered(), inputs = s.latent->heads * s.latent->value;
            widest = std::max(widest, s.latent->rank);
            for (long part = 0; part < f.part_count; part++) most_slots = std::max(most_slots, slots_of(s, f.parts[part]));
        } else {
            outputs = s.mlp->entered(), inputs = s.mlp->inner, some = std::min(ROWS, rows);
        }
        for (long part = 0; part < f.part_count; part++)
            if (const AdaptedSublayer* adapted = adapted_by(s, f.parts[part]))
                most_rank = std::max({most_rank, adapted->entering.rank, adapted->leaving.rank});
        most_between = std::max(most_between, some * std::max(outputs, hidden));
        most_joined = std::max(most_joined, some * inputs);
        widest = std::max({widest, hidden, inputs});
    }

    void keep(T* to, long last) const { std::copy(stream + (rows - last) * hidden, stream + rows * hidden, to); }

    // The low-rank products of a sublayer that are added to one of its products.
    struct Adapted {
        const Sublayer* sublayer = nullptr;
        LowRank AdaptedSublayer::*which = nullptr;
    };

    // A product for some rows of the stream, of which ``input`` gives the inputs.
    template <class Input>
    void multiply(const Linear& linear, long k, long n, long first, long last, const Results<T>& results,
                  const Input& input, Own& own, const Adapted& adapted = {}) const {
        const T* bias = static_cast<const T*>(linear.bias);
        with_weights<T>(linear, k, [&](const auto& weights) {
            using W = std::decay_t<decltype(weights)>;
            const long width = panel_width<W>(n, f.threads, std::min(ROWS, last - first));
            for (long start = first; start < last; start += ROWS) {
                const long some = std::min(ROWS, last - start);
                const Results<T> to = results.from(start - first);
                const auto input_of = [&](long row) { return input(start + row); };
                own.added.clear();
                if (most_rank && adapted.sublayer) reduce(adapted, k, start, some, input_of, own);
                auto* rows = reinterpret_cast<typename W::Row*>((some > FEW ? laid : own.laid).get());
                const Product<T, W> task{weights, bias, to.out, to.sums, to.multiplier, some, k, n, rows, to.stride};
                if (some > FEW) {
#pragma omp for
                    for (long row = 0; row < some; row++) task.lay_out(input_of(row), row);
                    if constexpr (W::paired) {
#pragma omp for
                        for (long block = 0; block < task.blocks_of_groups(); block++) task.pair_up(block);
                    }
                } else {
                    for (long row = 0; row < some; row++) task.lay_out(input_of(row), row);
                    if constexpr (W::paired)
                        for (long block = 0; block < task.blocks_of_groups(); block++) task.pair_up(block);
                }
#pragma omp for schedule(guided)
                for (long from = 0; from < n; from += width) {
                    task.panel(from, std::min(n, from + width));
                    own.added.add(from, std::min(n, from + width), to);
                }
            }
        });
    }

    // Whether each thread runs all first factors for itself, which is faster than a barrier.
    bool reduces_alone() const { return rows <= FEW && f.threads <= FEW; }
    // What an adapter adds to the products of a sublayer; null for nothing.
    const AdaptedSublayer* adapted_by(const Sublayer& s, const Part& part) const {
        return part.adapter ? part.adapter + (&s - f.sublayers) : nullptr;
    }
    // The first factors of low-rank products of some rows. Rows of neighbouring parts with the same adapter go together.
    template <class Input>
    void reduce(const Adapted& adapted, long k, long start, long some, const Input& input, Own& own) const {
        const ReductionRoom<T>& room = reduces_alone() ? own.reductions : reductions;
        for (long part = 0, end; part < f.part_count; part = end) {
            const Part& one = f.parts[part];
            for (end = part + 1; end < f.part_count && f.parts[end].adapter == one.adapter;) end++;
            const AdaptedSublayer* found = adapted_by(*adapted.sublayer, one);
            const long from = std::max(0L, one.first_row - start);
            const long to = std::min(some, f.parts[end - 1].first_row + f.parts[end - 1].rows - start);
            if (found && (found->*adapted.which).count && from < to)
                own.added.add_run(found->*adapted.which, k, from, to - from, room, most_rank);
        }
        if (own.added.empty()) return;
        if (reduces_alone()) {
            for (long row = 0; row < some; row++) own.added.lay_out(input(row), row);
            return own.added.reduce_all();
        }
#pragma omp for
        for (long row = 0; row < some; row++) own.added.lay_out(input(row), row);
        if constexpr (Whole<T>::paired) {
#pragma omp for
            for (long run = 0; run < own.added.runs(); run++) own.added.pair_up(run);
        }
#pragma omp for
        for (long item = 0; item < own.added.items(); item++) own.added.reduce(item);
    }
    // The stream, where a product gives it.
    void start(Own& own) const {
        const auto input = [&](long row) { return static_cast<const T*>(f.entering) + row * 2 * hidden; };
        multiply(*f.entry, 2 * hidden, hidden, 0, rows, {stream, nullptr, 1.0f, hidden}, input, own);
    }
    // The first product of a branch, of rows of the stream.
    void enter(const Sublayer& s, const Linear& linear, long n, long first, long last, Own& own) const {
        const auto input = [&](long row) {
            const T* from = stream + row * hidden;
            if (!s.before.kind) return from;
            normalize<T>(s.before, from, own.normed.get(), hidden);
            return static_cast<const T*>(own.normed.get());
        };
        const Results<T> results{between.get(), nullptr, 1.0f, n};
        multiply(linear, hidden, n, first, last, results, input, own, {&s, &AdaptedSublayer::entering});
    }
    // The last product of a branch, of rows of ``joined``, and what it adds to rows of the stream.
    void leave(const Sublayer& s, const Linear& linear, long k, long first, long last, Own& own) const {
        const auto input = [&](long row) { return static_cast<const T*>(joined.get() + (row - first) * k); };
        T* out = s.after.kind ? between.get() : nullptr;
        const Results<T> results{out, stream + first * hidden, s.multiplier, hidden};
        multiply(linear, k, hidden, first, last, results, input, own, {&s, &AdaptedSublayer::leaving});
        if (!out) return;
#pragma omp for
        for (long row = first; row < last; row++) {
            normalize<T>(s.after, out + (row - first) * hidden, own.normed.get(), hidden);
            add_to(stream + row * hidden, own.normed.get(), hidden, s.multiplier);
        }
    }

    void attend(const Sublayer& s, const AttentionWeights& a, Own& own) const {
        const Heads& sizes = a.sizes;
        enter(s, a.inputs, sizes.all() * sizes.dim, 0, rows, own);
        if (a.norms_rows) norm_rows(a);
        place_heads(s, a);
        for (long part = 0; part < f.part_count; part++)
            if (unpacked[part]) unpack_slots(s, f.parts[part], unpacked[part].get());
        attend_all(s, {sizes, a.scale, a.softcap, static_cast<const T*>(a.sinks), between.get(), joined.get(), a.layer}, own);
        leave(s, a.output, sizes.heads * sizes.dim, 0, rows, own);
    }
    void attend_latents(const Sublayer& s, const LatentWeights& l, Own& own) const {
        const CosSin& turn = f.turns[s.turn];
        enter(s, l.inputs, l.entered(), 0, rows, own);
        if (l.rank) {
            const auto input = [&](long row) {
                normalize<T>(l.query_norm, between.get() + row * l.entered(), own.normed.get(), l.rank);
                return static_cast<const T*>(own.normed.get());
            };
            const Results<T> results{latents.queries(), nullptr, 1.0f, l.heads * l.query()};
            multiply(l.queries, l.rank, l.heads * l.query(), 0, rows, results, input, own);
        }
        place_latents(l, turn);
        latents.absorb(l, turn, rows, [&](long row, long head) {
            T* queries = l.rank ? latents.queries() + row * l.heads * l.query() : between.get() + row * l.entered();
            return queries + head * l.query();
        });
        attend_all(s, {l.sizes(), l.scale, 0, nullptr, latents.absorbed(), latents.mixed(), l.layer}, own);
        latents.expand(l, rows, joined.get());
        leave(s, l.output, l.heads * l.value, 0, rows, own);
    }
    // Norms latents, rotates what is after them, and writes both into the caches.
    void place_latents(const LatentWeights& l, const CosSin& turn) const {
#pragma omp for
        for (long row = 0; row < rows; row++) {
            const Part& part = f.parts[part_of[row]];
            T* values = between.get() + row * l.entered() + l.first();
            normalize<T>(l.latent_norm, values, values, l.latent);
            rotate_neighbours(values + l.latent, turn, row, l.halves);
            T* cache = static_cast<T*>(part.caches[l.layer]);
            std::copy_n(values, l.width(), cache + (part.start + row - part.first_row) * l.width());
        }
    }
    // Attention of all rows, whose keys and values are in the caches.
    void attend_all(const Sublayer& s, const Attended<T>& a, Own& own) const {
        long tasks = 0;
        for (long part = 0; part < f.part_count; part++) own.tasks[part] = tasks += a.sizes.key_heads * tasks_of(a.sizes, f.parts[part]);
#pragma omp for schedule(dynamic)
        for (long task = 0; task < tasks; task++) {
            const long part = std::upper_bound(own.tasks.begin(), own.tasks.end(), task) - own.tasks.begin();
            attend_some(s, a, part, task - (part ? own.tasks[part - 1] : 0), own);
        }
    }
    // The tasks of a key head: about the same number of queries each, fewer than could read keys and values together where
    // threads would have nothing to do otherwise, or fewer tasks than others.
    long tasks_of(const Heads& sizes, const Part& part) const {
        const long queries = part.rows * sizes.group(), heads = sizes.key_heads * f.part_count;
        long tasks = std::max((queries + QUERIES - 1) / QUERIES, std::min(queries, (f.threads + heads - 1) / heads));
        while (heads * tasks % f.threads && heads * tasks < 4 * f.threads && (tasks + 1) * QUERY_TILE <= queries) tasks++;
        return tasks;
    }
    // Slots of a part that any of its rows sees.
    static long slots_of(const Sublayer& s, const Part& part) { return part.start + part.rows - part.views[s.view].first; }
    // Unpacks keys and values for a part of which several tasks attend to the same ones.
    void unpack_slots(const Sublayer& s, const Part& part, T* to) const {
        const Heads& sizes = s.attention->sizes;
        const long slots = slots_of(s, part), stretches = (slots + STRETCH - 1) / STRETCH;
        const PackedSlots<T> from(part.caches[s.attention->layer], part.views[s.view].first, part.capacity, sizes.dim);
#pragma omp for
        for (long task = 0; task < 2 * sizes.key_heads * stretches; task++) {
            const long head = task / stretches, slot = task % stretches * STRETCH;
            from.rows(head, slot, std::min(STRETCH, slots - slot), to + (head * slots + slot) * sizes.dim);
        }
    }
    // One task of a part. Where it is the only one of its key head, it unpacks for itself.
    void attend_some(const Sublayer& s, const Attended<T>& a, long index, long task, Own& own) const {
        const Part& part = f.parts[index];
        const void* cache = part.caches[a.layer];
        const long first = part.views[s.view].first, dim = a.sizes.dim;
        if (unpacked[index])
            attend_to(PlainSlots<T>(unpacked[index].get(), 0, slots_of(s, part), dim), s, a, part, task, own);
        else if (f.packed)
            attend_chosen(PackedSlots<T>(cache, first, part.capacity, dim), s, a, part, task, own);
        else
            attend_chosen(PlainSlots<T>(cache, first, part.capacity, dim), s, a, part, task, own);
    }
    void attend_chosen(const Slots<T>& all, const Sublayer& s, const Attended<T>& a, const Part& part, long task, Own& own) const {
        if (seen_by(s, part))
            attend_to(ChosenSlots<T>(all, *part.seen, a.layer), s, a, part, task, own);
        else
            attend_to(all, s, a, part, task, own);
    }
    static bool seen_by(const Sublayer& s, const Part& part) { return part.seen && !part.views[s.view].window; }
    void attend_to(const Slots<T>& cached, const Sublayer& s, const Attended<T>& a, const Part& part, long task, Own& own) const {
        const Heads& sizes = a.sizes;
        const View& view = part.views[s.view];
        const T* queries = a.queries + part.first_row * sizes.all() * sizes.dim;
        T* out = a.out + part.first_row * sizes.heads * sizes.dim;
        const long tasks = tasks_of(sizes, part);
        const long slots = seen_by(s, part) ? part.seen->slots(part.start + part.rows) : slots_of(s, part);
        float* shares = part.shares && !view.window ? part.shares + a.layer * sizes.heads * part.share_blocks : nullptr;
        const Attention<T> attention{sizes, view, queries, cached, part.rows, slots, a.scale, a.softcap, a.sinks, out, shares, part.share_blocks};
        const long first = task % tasks * attention.count / tasks, last = (task % tasks + 1) * attention.count / tasks;
        attention.run(task / tasks, first, last - first, own.scores.get());
    }
    // Norms over the queries of a row together, and over its keys.
    void norm_rows(const AttentionWeights& a) const {
        const Heads& sizes = a.sizes;
#pragma omp for
        for (long row = 0; row < rows; row++) {
            T *queries = between.get() + row * sizes.all() * sizes.dim, *keys = queries + sizes.heads * sizes.dim;
            normalize<T>(a.query_norm, queries, queries, sizes.heads * sizes.dim);
            normalize<T>(a.key_norm, keys, keys, sizes.key_heads * sizes.dim);
        }
    }
    // Head norms, rope, and keys and values into the caches.
    void place_heads(const Sublayer& s, const AttentionWeights& a) const {
        const Heads& sizes = a.sizes;
        const long all = sizes.all(), dim = sizes.dim;
        const CosSin turn = s.turn < 0 ? CosSin{} : f.turns[s.turn];
#pragma omp for
        for (long item = 0; item < rows * all; item++) {
            const long row = item / all, head = item % all;
            T* values = between.get() + item * dim;
            if (head < sizes.heads + sizes.key_heads) {
                const Norm& norm = head < sizes.heads ? a.query_norm : a.key_norm;
                const bool norms = norm.kind && !a.norms_rows;
                if (norms && !a.norms_last) normalize<T>(norm, values, values, dim);
                turn.is_float ? rotate<T, float>(values, turn, row, a.neighbours)
                              : rotate<T, T>(values, turn, row, a.neighbours);
                if (norms && a.norms_last) normalize<T>(norm, values, values, dim);
            }
            if (head >= sizes.heads) {
                const Part& part = f.parts[part_of[row]];
                const long place = (head - sizes.heads) * part.capacity + part.start + row - part.first_row;
                void* cache = part.caches[a.layer];
                if (f.packed)
                    pack_row(values, static_cast<uint8_t*>(cache) + place * packed_bytes(dim), dim);
                else
                    std::memcpy(static_cast<T*>(cache) + place * dim, values, dim * sizeof(T));
            }
        }
    }

    long rows_of(const Head& head) const { return head.rows ? head.count : rows; }
    static long spans_of(const Head& head) { return (head.outputs + SPAN - 1) / SPAN; }
    static bool draws_row(const Head& head, long row) { return head.drawings && head.drawings[row].temperature > 0; }

    // Whether the token of a row depends on all of its logits at once.
    static bool takes_whole(const Head& head, long row) {
        return (draws_row(head, row) && filters(head.drawings[row])) || (head.drawings && changes(head.drawings[row]));
    }

    void finish(const Head& head, Own& own) {
        T* out = static_cast<T*>(head.out);
        if (!head.linear.weights && !head.linear.parts) {
#pragma omp for
            for (long row = 0; row < rows; row++) normalize<T>(head.norm, stream + row * hidden, out + row * hidden, hidden);
            return;
        }
        const long count = rows_of(head);
        const auto input = [&](long row) {
            normalize<T>(head.norm, stream + (head.rows ? head.rows[row] : row) * hidden, own.normed.get(), hidden);
            return static_cast<const T*>(own.normed.get());
        };
        multiply(head.linear, hidden, head.outputs, 0, count, {out, nullptr, 1.0f, head.outputs}, input, own);
        const long spans = spans_of(head);
#pragma omp for
        for (long task = 0; task < count * spans; task++) {
            const long from = task % spans * SPAN, to = std::min(head.outputs, from + SPAN);
            const long row = task / spans;
            T* logits = out + row * head.outputs;
            scale_logits(logits + from, to - from, head.divisor, head.softcap);
            if (!head.tokens) continue;
            choices[task] = choose(logits, from, to, head.confidences);
            if (draws_row(head, row) && !takes_whole(head, row))
                draws[task] = draw(logits, head.drawings[row], choices[task].token, from, to);
        }
        if (!any_whole) return;
#pragma omp for
        for (long row = 0; row < count; row++)
            if (const T* logits = out + row * head.outputs; takes_whole(head, row))
                draws[row * spans].token = take_token(logits, head.outputs, choice_of(head, row), head.drawings[row], own.changed);
    }
    Choice choice_of(const Head& head, long row) const {
        const long spans = spans_of(head);
        Choice choice = choices[row * spans];
        for (long span = 1; span < spans; span++) choice = join(choice, choices[row * spans + span]);
        return choice;
    }
    // The choice of a row.
    void tell(const Head& head, long row) const {
        const long spans = spans_of(head);
        const Choice choice = choice_of(head, row);
        head.tokens[row] = choice.token, head.finite[row] = std::isfinite(choice.sum);
        if (head.confidences) head.confidences[row] = 1.0f / choice.exponentials;
        const bool is_whole = takes_whole(head, row);
        if (!is_whole && !draws_row(head, row)) return;
        Draw drawn = draws[row * spans];
        for (long span = 1; !is_whole && span < spans; span++)
            if (draws[row * spans + span].largest > drawn.largest) drawn = draws[row * spans + span];
        head.tokens[row] = drawn.token;
    }

    void transform(const Sublayer& s, const MlpWeights& mlp, Own& own) const {
        for (long first = 0; first < rows; first += ROWS) {
            const long last = std::min(rows, first + ROWS), inner = mlp.inner;
            enter(s, mlp.gate_up, mlp.entered(), first, last, own);
#pragma omp for collapse(2)
            for (long row = 0; row < last - first; row++)
                for (long from = 0; from < inner; from += ACTIVATED) {
                    const T* gate = between.get() + row * mlp.entered() + from;
                    T* to = joined.get() + row * inner + from;
                    const T* other = mlp.gated ? gate + inner : nullptr;
                    activate<T>(mlp.activation, gate, other, to, std::min(ACTIVATED, inner - from));
                }
            leave(s, mlp.down, inner, first, last, own);
        }
    }

    void mix(const Sublayer& s, const MixtureWeights& m, Own& own) {
        for (long first = 0; first < rows; first += MIXED) {
            const long last = std::min(rows, first + MIXED);
#pragma omp for
            for (long row = first; row < last; row++) {
                const T* from = stream + row * hidden;
                T* to = mixed.input(row - first);
                if (s.before.kind)
                    normalize<T>(s.before, from, to, hidden);
                else
                    std::copy_n(from, hidden, to);
            }
            const auto input = [&](long row) { return static_cast<const T*>(mixed.input(row - first)); };
            if (m.exact)
                mixed.score(m, last - first);
            else
                multiply(m.router, hidden, m.outputs(), first, last, {mixed.outputs(), nullptr, 1.0f, m.outputs()}, input, own);
            mixed.run(m, last - first, f.threads, own.values);
#pragma omp for
            for (long row = first; row < last; row++) {
                T* to = mixed.input(row - first);
                mixed.output(m, row - first, to);
                if (s.after.kind) normalize<T>(s.after, to, to, hidden);
                add_to(stream + row * hidden, to, hidden, s.multiplier);
            }
        }
    }
};

}  // namespace
