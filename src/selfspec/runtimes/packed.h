// rows * weights of few bits (formats.h).
//
// A block of a row is multiplied as integers that share a scale. Their number of bits is that of a target's arithmetic: 24
// for float32 rows; 16 for bfloat16 rows, in which the values of a block that are at least 2^-7 of its largest are exact
// and the others are rounded to 2^-15 of it; 8 where activations are asked to be that. Sums of a block are integers, so that
// they are the same on every processor, and rows are independent of each other.
//
// Where a processor multiplies bytes, an integer is split into planes of 8 bits with a sign, which are summed up one after
// the other: the sum over one plane is the start of the next, times 256. Elsewhere integers are multiplied in pairs of 16 bits,
// but those of 8 bits by codes of up to six bits as bytes, whose products are summed up in 16 bits first. Weights that are
// floats are multiplied with what the integers stand for.

#pragma once

#include "formats.h"

namespace {

constexpr long COLUMNS = 48;  // most weight rows of a panel, which one thread multiplies at a time, for many rows

#if (defined(__AVX512VNNI__) && defined(__AVX512F__)) || (defined(__AVXVNNI__) && !defined(__AVX512F__)) || \
    defined(__ARM_FEATURE_DOTPROD)
#define MULTIPLIES_BYTES
constexpr bool multiplies_bytes = true, multiplies_short_bytes = true;
#elif defined(__AVX2__)
constexpr bool multiplies_bytes = false, multiplies_short_bytes = true;
#else
constexpr bool multiplies_bytes = false, multiplies_short_bytes = false;
#endif

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool matches_rows = true;  // bytes are multiplied as matrices of two rows
#else
constexpr bool matches_rows = false;
#endif

// Weights of some outputs of a linear layer, tile after tile.
struct Stored {
    const void* tiles;
    long outputs;  // a multiple of TILE but in the last ones
    int format;
};

// A linear layer: weights [outputs, inputs] with the dtype of the rows, or ``count`` parts of few bits that follow each other.
struct Linear {
    const void *weights, *bias;  // bias: [outputs] or null
    const Stored* parts;
    int count;
    int short_rows;  // rows are rounded to 8 bits
    const int32_t* order;  // of the parts' inputs: the place of each in a row, or null for the same
};

// A block of a row: its values are ``scale`` times integers of 8 * PLANES bits.
template <int PLANES> struct RowBlock {
    static constexpr int VECTORS = BLOCK / LANES;
    static constexpr int PARTS = (PLANES + 1) / 2;  // sums that fit 32 bits: over all planes but a third, and over that
    static constexpr bool has_planes = multiplies_bytes || (multiplies_short_bytes && PLANES == 1);
    int8_t planes[has_planes ? PLANES : 0][BLOCK];      // the highest first
    int16_t pairs[multiplies_bytes ? 0 : PARTS][BLOCK];  // the even inputs of each group of four before the odd ones
    int32_t sums[PARTS][2];  // of the integers of each half
    float scale;
    float scaled_sums[2], scaled_sum;  // of the values of each half and of both

    // 2^(exponent - 127)
    static float power(int exponent) {
        const uint32_t bits = uint32_t(exponent) << 23;
        float result;
        std::memcpy(&result, &bits, 4);
        return result;
    }
    // The largest integer: what it is split into has to fit planes with a sign.
    static constexpr float most = PLANES == 1 ? 127 : PLANES == 2 ? 32639 : 8355711;

    template <class T> void set(const T* from) {
        Floats values[VECTORS];
        Ints largest_bits = {};  // of magnitudes, which as integers are in the same order
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; i++) {
            values[i] = widen(from + i * LANES);
            const Ints bits = (Ints)values[i] & 0x7fffffff;
            largest_bits = bits > largest_bits ? bits : largest_bits;
        }
        const int32_t bits = reduce<LANES>(largest_bits, [](auto a, auto b) { return a > b ? a : b; });
        const bool is_number = bits < 0x7f800000;
        float largest, factor;
        std::memcpy(&largest, &bits, 4);
        if (PLANES == 1) {
            largest = std::max(largest, 1e-30f);
            factor = most / largest, scale = largest / most;
        } else {
            int exponent = std::max(bits >> 23, 8 * PLANES);  // largest < 2^(exponent - 126)
            exponent += std::nearbyint(largest * power(252 + 8 * PLANES - exponent)) > most;
            factor = power(252 + 8 * PLANES - exponent), scale = power(exponent + 2 - 8 * PLANES);
        }
        Ints integers[VECTORS];
#pragma GCC unroll 8
        for (int i = 0; i < VECTORS; i++) integers[i] = is_number ? nearest(values[i] * factor) : Ints{};
        if (!is_number) scale = std::numeric_limits<float>::quiet_NaN();
        store(integers);
    }
    void store(const Ints (&integers)[VECTORS]) {
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            // The third plane is a part of its own, the others are one.
            Ints own[VECTORS], halves[2] = {};
#pragma GCC unroll 8
            for (int i = 0; i < VECTORS; i++) {
                const Ints high = PLANES == 3 ? (integers[i] + 128) >> 8 : integers[i];
                own[i] = part ? integers[i] - (high << 8) : high;
                halves[2 * i / VECTORS] += own[i];
                if constexpr (has_planes) {
                    const bool is_high = PLANES > 1 && part == 0;
                    const Ints upper = (own[i] + 128) >> 8;
                    if (is_high) narrow(upper, planes[0] + i * LANES);
                    narrow(is_high ? own[i] - (upper << 8) : own[i], planes[is_high ? 1 : PLANES - 1] + i * LANES);
                }
            }
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) sums[part][half] = reduce<LANES>(halves[half], [](auto a, auto b) { return a + b; });
            if constexpr (!multiplies_bytes) {
                int16_t each[BLOCK];
                for (int i = 0; i < VECTORS; i++) narrow(own[i], each + i * LANES);
                for (int i = 0; i < BLOCK; i += 4)
                    for (int input = 0; input < 4; input++) pairs[part][i + input] = each[i + (input % 2 * 2 + input / 2)];
            }
        }
        for (int half = 0; half < 2; half++)
            scaled_sums[half] = joined(float(sums[0][half]), float(sums[PARTS - 1][half])) * scale;
        scaled_sum = scaled_sums[0] + scaled_sums[1];
    }
    // The values that the integers stand for.
    void write(float* to) const {
#pragma omp simd
        for (int i = 0; i < BLOCK; i++) {
            int32_t integer = 0;
            if constexpr (multiplies_bytes)
                for (int plane = 0; plane < PLANES; plane++) integer = integer * 256 + planes[plane][i];
            else
                for (int part = 0; part < PARTS; part++)
                    integer = integer * 256 + pairs[part][i - i % 4 + (i % 2 * 2 + i % 4 / 2)];
            to[i] = float(integer) * scale;
        }
    }
    // What the sums of both parts are together.
    template <class V> static V joined(V high, V low) { return PARTS == 1 ? high : high * 256.0f + low; }
};

