// Low-bit weights: symmetric integers of 4, 6 or 8 bits with one bfloat16 scale for a group of inputs of a weight row.
//
// Inputs are read in blocks. 16 weight rows stand side by side, so that a vector has the weights of pairs of inputs, and a
// sum needs neither a scale of its own for each weight nor an addition across lanes.
//
// A row is multiplied as 16-bit integers with a power of two for each block. The values of a block that are at least
// 2^-7 of its largest are exact in bfloat16; the others are rounded to 2^-15 of it. The sums of a block are integers, so
// that they are the same on every processor.

#pragma once

#include "vectors.h"

namespace {

constexpr long BLOCK = 32;  // inputs of a block
constexpr long TILE = 16;   // weight rows side by side
constexpr long COLUMNS = 48;  // most weight rows of a panel, which one thread multiplies at a time, for many rows

// A linear layer: weights [outputs, inputs], bias [outputs] or null.
struct Linear {
    const void *weights, *bias;
    const void* scales;  // of low-bit weights
    int bits, group;     // bits: 0 where the weights have the dtype of the rows; group: inputs that share a scale
};

// Where the blocks and groups of a weight row of k inputs are.
struct Groups {
    long blocks, count;  // of a weight row
    int shift;           // a group has 1 << shift blocks
    Groups(const Linear& linear, long k) {
        blocks = (k + BLOCK - 1) / BLOCK;
        shift = linear.group == BLOCK ? 0 : linear.group == 2 * BLOCK ? 1 : 2;
        count = ((blocks - 1) >> shift) + 1;
    }
    long of_block(long block) const { return block >> shift; }
};

// A block of a row: its values are ``scale`` times the integers.
struct IntegerBlock {
    int16_t values[BLOCK];
    float scale;
    int32_t start;  // what a sum starts from, where the weights are stored without a sign

    // 2^(exponent - 127)
    static float power(int exponent) {
        const uint32_t bits = uint32_t(exponent) << 23;
        float result;
        std::memcpy(&result, &bits, 4);
        return result;
    }
    // From BLOCK values, for weights to which ``added`` has been added.
    void set(const float* from, int added) {
        float largest = 0, poison = 0;
#pragma omp simd reduction(max : largest) reduction(+ : poison)
        for (int i = 0; i < BLOCK; i++) {
            largest = std::max(largest, std::fabs(from[i]));
            poison += from[i] * 0.0f;  // not a number where the value is infinite or no number
        }
        uint32_t bits;
        std::memcpy(&bits, &largest, 4);
        const int exponent = std::max(int(bits >> 23), 15);  // largest < 2^(exponent - 126)
        scale = power(exponent - 14) + poison;
        const float factor = power(268 - exponent);
        int sum = 0;
        if (poison == 0)
#pragma omp simd reduction(+ : sum)
            for (int i = 0; i < BLOCK; i++) {
                const int value = int(std::min(std::nearbyint(from[i] * factor), 32767.0f));
                values[i] = int16_t(value);
                sum += value;
            }
        else
            std::fill_n(values, BLOCK, int16_t(0));
        start = -added * sum;
    }
};

using Ints = Vector<LANES>::Ints;
using Shorts = Vector<LANES>::Shorts;

// Adds the products of pairs of 16-bit integers: those of each lane of ``weights`` with the same pair of inputs.
inline Ints add_pairs(Ints total, Shorts weights, int32_t inputs) {
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
    return (Ints)_mm512_dpwssd_epi32((__m512i)total, (__m512i)weights, _mm512_set1_epi32(inputs));
#elif defined(__AVX512BW__)
    return total + (Ints)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32(inputs));
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
    return total + (Ints)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(inputs));
#elif defined(__x86_64__) && !defined(__AVX512F__)
    return total + (Ints)_mm_madd_epi16((__m128i)weights, _mm_set1_epi32(inputs));
#else
    const Ints pairs = (Ints)weights;
    return total + (pairs << 16 >> 16) * int32_t(int16_t(inputs)) + (pairs >> 16) * (inputs >> 16);
#endif
}

