// A forward: sublayer after sublayer over some rows, in one call, by one team of threads that meet at barriers.
//
// Included by kernels.cpp, whose parts it puts together: each row gets what it gets from the single sublayers.

constexpr long FEW = 4;         // most rows that every thread prepares for itself, which is quicker than to meet
constexpr long ACTIVATED = 512;  // inputs of a part of an activation

// What rows see through a window: slots from ``first`` to the last row's; visible [rows, slots], null where they see all.
struct View {
    const bool* visible;
    long first;
};

// Cosine and signed sine, [rows, turned] each.
struct Turn {
    const void *cosine, *sine;
    long turned;
};

// An attention branch or an MLP.
struct Sublayer {
    const Projection* attention;  // null: an MLP
    const Mlp* mlp;
    const void *output, *output_bias;  // of an attention branch
    float scale;
    int layer, view, turn;  // turn: -1 without rope
};

struct Forward {
    const Sublayer* sublayers;
    const int* which;  // the sublayers to run, ascending
    long count;
    void* const* kept;       // where the last rows of the stream before each of them go, or null
    const long* kept_rows;   // how many
    void* const* caches;     // by layer [2, key_heads, capacity, head_dim]
    long capacity, start;    // slot of the first row
    const View* views;
    const Turn* turns;
    int threads;
};

template <class T> class Team {
  public:
    Team(const Forward& forward, T* stream, long rows) : f(forward), stream(stream), rows(rows) {
        for (long i = 0; i < f.count; i++) {
            const Sublayer& s = f.sublayers[f.which[i]];
            if (s.attention) {
                const Projection& p = *s.attention;
                hidden = p.hidden;
                widest = std::max({widest, p.hidden, p.heads * p.head_dim});
                most_heads = std::max(most_heads, (p.heads + 2 * p.key_heads) * p.head_dim);
                most_slots = std::max(most_slots, f.start + rows - f.views[s.view].first);
            } else {
                hidden = s.mlp->hidden;
                widest = std::max({widest, s.mlp->hidden, s.mlp->inner});
                most_inner = std::max(most_inner, s.mlp->inner);
            }
        }
        between.resize(rows * std::max(most_heads, 2 * most_inner));
        joined.resize(rows * widest);
        if (std::min(ROWS, rows) > FEW) laid.reset(new Block<T>[std::min(ROWS, rows) * blocks_of<T>(widest)]);
    }

    // Changes the stream [rows, hidden] in place.
    void run() {
#pragma omp parallel num_threads(f.threads) if (f.threads > 1)
        {
            Own own{std::vector<T>(hidden), std::vector<float>(4 * most_slots),
                    std::unique_ptr<Block<T>[]>(new Block<T>[std::min(FEW, rows) * blocks_of<T>(widest)])};
            for (long i = 0; i < f.count; i++) {
#pragma omp master  // the stream changes only after the next barrier
                if (f.kept[i]) keep(static_cast<T*>(f.kept[i]), f.kept_rows[i]);
                const Sublayer& s = f.sublayers[f.which[i]];
                if (s.attention)
                    attend(s, *s.attention, own);
                else
                    transform(*s.mlp, own);
            }
        }
    }

  private:
    const Forward& f;
    T* stream;
    long rows, hidden = 0, widest = 0, most_heads = 0, most_inner = 0, most_slots = 0;
    std::vector<T> between, joined;     // [rows, outputs] of a branch's first product; [rows, inputs] of its second
    std::unique_ptr<Block<T>[]> laid;

    // What a thread has to itself.
    struct Own {
        std::vector<T> normed;
        std::vector<float> scores;
        std::unique_ptr<Block<T>[]> laid;
    };

    void keep(T* to, long last) const { std::copy(stream + (rows - last) * hidden, stream + rows * hidden, to); }

    // rows * weights, written to ``out`` or added to the stream. ``input`` gives a row's inputs.
    template <class Input>
    void multiply(const void* weights, const void* bias, long k, long n, T* out, const Input& input, Own& own) const {
        const long width = panel_width(n, f.threads);
        for (long start = 0; start < rows; start += ROWS) {
            const long some = std::min(ROWS, rows - start);
            Product<T> task{static_cast<const T*>(weights), static_cast<const T*>(bias), nullptr, nullptr, some, k, n,
                            some > FEW ? laid.get() : own.laid.get()};
            (out ? task.out : task.stream) = (out ? out : stream) + start * n;
            if (some > FEW) {
#pragma omp for
                for (long row = 0; row < some; row++) task.lay_out(input(start + row), row);
            } else {
                for (long row = 0; row < some; row++) task.lay_out(input(start + row), row);
            }
#pragma omp for schedule(dynamic)
            for (long from = 0; from < n; from += width) task.panel(from, std::min(n, from + width));
        }
    }

    auto normed(const void* weight, float epsilon, Own& own) const {
        return [=, &own](long row) {
            norm<T>(stream + row * hidden, static_cast<const T*>(weight), epsilon, own.normed.data(), hidden);
            return own.normed.data();
        };
    }
    auto row_of(const T* values, long width) const {
        return [=](long row) { return values + row * width; };
    }

    void attend(const Sublayer& s, const Projection& p, Own& own) {
        const long all = p.heads + 2 * p.key_heads, dim = p.head_dim;
        T *heads = between.data(), *cache = static_cast<T*>(f.caches[s.layer]);
        multiply(p.weights, p.bias, hidden, all * dim, heads, normed(p.norm, p.epsilon, own), own);
        const Turn turning = s.turn < 0 ? Turn{} : f.turns[s.turn];
        const T *cosine = static_cast<const T*>(turning.cosine), *sine = static_cast<const T*>(turning.sine);
#pragma omp for
        for (long item = 0; item < rows * all; item++) {
            const long row = item / all, head = item % all, turned = turning.turned;
            T* values = heads + item * dim;
            if (turned && head < p.heads + p.key_heads)
                turn<T>(values, cosine + row * turned, sine + row * turned, turned);
            if (head >= p.heads)
                std::memcpy(cache + ((head - p.heads) * f.capacity + f.start + row) * dim, values, dim * sizeof(T));
        }
        const View& view = f.views[s.view];
        const T *keys = cache + view.first * dim, *values = keys + p.key_heads * f.capacity * dim;
        const long slots = f.start + rows - view.first;
        const Attention<T> task{p, heads, keys, values, f.capacity, slots, view.visible, s.scale, joined.data()};
        const long queries = rows * task.group;
#pragma omp for collapse(2) schedule(dynamic)
        for (long head = 0; head < p.key_heads; head++)
            for (long query = 0; query < queries; query += 4) task.run_four(head, query, queries, own.scores.data());
        multiply(s.output, s.output_bias, p.heads * dim, hidden, nullptr, row_of(joined.data(), p.heads * dim), own);
    }

    void transform(const Mlp& p, Own& own) {
        T *both = between.data(), *inner = joined.data();
        multiply(p.gate_up, p.gate_up_bias, hidden, 2 * p.inner, both, normed(p.norm, p.epsilon, own), own);
#pragma omp for collapse(2)
        for (long row = 0; row < rows; row++)
            for (long from = 0; from < p.inner; from += ACTIVATED) {
                const T* gate = both + row * 2 * p.inner + from;
                activate<T>(gate, gate + p.inner, inner + row * p.inner + from, std::min(ACTIVATED, p.inner - from));
            }
        multiply(p.down, p.down_bias, p.inner, hidden, nullptr, row_of(inner, p.inner), own);
    }
};