#if defined(MULTIPLIES_BYTES)
// Adds the products of four inputs and the codes for them of each weight row. Codes have no sign, or one on Arm.
inline Ints add_bytes(Ints total, Words codes, int32_t inputs) {
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)codes, _mm512_set1_epi32(inputs));
#elif defined(__AVXVNNI__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)codes, _mm256_set1_epi32(inputs));
#else
    return (Ints)vdotq_s32((int32x4_t)total, (int8x16_t)codes, (int8x16_t)vdupq_n_s32(inputs));
#endif
}
#elif defined(__AVX2__)
// Adds the products of pairs of bytes, of codes without a sign and inputs with one, which have to fit 16 bits.
inline Shorts add_byte_pairs(Shorts total, Words codes, int32_t inputs) {
#if defined(__AVX512BW__)
    return total + (Shorts)_mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(inputs));
#else
    return total + (Shorts)_mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(inputs));
#endif
}
#endif
// Adds the products of pairs of 16-bit integers: those of each lane of ``weights`` with the same pair of inputs.
inline Ints add_pairs(Ints total, Words weights, int32_t inputs) {
#if defined(__AVX512BW__)
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

// What codes are looked up in a table of 16 bytes.
inline Words look_up_each(const uint8_t (&table)[16], Words codes) {
#if defined(__AVX512BW__)
    return (Words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(load<__m128i>(table)), (__m512i)codes);
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
    return (Words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(table)), (__m256i)codes);
#elif defined(__aarch64__)
    return (Words)vqtbl1q_u8(load<uint8x16_t>(table), (uint8x16_t)codes);
#else
    uint8_t places[4 * LANES], values[4 * LANES];
    std::memcpy(places, &codes, sizeof(codes));
    for (int i = 0; i < 4 * LANES; i++) values[i] = table[places[i] & 15];
    return load<Words>(values);
#endif
}

