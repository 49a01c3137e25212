// Attention of bfloat16 rows at odd shapes, in tiles: with AMX, or with TILE_INSTRUCTIONS="tile_emulation.h" and AVX-512.
//
// Checks that a row has the same bits alone and among others, and as a branch of a tree as at the end of its own path; and
// that all are close to sums in double precision. Prints a hash of the outputs of each shape, to compare processors.

#include "kernels.cpp"

#include <cstdio>
#include <cstdlib>

#include "permission.h"

#if !defined(ATTENDS_IN_TILES)
#error "this attention does not run in tiles"
#endif

namespace {

void check(bool holds, const char* what) {
    if (!holds) std::fprintf(stderr, "%s\n", what), std::exit(1);
}

struct Random {
    uint64_t state = 1;
    uint64_t next() { return mix(state += GAMMA); }
    float number() { return float(next() >> 40) / float(1 << 23) - 1; }
    std::vector<bf16> numbers(long size) {
        std::vector<bf16> values(size);
        for (bf16& value : values) value = down<bf16>(number());
        return values;
    }
};

struct Shape {
    long heads, key_heads, dim, cached, rows, window;
    int shared;
};

struct Case {
    Shape shape;
    Heads sizes{shape.heads, shape.key_heads, shape.dim, shape.shared};
    long capacity = shape.cached + shape.rows + 3;
    Random random;
    std::vector<bf16> cache = random.numbers((shape.shared ? 1 : 2) * shape.key_heads * capacity * shape.dim);
    std::vector<bf16> queries = random.numbers(shape.rows * sizes.all() * shape.dim);
    long width = shape.heads * shape.dim;  // of an output

    // Outputs of some rows after some cached ones, in tasks of ``most`` queries.
    std::vector<bf16> attend(const bf16* from, const std::vector<bf16>& own, long cached, long rows, long most,
                             const bool* visible = nullptr) const {
        const long first = shape.window ? std::max(0L, cached + 1 - shape.window) : 0, slots = cached + rows - first;
        const View view{visible, first, shape.window};
        const PlainSlots<bf16> all(own.data(), first, capacity, shape.dim);
        std::vector<bf16> out(rows * width);
        const Attention<bf16> attention{sizes, view, from, all, rows, slots, 0.3f, 0, nullptr, out.data(), nullptr, 0};
        std::vector<float> room(Attention<bf16>::room_of(slots), NAN);
        for (long head = 0; head < shape.key_heads; head++)
            for (long query = 0; query < attention.count; query += most)
                attention.run(head, query, std::min(most, attention.count - query), room.data());
        return out;
    }
    const bf16* row_of(const std::vector<bf16>& own, long head, long slot) const {
        return own.data() + (head * capacity + slot) * shape.dim;
    }
    const bf16* queries_of(long row) const { return queries.data() + row * sizes.all() * shape.dim; }