// Signed bytes as 16-bit integers.
inline Shorts sign_extend(const uint8_t* from) {
#if defined(__AVX512BW__)
    return (Shorts)_mm512_cvtepi8_epi16(load<__m256i>(from));
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
    return (Shorts)_mm256_cvtepi8_epi16(load<__m128i>(from));
#else
    typedef int8_t Bytes __attribute__((vector_size(2 * LANES)));
    return __builtin_convertvector(load<Bytes>(from), Shorts);
#endif
}

// How the integers of a block of TILE weight rows are stored.
//
// 8 bits: signed bytes [pair of inputs][weight row][input of the pair]. 4 bits: words [4][weight row][input of the pair],
// each with a field of 4 bits for each of four pairs, to which 8 has been added. 6 bits: to the integers 32 has been
// added; their low bits like 4 bits, then words [2][weight row][input of the pair] with fields of 2 bits of eight pairs.
template <int BITS> struct Fields {
    static constexpr int added = BITS == 8 ? 0 : 1 << (BITS - 1);
    static constexpr long bytes = TILE * BLOCK * BITS / 8;
    static constexpr int PAIRS = BLOCK / 2, WORDS = 2 * TILE;  // pairs of a block; words of a vector of all weight rows

    // The weights of a pair of inputs, for LANES weight rows from ``first`` on.
    static Shorts weights(const uint8_t* block, int pair, int first) {
        if (BITS == 8) return sign_extend(block + pair * WORDS + 2 * first);
        const Shorts low = field(block, pair, first, 4);
        if (BITS == 4) return low;
        return low | field(block + TILE * BLOCK / 2, pair, first, 2) << 4;
    }
    static Shorts field(const uint8_t* from, int pair, int first, int bits) {
        using Unsigned = Vector<LANES>::Halves;
        const int fields = 16 / bits;
        const Unsigned words = load<Unsigned>(from + 2 * (pair / fields * WORDS + 2 * first));
        return (Shorts)(words >> (pair % fields * bits) & uint16_t((1 << bits) - 1));
    }
    // The integer of one weight row and one input.
    static int integer(const uint8_t* block, int row, int input) {
        const int pair = input / 2, word = 2 * row + input % 2;
        if (BITS == 8) return int8_t(block[pair * WORDS + word]);
        const int low = field_of_word(block, pair, word, 4);
        const int high = BITS == 6 ? field_of_word(block + TILE * BLOCK / 2, pair, word, 2) << 4 : 0;
        return (low | high) - added;
    }
    static int field_of_word(const uint8_t* from, int pair, int word, int bits) {
        const int fields = 16 / bits;
        const int stored = load<uint16_t>(from + 2 * (pair / fields * WORDS + word));
        return stored >> (pair % fields * bits) & ((1 << bits) - 1);
    }
    // Stores a block of codes [TILE, stride].
    static void store(const int8_t* codes, long stride, uint8_t* to) {
        for (int row = 0; row < TILE; row++)
            for (int parity = 0; parity < 2; parity++) {
                const int8_t* from = codes + row * stride + parity;
                const int word = 2 * row + parity;
                if (BITS == 8)
                    for (int pair = 0; pair < PAIRS; pair++) to[pair * WORDS + word] = uint8_t(from[2 * pair]);
                else
                    store_fields(from, word, to, 4, 0);
                if (BITS == 6) store_fields(from, word, to + TILE * BLOCK / 2, 2, 4);
            }
    }
    static void store_fields(const int8_t* from, int word, uint8_t* to, int bits, int shift) {
        const int fields = 16 / bits;
        for (int first = 0; first < PAIRS; first += fields) {
            unsigned joined = 0;
            for (int i = 0; i < fields; i++)
                joined |= unsigned((from[2 * (first + i)] + added) >> shift & ((1 << bits) - 1)) << (i * bits);
            const uint16_t stored = uint16_t(joined);
            std::memcpy(to + 2 * (first / fields * WORDS + word), &stored, 2);
        }
    }
};

// bfloat16 numbers as floats.
inline Floats widen(const bf16* from) {
    return (Floats)(__builtin_convertvector(load<Vector<LANES / 2>::Halves>(from), Words) << 16);
}