// The codes of a block in the form that they are multiplied in.
template <class F, int PLANES> struct Factors {
    static constexpr bool is_short = F::bits < 8 && !F::looks_up;
    static constexpr bool by_bytes = multiplies_bytes || (multiplies_short_bytes && PLANES == 1 && is_short);
#if defined(__ARM_FEATURE_DOTPROD)
    static constexpr int offset = is_short ? F::offset : F::offset - 128;  // bytes with a sign
#else
    static constexpr int offset = F::offset;
#endif
    Words codes[GROUPS], odd[GROUPS];  // where they are multiplied as pairs ``codes`` are the even ones

    Factors(const uint8_t* from, int first) {
        Codes<F::bits>::read(from, first, codes);
#pragma GCC unroll 8
        for (int group = 0; group < GROUPS; group++) {
            if constexpr (F::looks_up) codes[group] = look_up_each(F::values, codes[group]);
            if constexpr (offset != F::offset) codes[group] ^= 0x80808080u;
            if constexpr (!by_bytes) odd[group] = codes[group] >> 8 & 0x00ff00ffu, codes[group] &= 0x00ff00ffu;
        }
    }
    // The products of some groups and the integers of R rows, side by side: a sum waits for each of its additions.
    // Sums are held: compilers reorder additions of integers, so that there are more vectors than registers at a time.
    template <int FROM, int TO, int R> void multiply(const RowBlock<PLANES>* rows, Floats (&to)[R]) const {
        constexpr int PARTS = RowBlock<PLANES>::PARTS;
        Ints sums[PARTS][R];
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            Ints* own = sums[part];
#pragma GCC unroll 4
            for (int row = 0; row < R; row++) own[row] = Ints{};
            if constexpr (by_bytes) {
                const int last = part ? 2 : std::min(PLANES, 2) - 1;
#pragma GCC unroll 2
                for (int plane = 2 * part; plane <= last; plane++) {
#pragma GCC unroll 4
                    for (int row = 0; row < R && plane == 1; row++) own[row] = own[row] << 8;
                    add_plane<FROM, TO, R>(rows, plane, own);
                }
            } else {
#pragma GCC unroll 8
                for (int group = FROM; group < TO; group++)
#pragma GCC unroll 4
                    for (int row = 0; row < R; row++) {
                        const int16_t* inputs = rows[row].pairs[part] + 4 * group;
                        own[row] = add_pairs(own[row], codes[group], load<int32_t>(inputs));
                        own[row] = add_pairs(own[row], odd[group], load<int32_t>(inputs + 2));
                        hold(own[row]);
                    }
            }
            if constexpr (offset != 0) {
#pragma GCC unroll 4
                for (int row = 0; row < R; row++) {
                    const int32_t* halves = rows[row].sums[part];
                    const int32_t sum = FROM == 0 ? TO == GROUPS ? halves[0] + halves[1] : halves[0] : halves[1];
                    own[row] -= (Ints{} + sum * offset);
                }
            }
        }
        const auto floats = [](Ints sums) { return __builtin_convertvector(sums, Floats); };
#pragma GCC unroll 4
        for (int row = 0; row < R; row++)
            to[row] = RowBlock<PLANES>::joined(floats(sums[0][row]), floats(sums[PARTS - 1][row]));
    }
    // The same sums for two rows, by products of matrices: eight inputs of two rows with those of two weight rows.
    template <int FROM, int TO>
    void add_matrices(const RowBlock<PLANES>& row, const RowBlock<PLANES>& next, int plane, Ints* sums) const {
#if defined(__ARM_FEATURE_MATMUL_INT8)
        int32x4_t first = {}, last = {};  // with weight rows 0 and 1, with 2 and 3
#pragma GCC unroll 4
        for (int group = FROM; group < TO; group += 2) {
            const int8_t *from = row.planes[plane] + 4 * group, *from_next = next.planes[plane] + 4 * group;
            const int8x16_t inputs = vcombine_s8(vld1_s8(from), vld1_s8(from_next));
            const int32x4_t even = (int32x4_t)codes[group], odd = (int32x4_t)codes[group + 1];
            first = vmmlaq_s32(first, inputs, vreinterpretq_s8_s32(vzip1q_s32(even, odd)));
            last = vmmlaq_s32(last, inputs, vreinterpretq_s8_s32(vzip2q_s32(even, odd)));
        }
        sums[0] += (Ints)vcombine_s32(vget_low_s32(first), vget_low_s32(last));
        sums[1] += (Ints)vcombine_s32(vget_high_s32(first), vget_high_s32(last));
#endif
    }
    template <int FROM, int TO, int R> void add_plane(const RowBlock<PLANES>* rows, int plane, Ints* sums) const {
        const auto inputs = [&](int row, int group) { return load<int32_t>(rows[row].planes[plane] + 4 * group); };
#if defined(MULTIPLIES_BYTES)
        constexpr int matched = matches_rows ? R / 2 * 2 : 0;  // rows that are multiplied two at a time
#pragma GCC unroll 2
        for (int row = 0; row < matched; row += 2) add_matrices<FROM, TO>(rows[row], rows[row + 1], plane, sums + row);
#pragma GCC unroll 8
        for (int group = FROM; group < TO; group++)
#pragma GCC unroll 4
            for (int row = matched; row < R; row++) sums[row] = add_bytes(sums[row], codes[group], inputs(row, group));
#elif defined(__AVX2__)
        constexpr int fitting =  // sums of pairs that fit 16 bits together
            std::min(TO - FROM, F::bits <= 4 ? 8 : F::bits == 5 ? 4 : 2);
#pragma GCC unroll 8
        for (int first = FROM; first < TO; first += fitting) {
            Shorts pairs[R] = {};
#pragma GCC unroll 8
            for (int group = first; group < first + fitting; group++)
#pragma GCC unroll 4
                for (int row = 0; row < R; row++) {
                    pairs[row] = add_byte_pairs(pairs[row], codes[group], inputs(row, group));
                    hold(pairs[row]);
                }
#pragma GCC unroll 4
            for (int row = 0; row < R; row++) {
                sums[row] = add_pairs(sums[row], (Words)pairs[row], 0x10001);
                hold(sums[row]);
            }
        }
#endif
    }
};