    void check_close(const std::vector<bf16>& out) const {
        for (long row = 0; row < shape.rows; row++)
            for (long head = 0; head < shape.heads; head++) {
                const long key_head = head / sizes.group(), end = shape.cached + row + 1;
                const bf16* query = queries_of(row) + head * shape.dim;
                double total = 0;
                std::vector<double> sums(shape.dim), sizes_of(shape.dim);
                for (long slot = shape.window ? std::max(0L, end - shape.window) : 0; slot < end; slot++) {
                    double score = 0;
                    for (long i = 0; i < shape.dim; i++) score += double(up(query[i])) * up(row_of(cache, key_head, slot)[i]);
                    const double weight = std::exp(0.3 * score);
                    total += weight;
                    for (long i = 0; i < shape.dim; i++) {
                        const double term = weight * up(row_of(cache, sizes.value_of(key_head), slot)[i]);
                        sums[i] += term, sizes_of[i] += std::fabs(term);
                    }
                }
                for (long i = 0; i < shape.dim; i++) {
                    const double found = up(out[row * width + head * shape.dim + i]), sum = sums[i] / total;
                    check(std::fabs(found - sum) <= std::fabs(sum) / 128 + sizes_of[i] / total / 256, "an output is wrong");
                }
            }
    }
    void check_alone(const std::vector<bf16>& out) const {
        for (long row = 0; row < shape.rows; row++) {
            const auto own = attend(queries_of(row), cache, shape.cached + row, 1, QUERIES);
            check(!std::memcmp(own.data(), out.data() + row * width, width * sizeof(bf16)), "a row depends on others");
        }
    }
    // Rows whose parents are any rows before them, or the cached ones.
    void check_tree() {
        std::vector<long> parents(shape.rows, -1);
        for (long row = 1; row < shape.rows; row++) parents[row] = long(random.next() % (row + 1)) - 1;
        const long first = shape.window ? std::max(0L, shape.cached + 1 - shape.window) : 0;
        const long slots = shape.cached + shape.rows - first;
        std::unique_ptr<bool[]> visible(new bool[shape.rows * slots]());
        std::vector<std::vector<long>> paths(shape.rows);
        for (long row = 0; row < shape.rows; row++) {
            for (long node = row; node >= 0; node = parents[node]) paths[row].insert(paths[row].begin(), node);
            const long depth = paths[row].size(), from = shape.window ? std::max(0L, shape.cached + depth - shape.window) : 0;
            bool* own = visible.get() + row * slots;
            for (long slot = from; slot < shape.cached; slot++) own[slot - first] = true;
            for (long i = std::max(0L, from - shape.cached); i < depth; i++) own[shape.cached + paths[row][i] - first] = true;
        }
        const auto out = attend(queries.data(), cache, shape.cached, shape.rows, QUERIES, visible.get());
        for (long row = 0; row < shape.rows; row++) {
            std::vector<bf16> own = cache;
            const long depth = paths[row].size();
            for (long head = 0; head < (shape.shared ? 1 : 2) * shape.key_heads; head++)
                for (long i = 0; i < depth; i++)
                    std::copy_n(row_of(cache, head, shape.cached + paths[row][i]), shape.dim,
                                own.data() + (head * capacity + shape.cached + i) * shape.dim);
            const auto alone = attend(queries_of(row), own, shape.cached + depth - 1, 1, QUERIES);
            check(!std::memcmp(alone.data(), out.data() + row * width, width * sizeof(bf16)), "a branch depends on others");
        }
    }
};

void run(const Shape& shape) {
    Case own{shape};
    const auto out = own.attend(own.queries.data(), own.cache, shape.cached, shape.rows, QUERIES);
    own.check_close(out);
    own.check_alone(out);
    for (const long most : {1L, 7L, 17L}) {
        const auto other = own.attend(own.queries.data(), own.cache, shape.cached, shape.rows, most);
        check(!std::memcmp(other.data(), out.data(), out.size() * sizeof(bf16)), "a row depends on its task");
    }
    own.check_tree();
    uint64_t hash = 0;
    for (const bf16 value : out) hash = mix(hash + GAMMA + value.bits);
    std::printf("%ld %ld %ld %ld %ld %ld %016lx\n", shape.heads, shape.key_heads, shape.dim, shape.cached, shape.rows,
                shape.window, (unsigned long)hash);
}

}  // namespace

int main() {
    check(permits_tiles(), "the system does not permit tiles");
    run({1, 1, 32, 0, 1, 0, 0});
    run({2, 1, 64, 0, 5, 0, 0});
    run({6, 2, 64, 31, 9, 0, 0});
    run({12, 2, 128, 130, 12, 0, 0});
    run({3, 3, 96, 300, 40, 0, 0});
    run({7, 1, 160, 97, 6, 0, 0});
    run({4, 2, 64, 200, 20, 50, 0});
    run({4, 1, 32, 400, 33, 129, 0});
    run({2, 1, 32, 45, 24, 7, 0});
    run({5, 1, 576, 70, 8, 0, 1});
#if defined(TILE_INSTRUCTIONS)
    check(tile_products > 0, "no product ran in tiles");
#endif
}
