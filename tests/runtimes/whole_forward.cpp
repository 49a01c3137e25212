// Runs forwards and chains of a small random model without Python, for processors that are emulated.
//
// Prints logits and drawn tokens, which have to be nearly those of another processor. Checks that each row has the same
// bits alone and with others, and that a chain draws what its forwards draw one by one.

#include "kernels.cpp"

#include <cstdio>
#include <cstdlib>
#include <deque>

#include "permission.h"

namespace {

constexpr long LAYERS = 2, HIDDEN = 64, HEADS = 4, KEY_HEADS = 2, DIM = 32, INNER = 96, VOCAB = 100, ROOM = 24;
constexpr long EXPERTS = 4, TOP = 2, EXPERT_INNER = 32;
constexpr long ALL = (HEADS + 2 * KEY_HEADS) * DIM;

void check(bool holds, const char* what) {
    if (!holds) std::fprintf(stderr, "%s\n", what), std::exit(1);
}

template <class T> struct Model {
    std::vector<std::vector<T>> tensors;
    std::vector<std::vector<uint8_t>> bytes;
    std::deque<Stored> parts;
    std::vector<AttentionWeights> attention = std::vector<AttentionWeights>(LAYERS);
    std::vector<MlpWeights> mlp = std::vector<MlpWeights>(LAYERS);
    std::vector<MixtureWeights> mixtures = std::vector<MixtureWeights>(LAYERS);
    std::vector<Sublayer> sublayers;
    std::vector<int> which;
    std::vector<float> cosine, sine;
    Head head{};
    const T* embedding;
    uint64_t state = 1;

    float next() { return float((state = mix(state + GAMMA)) >> 40) / float(1 << 23) - 1; }

    const T* tensor(long size, float scale, float added = 0) {
        std::vector<T> values(size);
        for (T& value : values) value = down<T>(added + scale * next());
        tensors.push_back(std::move(values));
        return tensors.back().data();
    }
    Linear linear(long outputs, long inputs, int bits) {
        const T* weights = tensor(outputs * inputs, 0.3f);
        if (!bits) return {weights, nullptr, nullptr, 0, 0};
        const int format = bits == 4 ? SYMMETRIC4 : bits == 6 ? SYMMETRIC6 : SYMMETRIC8;
        const long tiles = (outputs + TILE - 1) / TILE, blocks = inputs / BLOCK;
        bytes.emplace_back(tiles * TILE * blocks * (BLOCK * bits / 8 + 2) + 64);
        parts.push_back({aligned(bytes.back()), outputs, format});
        pack<T>(weights, format, static_cast<uint8_t*>(const_cast<void*>(parts.back().tiles)), inputs, outputs, 1);
        return {nullptr, nullptr, &parts.back(), 1, 0};
    }
    static void* aligned(std::vector<uint8_t>& memory) {
        return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
    }
    Norm norm() { return {tensor(HIDDEN, 0.2f, 1), nullptr, 1e-5f, RMS_NORM, 0, 0}; }

    explicit Model(int bits) {
        for (long layer = 0; layer < LAYERS; layer++) {
            const Linear inputs = linear(ALL, HIDDEN, bits), output = linear(HIDDEN, HEADS * DIM, bits);
            attention[layer] = {inputs, output, {}, {}, 0, 0, 0, {HEADS, KEY_HEADS, DIM, 0}, 0.17f, 0, layer ? tensor(HEADS, 1) : nullptr, int(layer)};
            const Linear gate_up = linear(2 * INNER, HIDDEN, bits), down = linear(HIDDEN, INNER, bits);
            mlp[layer] = {gate_up, down, INNER, SILU, 1};
            sublayers.push_back({&attention[layer], nullptr, norm(), {}, 1, 0, 0, HIDDEN, nullptr});
            sublayers.push_back({nullptr, &mlp[layer], norm(), {}, 1, 0, 0, HIDDEN, nullptr});
            const Linear gates = linear(EXPERTS * 2 * EXPERT_INNER, HIDDEN, bits);
            const Linear downs = linear(EXPERTS * HIDDEN, EXPERT_INNER, bits), router = linear(EXPERTS + 1, HIDDEN, 0);
            const MlpWeights experts{gates, downs, EXPERT_INNER, layer ? CLAMPED_GLU : SILU, 1, 1.702f, 0.5f};
            mixtures[layer] = {router, experts, mlp[layer], EXPERTS, TOP, 1, 0, nullptr, 1, 1, 2, 1, 0, 1};
            sublayers.push_back({nullptr, nullptr, norm(), {}, 1, 0, 0, HIDDEN, &mixtures[layer]});
        }
        for (int i = 0; i < 3 * LAYERS; i++) which.push_back(i);
        embedding = tensor(VOCAB * HIDDEN, 1);
        head.norm = norm(), head.linear = linear(VOCAB, HIDDEN, bits), head.hidden = HIDDEN, head.outputs = VOCAB;
        head.divisor = 1;
        for (long position = 0; position < ROOM; position++)
            for (long i = 0; i < DIM; i++) {
                const double angle = position * std::pow(1e-4, double(i % (DIM / 2)) / (DIM / 2));
                cosine.push_back(float(std::cos(angle)));
                sine.push_back(float(std::sin(angle)) * (i < DIM / 2 ? -1 : 1));
            }
    }
    Forward forward(const CosSin* turns) const {
        return {sublayers.data(), which.data(), 3 * LAYERS, nullptr, nullptr, nullptr, 0, turns, 2, nullptr};
    }
};

// A sequence of a model.
template <class T> struct Text {
    const Model<T>& model;
    std::vector<std::vector<T>> layers;
    std::vector<void*> caches;

    explicit Text(const Model<T>& model) : model(model) {
        for (long layer = 0; layer < LAYERS; layer++) {
            layers.emplace_back(2 * KEY_HEADS * ROOM * DIM, down<T>(0));
            caches.push_back(layers.back().data());
        }
    }
    // Runs tokens from a slot on; gives the logits of all rows, and draws their tokens.
    std::vector<T> run(const std::vector<long>& tokens, long start, std::vector<long>& drawn) {
        const long rows = tokens.size();
        std::vector<T> stream(rows * HIDDEN), logits(rows * VOCAB);
        for (long row = 0; row < rows; row++)
            std::copy_n(model.embedding + tokens[row] * HIDDEN, HIDDEN, stream.data() + row * HIDDEN);
        const CosSin turn{model.cosine.data() + start * DIM, model.sine.data() + start * DIM, DIM, 1};
        const View view{nullptr, 0, 0};
        const Part part{caches.data(), ROOM, start, 0, rows, &view};
        std::vector<float> confidences(rows);
        std::vector<Drawing> drawings;
        for (long row = 0; row < rows; row++) drawings.push_back({77, start + row + 1, 0.8f});
        std::unique_ptr<bool[]> finite(new bool[rows]);
        drawn.resize(rows);
        Head head = model.head;
        head.out = logits.data(), head.tokens = drawn.data(), head.confidences = confidences.data();
        head.finite = finite.get(), head.drawings = drawings.data();
        Forward forward = model.forward(&turn);
        forward.parts = &part, forward.part_count = 1, forward.head = &head;
        Team<T>(forward, stream.data(), rows).run();
        for (long row = 0; row < rows; row++) check(finite[row], "a logit is not a number");
        return logits;
    }
};

int go_on(long, long, float) { return 0; }
void plan_nothing() {}

template <class T> void run(int bits) {
    const Model<T> model(bits);
    const std::vector<long> prompt{1, 17, 99, 4, 50, 23, 8, 61, 35};
    std::vector<long> drawn, alone;
    Text<T> together(model), apart(model);
    const std::vector<T> logits = together.run(prompt, 0, drawn);
    for (size_t row = 0; row < prompt.size(); row++) {
        const std::vector<T> single = apart.run({prompt[row]}, row, alone);
        check(!std::memcmp(single.data(), logits.data() + row * VOCAB, VOCAB * sizeof(T)), "a row depends on others");
        check(alone[0] == drawn[row], "a row draws another token alone");
    }
    for (const T& value : logits) std::printf("%.6g ", up(value));

    const long start = prompt.size(), limit = ROOM - start;
    std::vector<long> tokens(limit + 1), guesses(limit), one{drawn.back()};
    std::vector<float> confidences(limit);
    tokens[0] = drawn.back();
    ChainSequence sequence{};
    sequence.caches = together.caches.data(), sequence.capacity = ROOM, sequence.start = start, sequence.limit = limit;
    sequence.tokens = tokens.data(), sequence.confidences = confidences.data(), sequence.guesses = guesses.data();
    sequence.drawing = {77, start + 1, 0.8f};
    const CosSin table{model.cosine.data(), model.sine.data(), DIM, 1};
    Forward forward = model.forward(&table);
    forward.head = &model.head;
    const long window = 0;
    Links<T>({&forward, model.embedding, nullptr, 1, &window, 1, &sequence, 1, go_on, plan_nothing}).draft();
    check(sequence.drafted == limit, "the chain ended early");
    for (long i = 0; i < limit; i++) {
        apart.run(one, start + i, one);
        check(one[0] == tokens[i + 1], "a chain draws another token than its forwards");
        std::printf("%ld ", tokens[i + 1]);
    }
    std::printf("\n");
}

}  // namespace

int main() {
    check(permits_tiles(), "the system does not permit tiles");
    for (int bits : {0, 8, 6, 4}) run<float>(bits), run<bf16>(bits);
#if defined(TILE_INSTRUCTIONS)
    check(tile_products > 0, "no product ran in tiles");
#endif
}