constexpr long SOON = 1024, LATER = 8192;  // bytes that tiles are fetched ahead into the first cache and into the second one

inline void fetch(const uint8_t* from, long bytes) {
    for (long line = 0; line < bytes; line += LINE) {
        __builtin_prefetch(from + SOON + line);
        __builtin_prefetch(from + LATER + line, 0, 2);
    }
}

// A block of LANES weight rows of a tile, ready to be multiplied.
template <class F, int PLANES> struct WeightBlock {
    static constexpr int halves = F::scaled < BLOCK ? 2 : 1;
    const Factors<F, PLANES> factors;
    Floats scale[halves], minimum[halves];

    WeightBlock(const uint8_t* codes, int lane, const typename F::Scales& scales, int block) : factors(codes, lane) {
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++) {
            const int index = (block * BLOCK + half * F::scaled) / F::scaled;
            scale[half] = scales.scale(index);
            if constexpr (F::has_minimum) minimum[half] = -scales.minimum(index);
        }
    }
    // Adds the products of R rows.
    template <int R> void add(const RowBlock<PLANES>* rows, float* sums, long stride) const {
        Floats products[halves][R];
        factors.template multiply<0, GROUPS / halves, R>(rows, products[0]);
        if constexpr (halves == 2) factors.template multiply<GROUPS / 2, GROUPS, R>(rows, products[1]);
#pragma GCC unroll 4
        for (int row = 0; row < R; row++) {
            const RowBlock<PLANES>& own = rows[row];
            Floats total = load<Floats>(sums + row * stride);
            if constexpr (halves == 2) {
                const Floats both = multiply_add(products[0][row] * scale[0], products[1][row], scale[1]);
                total = multiply_add(total, both, spread(own.scale));
            } else {
                total = multiply_add(total, products[0][row], scale[0] * own.scale);
            }
            if constexpr (F::has_minimum)
#pragma GCC unroll 2
                for (int half = 0; half < halves; half++)
                    total = multiply_add(total, minimum[half],
                                         spread(halves == 2 ? own.scaled_sums[half] : own.scaled_sum));
            std::memcpy(sums + row * stride, &total, sizeof(Floats));
        }
    }
    // Adds the products of all rows, at most R at a time.
    template <int R> void add_all(const RowBlock<PLANES>* rows, long count, float* sums, long stride) const {
        long row = 0;
        for (; row + R <= count; row += R) add<R>(rows + row, sums + row * stride, stride);
        if constexpr (R > 1) add_all<R / 2>(rows + row, count - row, sums + row * stride, stride);
    }
};