// Low-bit weights of a product, and their sums, whatever the dtype of the rows.
template <int BITS> struct PackedSums {
    using F = Fields<BITS>;
    using Row = IntegerBlock;
    static constexpr long width = BLOCK, columns_of_panel = TILE, widest_panel = 4 * COLUMNS;
    static constexpr long columns_cached = TILE;
    static constexpr long group = 8;  // most rows of a tile, for which weights are unpacked once
    static constexpr bool paired = false;
    const uint8_t* weights;
    const bf16* scales;
    Groups groups;

    PackedSums(const Linear& linear, long k)
        : weights(static_cast<const uint8_t*>(linear.weights)), scales(static_cast<const bf16*>(linear.scales)),
          groups(linear, k) {}
    long blocks() const { return groups.blocks; }
    Ahead ahead(long, long, bool, long) const { return {}; }  // tiles fetch for themselves
    // Adds the products of R rows, laid out from block ``first`` on, and the weight rows from one on.
    template <int R>
    void band(const Row* rows, long from, long to, long first, long last, float* sums, long stride, bool,
              Ahead&) const {
        for (long column = from; column < to; column += TILE)
            for (int lanes = 0; lanes < TILE; lanes += LANES)
                tile<R>(rows, column, lanes, first, last, sums + column - from + lanes, stride);
    }
    template <int R>
    void tile(const Row* rows, long column, int lanes, long first, long last, float* sums, long stride) const {
        const uint8_t* from = weights + (column / TILE * groups.blocks + first) * F::bytes;
        const bf16* scale = scales + column * groups.count + lanes;
        Floats total[R];
        for (int r = 0; r < R; r++) total[r] = load<Floats>(sums + r * stride);
        for (long block = first; block < last; block++, from += F::bytes, rows += R) {
            for (long line = 0; line < F::bytes; line += 64) {
                if (R == 1 && BITS == 8) {  // as fast as memory is: past the caches, see ``prefetch``
                    __builtin_prefetch(from + PAST + line, 0, 0);
                    continue;
                }
                __builtin_prefetch(from + SOON + line);
                __builtin_prefetch(from + LATER + line, 0, 2);  // not into the first cache yet
            }
            Ints whole[R][CHAINS(R)];
            for (int r = 0; r < R; r++) {
                whole[r][0] = Ints{} + rows[r].start;
                for (int chain = 1; chain < CHAINS(R); chain++) whole[r][chain] = Ints{};
            }
#pragma GCC unroll 16
            for (int pair = 0; pair < F::PAIRS; pair++) {
                const Shorts weight = F::weights(from, pair, lanes);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    Ints& sum = whole[r][pair % CHAINS(R)];
                    sum = add_pairs(sum, weight, load<int32_t>(rows[r].values + 2 * pair));
                }
            }
            const Floats factor = widen(scale + groups.of_block(block) * TILE);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                for (int chain = 1; chain < CHAINS(R); chain++) whole[r][0] += whole[r][chain];
                total[r] = multiply_add(total[r], __builtin_convertvector(whole[r][0], Floats), factor * rows[r].scale);
            }
        }
        for (int r = 0; r < R; r++) std::memcpy(sums + r * stride, &total[r], sizeof(Floats));
    }
    static constexpr int CHAINS(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
    static constexpr long SOON = 1024, PAST = 4096, LATER = 8192;  // bytes
};

// Low-bit weights of a product of rows with dtype T.
template <class T, int BITS> struct Packed : PackedSums<BITS> {
    using F = Fields<BITS>;
    using PackedSums<BITS>::PackedSums;

    static void lay_out(const T* from, IntegerBlock& to) {
        float values[BLOCK];
        for (int i = 0; i < BLOCK; i++) values[i] = up(from[i]);
        to.set(values, F::added);
    }

    // The values of a weight row of k inputs: integers times scales.
    void unpack(long row, long k, T* to) const {
        const Groups& groups = this->groups;
        const int lane = int(row % TILE);
        const uint8_t* from = this->weights + row / TILE * groups.blocks * F::bytes;
        const bf16* of_row = this->scales + (row - lane) * groups.count + lane;
        for (long i = 0; i < k; i++) {
            const long block = i / BLOCK, input = i % BLOCK;
            const int value = F::integer(from + block * F::bytes, lane, int(input));
            to[i] = down<T>(float(value) * up(of_row[groups.of_block(block) * TILE]));
        }
    }
};