// Rows that are multiplied side by side, whose sums fit the registers beside the codes.
constexpr int BESIDE = REGISTERS == 32 ? 4 : 2;

// Adds the products of rows and LANES weight rows of a tile, from ``lane`` on, over the blocks from ``first`` to ``last``.
template <class F, int PLANES>
__attribute__((noinline)) void add_tile(const uint8_t* tile, int lane, const RowBlock<PLANES>* rows, long count, long first,
                                        long last, float* sums, long stride) {
    const uint8_t* unit = tile + first / F::blocks * F::bytes;
    for (long block = first; block < last; block += F::blocks, unit += F::bytes) {
        const typename F::Scales scales(unit, lane);
        fetch(unit, F::head);
        for (int i = 0; i < F::blocks; i++, rows += count) {
            const uint8_t* codes = unit + F::head + i * Codes<F::bits>::bytes;
            fetch(codes, Codes<F::bits>::bytes);
            const WeightBlock<F, PLANES> weights(codes, lane, scales, i);
            weights.template add_all<BESIDE>(rows, count, sums, stride);
        }
    }
}

// Adds the products of R rows and a block of floats of a tile.
template <class F, int R, int PLANES>
void add_floats(const uint8_t* unit, const RowBlock<PLANES>* rows, float* sums, long stride) {
    constexpr int PARTS = TILE / LANES;
    float values[R][BLOCK];
    Floats products[2][R][PARTS] = {};  // of the even and of the odd inputs: a sum waits for each of its additions
    for (int row = 0; row < R; row++) rows[row].write(values[row]);
    for (int input = 0; input < BLOCK; input += 2)
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++)
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) {
                const Floats weight = F::read(unit, input + odd, part * LANES);
#pragma GCC unroll 4
                for (int row = 0; row < R; row++) {
                    Floats& own = products[odd][row][part];
                    own = multiply_add(own, weight, spread(values[row][input + odd]));
                }
            }