// The values of some weight rows of k inputs.
template <class T> void unpack(const Linear& linear, const int64_t* rows, T* to, long count, long k) {
    const auto all = [&](const auto& packed) {
        for (long i = 0; i < count; i++) packed.unpack(rows[i], k, to + i * k);
    };
    switch (linear.bits) {
        case 4: return all(Packed<T, 4>(linear, k));
        case 6: return all(Packed<T, 6>(linear, k));
        default: all(Packed<T, 8>(linear, k));
    }
}

// Makes low-bit weights of others.
template <class T, int BITS> struct Packer {
    using F = Fields<BITS>;
    static constexpr float lowest = -(1 << (BITS - 1)), highest = (1 << (BITS - 1)) - 1;
    const T* from;
    uint8_t* weights;
    bf16* scales;
    long k, n;
    Groups groups;

    static float code(float value, float inverse) {
        return std::min(std::max(std::nearbyint(value * inverse), lowest), highest);
    }
    // The sum of squared errors with a scale.
    static float error(const float* values, long count, float scale) {
        const float inverse = 1.0f / scale;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (long i = 0; i < count; i++) {
            const float difference = values[i] - scale * code(values[i], inverse);
            sum += difference * difference;
        }
        return sum;
    }
    // The scale of a group with the least error: the value of largest magnitude becomes the lowest integer, or nearly.
    static float choose(const float* values, long count) {
        float greatest = 0, least = 0;
#pragma omp simd reduction(max : greatest) reduction(min : least)
        for (long i = 0; i < count; i++) greatest = std::max(greatest, values[i]), least = std::min(least, values[i]);
        const float largest = greatest > -least ? greatest : least;
        if (std::fabs(largest) < 1e-30f) return 0;
        float best = 0, smallest = 0;
        for (int step : {0, -3, -2, -1, 1, 2, 3}) {
            const float scale = rounded<bf16>(largest / (lowest + STEP * step));
            const float found = count == BLOCK ? error(values, BLOCK, scale) : error(values, count, scale);
            if (best == 0 || found < smallest) best = scale, smallest = found;
        }
        return best;
    }
    static constexpr float STEP = 0.3f;

    // Some weight rows side by side; those after the last are zeros.
    void tile(long first) const {
        const long width = groups.blocks * BLOCK;
        std::vector<int8_t> codes(TILE * width);
        std::vector<float> values(width);
        bf16* to_scales = scales + first * groups.count;
        std::fill_n(to_scales, TILE * groups.count, bf16{0});
        for (long row = 0; row < std::min(TILE, n - first); row++) {
            for (long i = 0; i < k; i++) values[i] = up(from[(first + row) * k + i]);
            for (long group = 0; group < groups.count; group++) {
                const long size = BLOCK << groups.shift;
                const long begin = group * size, end = std::min(k, begin + size);
                const float scale = choose(values.data() + begin, end - begin);
                const float inverse = scale == 0 ? 0 : 1.0f / scale;
                to_scales[group * TILE + row] = down<bf16>(scale);
                int8_t* to = codes.data() + row * width;
                for (long i = begin; i < end; i++) to[i] = int8_t(code(values[i], inverse));
            }
        }
        uint8_t* to = weights + first / TILE * groups.blocks * F::bytes;
        for (long block = 0; block < groups.blocks; block++)
            F::store(codes.data() + block * BLOCK, width, to + block * F::bytes);
    }
};

template <class T, int BITS> void pack_tiles(const T* from, const Linear& packed, long k, long n, int threads) {
    const Packer<T, BITS> packer{from,
                                 static_cast<uint8_t*>(const_cast<void*>(packed.weights)),
                                 static_cast<bf16*>(const_cast<void*>(packed.scales)),
                                 k,
                                 n,
                                 Groups(packed, k)};
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (long row = 0; row < n; row += TILE) packer.tile(row);
}

// Packs weights [n, k] as ``packed`` says, whose memory is allocated.
template <class T> void pack(const T* from, const Linear& packed, long k, long n, int threads) {
    switch (packed.bits) {
        case 4: return pack_tiles<T, 4>(from, packed, k, n, threads);
        case 6: return pack_tiles<T, 6>(from, packed, k, n, threads);
        default: pack_tiles<T, 8>(from, packed, k, n, threads);
    }
}

}  // namespace