#pragma GCC unroll 4
    for (int row = 0; row < R; row++)
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) {
            float* own = sums + row * stride + part * LANES;
            const Floats total = load<Floats>(own) + (products[0][row][part] + products[1][row][part]);
            std::memcpy(own, &total, sizeof(Floats));
        }
}
// The same for all rows, at most R at a time.
template <class F, int R, int PLANES>
void add_floats(const uint8_t* unit, const RowBlock<PLANES>* rows, long count, float* sums, long stride) {
    long row = 0;
    for (; row + R <= count; row += R) add_floats<F, R>(unit, rows + row, sums + row * stride, stride);
    if constexpr (R > 1) add_floats<F, R / 2>(unit, rows + row, count - row, sums + row * stride, stride);
}
// The same for the blocks of a tile from ``first`` to ``last``.
template <class F, int PLANES>
__attribute__((noinline)) void add_float_tile(const uint8_t* tile, const RowBlock<PLANES>* rows, long count, long first,
                                              long last, float* sums, long stride) {
    constexpr int R = std::min(BESIDE, std::max(1, BESIDE * 2 * LANES / int(TILE)));
    for (long block = first; block < last; block++, rows += count) {
        const uint8_t* unit = tile + block * F::bytes;
        fetch(unit, F::bytes);
        add_floats<F, R>(unit, rows, count, sums, stride);
    }
}

// Weights of few bits of a product of rows that are multiplied as integers of 8 * PLANES bits.
template <class T, int PLANES> struct Packed {
    using Row = RowBlock<PLANES>;
    static constexpr long width = BLOCK, columns_of_panel = TILE, widest_panel = 4 * COLUMNS;
    static constexpr long columns_cached = TILE;
    // Most rows for which weights are read from codes once, and blocks of them that stay in the first cache.
    static constexpr long group = PLANES == 1 ? 24 : 16, strip = 16;
    static constexpr bool paired = false, any_rows = true;
    const Linear& linear;
    long k;

    Packed(const Linear& linear, long k) : linear(linear), k(k) {}
    long blocks() const { return k / BLOCK; }
    Ahead ahead(long, long, bool, long) const { return {}; }  // tiles fetch for themselves
    static void lay_out(const T* from, Row& to) { to.set(from); }
    void lay_out_in_order(const T* row, long block, Row& to) const {
        T values[BLOCK];
        for (int i = 0; i < BLOCK; i++) values[i] = row[linear.order[block * BLOCK + i]];
        lay_out(values, to);
    }
    // Adds the products of rows, laid out from block ``first`` on, and the weight rows from one on.
    void band(const Row* rows, long count, long from, long to, long first, long last, float* sums, long stride) const {
        const Stored* part = linear.parts;
        long before = 0;  // outputs of the parts before
        for (long column = from; column < to; column += TILE) {
            while (column >= before + part->outputs) before += part++->outputs;
            with_format(part->format, [&](auto number) {
                using F = Format<number>;
                const long bytes = blocks() / F::blocks * F::bytes;
                const auto* tile = static_cast<const uint8_t*>(part->tiles) + (column - before) / TILE * bytes;
                float* own = sums + column - from;
                if constexpr (F::is_float)
                    add_float_tile<F>(tile, rows, count, first, last, own, stride);
                else
                    for (int lane = 0; lane < TILE; lane += LANES)
                        add_tile<F, PLANES>(tile, lane, rows, count, first, last, own + lane, stride);
            });
        }
    }
};

// The values of a weight row of a unit.
template <class F> void unpack_unit(const uint8_t* unit, int row, float* to) {
    if constexpr (F::is_float) {
        for (int input = 0; input < F::unit; input++) to[input] = F::read(unit, input, row / LANES * LANES)[row % LANES];
    } else {
        const typename F::Scales scales(unit, row / LANES * LANES);
        for (int index = 0; index < F::scales; index++) {
            const float scale = scales.scale(index)[row % LANES];
            float minimum = 0;
            if constexpr (F::has_minimum) minimum = scales.minimum(index)[row % LANES];
            for (int input = index * F::scaled; input < (index + 1) * F::scaled; input++) {
                const uint8_t* codes = unit + F::head + input / BLOCK * Codes<F::bits>::bytes;
                int code = Codes<F::bits>::one(codes, row, input % BLOCK);
                if constexpr (F::looks_up) code = F::values[code];
                to[input] = float(code - F::offset) * scale - minimum;
            }
        }
    }
}

// The values of some weight rows of k inputs.
template <class T> void unpack(const Linear& linear, const int64_t* rows, T* to, long count, long k, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long i = 0; i < count; i++) {
        const Stored* part = linear.parts;
        long row = rows[i];
        while (row >= part->outputs) row -= part++->outputs;
        with_format(part->format, [&](auto number) {
            using F = Format<number>;
            const auto* unit = static_cast<const uint8_t*>(part->tiles) + row / TILE * (k / F::unit) * F::bytes;
            float values[F::unit];
            for (long start = 0; start < k; start += F::unit, unit += F::bytes) {
                unpack_unit<F>(unit, int(row % TILE), values);
                for (long input = start; input < start + F::unit; input++)
                    to[i * k + (linear.order ? linear.order[input] : input)] = down<T>(values[input - start]);
            }
        });
    }
}

// Makes weights of the symmetric formats of others.
template <class T, class F> struct Packer {
    static constexpr float lowest = -F::offset, highest = F::offset - 1;
    const T* from;
    uint8_t* to;
    long k, n;

    static float code(float value, float inverse) {
        return std::min(std::max(std::nearbyint(value * inverse), lowest), highest);
    }
    // The sum of squared errors with a scale.
    static float error(const float* values, float scale) {
        const float inverse = 1.0f / scale;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (long i = 0; i < F::unit; i++) {
            const float difference = values[i] - scale * code(values[i], inverse);
            sum += difference * difference;
        }
        return sum;
    }
    // The scale of a group with the least error: the value of largest magnitude becomes the lowest integer, or nearly.
    static float choose(const float* values) {
        float greatest = 0, least = 0;
#pragma omp simd reduction(max : greatest) reduction(min : least)
        for (long i = 0; i < F::unit; i++) greatest = std::max(greatest, values[i]), least = std::min(least, values[i]);
        const float largest = greatest > -least ? greatest : least;
        if (std::fabs(largest) < 1e-30f) return 0;
        float best = 0, smallest = 0;
        for (int step : {0, -3, -2, -1, 1, 2, 3}) {
            const float scale = rounded<bf16>(largest / (lowest + STEP * step));
            const float found = error(values, scale);
            if (best == 0 || found < smallest) best = scale, smallest = found;
        }
        return best;
    }
    static constexpr float STEP = 0.3f;

    // Some weight rows side by side; those after the last are zeros.
    void tile(long first) const {
        uint8_t* unit = to + first / TILE * (k / F::unit) * F::bytes;
        for (long start = 0; start < k; start += F::unit, unit += F::bytes) {
            uint32_t words[F::blocks][GROUPS][TILE];
            bf16 scales[TILE] = {};
            for (long row = 0; row < TILE; row++) {
                float values[F::unit] = {};
                if (first + row < n)
                    for (long i = 0; i < F::unit; i++) values[i] = up(from[(first + row) * k + start + i]);
                const float scale = choose(values), inverse = scale == 0 ? 0 : 1.0f / scale;
                scales[row] = down<bf16>(scale);
                uint8_t codes[F::unit];
                for (long i = 0; i < F::unit; i++) codes[i] = uint8_t(int(code(values[i], inverse)) + F::offset);
                for (long i = 0; i < F::unit; i += 4)
                    words[i / BLOCK][i % BLOCK / 4][row] = load<uint32_t>(codes + i);
            }
            std::memcpy(unit, scales, sizeof(scales));
            for (int block = 0; block < F::blocks; block++)
                Codes<F::bits>::write(words[block], unit + F::head + block * Codes<F::bits>::bytes);
        }
    }
};

// Packs weights [n, k] into tiles of a symmetric format.
template <class T> void pack(const T* from, int format, uint8_t* to, long k, long n, int threads) {
    with_format(format, [&](auto number) {
        if constexpr (Format<number>::is_symmetric) {
            const Packer<T, Format<number>> packer{from, to, k, n};
#pragma omp parallel for num_threads(threads) schedule(dynamic)
            for (long row = 0; row < n; row += TILE) packer.tile(row);
        }
    });
}

}  // namespace
