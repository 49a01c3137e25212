// Products of rows and a tile of weights of few bits, in vectors.
//
// Where a processor multiplies bytes, an integer is split into planes of 8 bits with a sign, which are summed up one after
// the other: the sum over one plane is the start of the next, times 256. Elsewhere integers are multiplied in pairs of 16 bits,
// but those of 8 bits as bytes, whose products are summed up in 16 bits as long as they fit.

#pragma once

#include "integer_products.h"

namespace {

// The codes of a group of LANES weight rows in the form that they are multiplied in.
template <class F, int PLANES> struct Factor {
    static constexpr bool is_short = F::bits < 8 && !F::looks_up, by_bytes = RowBlock<PLANES>::has_planes;
    static constexpr bool has_sign = by_bytes && !is_short && multiplies_signs;
    static constexpr bool has_magnitude = has_sign && !multiplies_bytes;
    static constexpr int offset = has_sign ? F::offset - 128 : F::offset;
    Words codes[by_bytes && !has_magnitude ? 1 : 2];  // even and odd ones of pairs; magnitudes, and codes with their sign

    Factor() = default;
    Factor(const uint8_t* from, int first, int group) {
        Words own = Codes<F::bits>::read(from, first, group);
        if constexpr (F::looks_up) own = look_up_each(F::values, own);
        if constexpr (has_sign) own ^= 0x80808080u;
        if constexpr (!by_bytes) {
            codes[0] = own & 0x00ff00ffu, codes[1] = own >> 8 & 0x00ff00ffu;
        } else {
            codes[0] = own;
#if defined(MULTIPLIES_BYTE_PAIRS)
            if constexpr (has_magnitude) codes[0] = magnitudes(own), codes[1] = own;
#endif
        }
    }
};

// A block of JOINT weight rows of a tile, read from its codes at each use.
template <class F, int PLANES> struct CodedBlock {
    static constexpr int halves = F::scaled < BLOCK ? 2 : 1;
    static constexpr bool is_read = false;
    const uint8_t* codes;
    int lane;
    const typename F::Scales& scales;
    int block;

    Factor<F, PLANES> factor(int side, int group) const { return {codes, lane + side * LANES, group}; }
    int index(int half) const { return (block * BLOCK + half * F::scaled) / F::scaled; }
    Floats scale(int side, int half) const { return scales.scale(index(half), side); }
    Floats minimum(int side, int half) const { return -scales.minimum(index(half), side); }
};
// The same, read once.
template <class F, int PLANES> struct ReadBlock {
    static constexpr int halves = CodedBlock<F, PLANES>::halves;
    static constexpr bool is_read = true;
    Factor<F, PLANES> factors[SIDES][GROUPS];
    Floats scales[SIDES][halves], minima[SIDES][halves];

    explicit ReadBlock(const CodedBlock<F, PLANES>& from) {
#pragma GCC unroll 2
        for (int side = 0; side < SIDES; side++) {
#pragma GCC unroll 8
            for (int group = 0; group < GROUPS; group++) factors[side][group] = from.factor(side, group);
#pragma GCC unroll 2
            for (int half = 0; half < halves; half++) {
                scales[side][half] = from.scale(side, half);
                if constexpr (F::has_minimum) minima[side][half] = from.minimum(side, half);
            }
        }
    }
    const Factor<F, PLANES>& factor(int side, int group) const { return factors[side][group]; }
    Floats scale(int side, int half) const { return scales[side][half]; }
    Floats minimum(int side, int half) const { return minima[side][half]; }
};

// Adds the products of a row and a block, as integers of its first and its last half or of both, to the sum of the blocks before.
template <class F, class Weights, class Row>
inline Floats add_scaled(Floats total, Floats first, Floats last, const Weights& weights, int side, const Row& row) {
    constexpr int halves = Weights::halves;
    const Floats scale = weights.scale(side, 0);
    if constexpr (halves == 2)
        total = multiply_add(total, multiply_add(first * scale, last, weights.scale(side, 1)), spread(row.scale));
    else
        total = multiply_add(total, first, scale * row.scale);
    if constexpr (F::has_minimum)
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++)
            total = multiply_add(total, weights.minimum(side, half),
                                 spread(halves == 2 ? row.scaled_sums[half] : row.scaled_sum));
    return total;
}

// The products of R rows and a block of weights of a tile.
template <class F, int PLANES, int R, class Weights> struct BlockProduct {
    using Row = RowBlock<PLANES>;
    using Own = Factor<F, PLANES>;
    using Sums = Ints[SIDES][R];
    using Totals = Floats[SIDES][R];
    static constexpr int halves = Weights::halves;
    const Weights& weights;
    const Row* rows;

    // The products of some groups and the integers of the rows, side by side: a sum waits for each of its additions.
    // Sums are held: compilers reorder additions of integers, so that there are more vectors than registers at a time.
    template <int FROM, int TO> void multiply(Totals& to) const {
        constexpr int PARTS = Row::PARTS;
        Sums sums[PARTS] = {};
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            if constexpr (Own::by_bytes)
                add_planes<FROM, TO>(part, sums[part]);
            else
                add_pairs_of<FROM, TO>(part, sums[part]);
            if constexpr (Own::offset != 0)
                each([&](int side, int row) {
                    const int32_t* own = rows[row].sums[part];
                    sums[part][side][row] -= spread(own[TO - FROM == GROUPS ? 2 : FROM / (GROUPS / 2)]) * Own::offset;
                });
        }
        const auto floats = [](Ints sums) { return __builtin_convertvector(sums, Floats); };
        each([&](int side, int row) {
            to[side][row] = Row::joined(floats(sums[0][side][row]), floats(sums[PARTS - 1][side][row]));
        });
    }
    // Calls a function for each side and row.
    template <class Function> static void each(const Function& function) {
#pragma GCC unroll 8
        for (int row = 0; row < R; row++)
#pragma GCC unroll 2
            for (int side = 0; side < SIDES; side++) function(side, row);
    }
    template <int FROM, int TO> void add_pairs_of(int part, Sums& sums) const {
#pragma GCC unroll 8
        for (int group = FROM; group < TO; group++) {
            Own own[SIDES];
#pragma GCC unroll 2
            for (int side = 0; side < SIDES; side++) own[side] = weights.factor(side, group);
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++)
                each([&](int side, int row) {
                    const int32_t inputs = load<int32_t>(rows[row].pairs[part] + 4 * group + 2 * odd);
                    sums[side][row] = add_pairs(sums[side][row], own[side].codes[odd], inputs);
                    hold(sums[side][row]);
                });
        }
    }
    template <int FROM, int TO> void add_planes(int part, Sums& sums) const {
        const int last = part ? 2 : std::min(PLANES, 2) - 1;
#pragma GCC unroll 2
        for (int plane = 2 * part; plane <= last; plane++) {
            if (plane == 1) each([&](int side, int row) { sums[side][row] = sums[side][row] << 8; });
            add_plane<FROM, TO>(plane, sums);
        }
    }
    template <int FROM, int TO> void add_plane(int plane, Sums& sums) const {
        const auto inputs = [&](int row, int group) { return load<int32_t>(rows[row].planes[plane] + 4 * group); };
#if defined(MULTIPLIES_BYTES)
        constexpr int matched = matches_rows ? R / 2 * 2 : 0;  // rows that are multiplied two at a time
#pragma GCC unroll 2
        for (int row = 0; row < matched; row += 2) add_matrices<FROM, TO>(rows[row], rows[row + 1], plane, &sums[0][row]);
#pragma GCC unroll 8
        for (int group = FROM; group < TO; group++)
            each([&](int side, int row) {
                if (row < matched) return;
                sums[side][row] = add_bytes(sums[side][row], weights.factor(side, group).codes[0], inputs(row, group));
            });
#elif defined(MULTIPLIES_BYTE_PAIRS)
        constexpr int fitting =  // sums of pairs that fit 16 bits together
            std::min(TO - FROM, Own::has_sign ? 1 : F::bits <= 4 ? 8 : F::bits == 5 ? 4 : 2);
        constexpr int step = std::min(fitting, 2);  // groups whose codes fit the registers beside the sums
        Shorts pairs[SIDES][R];
#pragma GCC unroll 8
        for (int first = FROM; first < TO; first += step) {
            Own own[step][SIDES];
#pragma GCC unroll 2
            for (int group = 0; group < step; group++)
#pragma GCC unroll 2
                for (int side = 0; side < SIDES; side++) own[group][side] = weights.factor(side, first + group);
            each([&](int side, int row) {
                Shorts& total = pairs[side][row];
#pragma GCC unroll 2
                for (int group = 0; group < step; group++) {
                    Words bytes = (Words)spread(inputs(row, first + group));
                    if constexpr (Own::has_magnitude) bytes = multiply_signs(bytes, own[group][side].codes[1]);
                    const Shorts products = multiply_byte_pairs(own[group][side].codes[0], bytes);
                    total = (first + group - FROM) % fitting ? total + products : products;
                }
                hold(total);
                if ((first + step - FROM) % fitting == 0) {
                    sums[side][row] = add_pairs(sums[side][row], (Words)total, 0x10001);
                    hold(sums[side][row]);
                }
            });
        }
#endif
    }
    // The same sums for two rows, by products of matrices: eight inputs of two rows with those of two weight rows.
    template <int FROM, int TO> void add_matrices(const Row& row, const Row& next, int plane, Ints* sums) const {
#if defined(__ARM_FEATURE_MATMUL_INT8)
        int32x4_t first = {}, last = {};  // with weight rows 0 and 1, with 2 and 3
#pragma GCC unroll 4
        for (int group = FROM; group < TO; group += 2) {
            const int8_t *from = row.planes[plane] + 4 * group, *from_next = next.planes[plane] + 4 * group;
            const int8x16_t inputs = vcombine_s8(vld1_s8(from), vld1_s8(from_next));
            const int32x4_t even = (int32x4_t)weights.factor(0, group).codes[0];
            const int32x4_t odd = (int32x4_t)weights.factor(0, group + 1).codes[0];
            first = vmmlaq_s32(first, inputs, vreinterpretq_s8_s32(vzip1q_s32(even, odd)));
            last = vmmlaq_s32(last, inputs, vreinterpretq_s8_s32(vzip2q_s32(even, odd)));
        }
        sums[0] += (Ints)vcombine_s32(vget_low_s32(first), vget_low_s32(last));
        sums[1] += (Ints)vcombine_s32(vget_high_s32(first), vget_high_s32(last));
#endif
    }
    // Adds the products to sums, which are those of the blocks before.
    void add(Totals& totals) const {
        Floats products[halves][SIDES][R];
        multiply<0, GROUPS / halves>(products[0]);
        if constexpr (halves == 2) multiply<GROUPS / 2, GROUPS>(products[halves - 1]);
        each([&](int side, int row) {
            Floats& total = totals[side][row];
            total = add_scaled<F>(total, products[0][side][row], products[halves - 1][side][row], weights, side, rows[row]);
        });
    }
    static void read(Totals& to, const float* sums, long stride) {
        each([&](int side, int row) { to[side][row] = load<Floats>(sums + row * stride + side * LANES); });
    }
    static void write(const Totals& from, float* sums, long stride) {
        each([&](int side, int row) {
            std::memcpy(sums + row * stride + side * LANES, &from[side][row], sizeof(Floats));
        });
    }
};

// Bytes that tiles are fetched ahead, for each side, into the first cache; and into the second one, for all.
inline Ways fetched_soon{{1024, 1024, 1024}};
constexpr long LATER = 8192;

// Always inlined: compilers take a function that only prefetches for one without effect, and leave its calls out.
__attribute__((always_inline)) inline void fetch(const uint8_t* from, long bytes, long soon) {
    for (long line = 0; line < bytes; line += LINE) {
        __builtin_prefetch(from + soon + line);
        __builtin_prefetch(from + LATER + line, 0, 2);
    }
}

// Rows that are multiplied side by side, whose sums fit the registers beside the codes.
template <class F, int PLANES> constexpr int beside() {
    if (REGISTERS == 32) return 4;
    if (SIDES == 1 || PLANES == 3 || (PLANES == 1 && F::bits == 5 && !multiplies_bytes)) return 2;
    return multiplies_bytes || PLANES == 1 ? 4 : 3;
}

// How many are many: what is read of both sides does not fit the registers, so that it is read again from its codes for every
// R rows, unless there are many. (With AVX2 on Zen 4 these are one to three times R.)
template <class F, int PLANES> constexpr int many() {
    constexpr int R = beside<F, PLANES>();
    return SIDES == 1 ? 1 : PLANES == 3 ? R : PLANES == 2 || Codes<F::bits>::divided ? 2 * R : 3 * R;
}

// Adds the products of rows, R at a time, as long as there are so many.
template <int R, class F, int PLANES, class Weights>
void add_rows(Weights& weights, const RowBlock<PLANES>*& rows, long& count, float*& sums, long stride) {
    for (; count >= R; count -= R, rows += R, sums += R * stride) {
        if constexpr (SIDES > 1 && Weights::is_read) hold_in_memory(weights);
        using Own = BlockProduct<F, PLANES, R, Weights>;
        typename Own::Totals totals;
        Own::read(totals, sums, stride);
        Own{weights, rows}.add(totals);
        Own::write(totals, sums, stride);
    }
}
// Adds the products of all rows, at most R at a time, or R at a time where both sides are multiplied.
template <int R, class F, int PLANES>
void add_block(CodedBlock<F, PLANES> coded, const RowBlock<PLANES>* rows, long count, float* sums, long stride) {
    if (SIDES == 1 || count >= many<F, PLANES>()) {
        ReadBlock<F, PLANES> read(coded);
        add_rows<R, F>(read, rows, count, sums, stride);
        if constexpr (SIDES == 1 && R > 2) add_rows<2, F>(read, rows, count, sums, stride);
        if constexpr (SIDES == 1 && R > 1) add_rows<1, F>(read, rows, count, sums, stride);
    }
    if constexpr (many<F, PLANES>() > 2 * R) add_rows<R, F>(coded, rows, count, sums, stride);
}

// Adds the products of rows, of which a block has ``each``, and JOINT weight rows of a tile, from ``lane`` on, over the
// blocks from ``first`` to ``last``. All that it calls is inlined (flatten): only then are sums in registers. Where one side
// is multiplied, a block has no other rows; its code is then that of one number less (0.95 of the time for few rows, Zen 5).
template <class F, int PLANES>
__attribute__((noinline, flatten)) void add_tile(const uint8_t* tile, int lane, const RowBlock<PLANES>* rows, long each,
                                                 long count, long first, long last, float* sums, long stride) {
    const uint8_t* unit = tile + first / F::blocks * F::bytes;
    const long soon = SIDES * fetched_soon.of(count);
    for (long block = first; block < last; block += F::blocks, unit += F::bytes) {
        const typename F::Scales scales(unit, lane);
        fetch(unit, F::head, soon);
        for (int i = 0; i < F::blocks; i++, rows += SIDES == 1 ? count : each) {
            const uint8_t* codes = unit + F::head + i * Codes<F::bits>::bytes;
            fetch(codes, Codes<F::bits>::bytes, soon);
            add_block<beside<F, PLANES>()>(CodedBlock<F, PLANES>{codes, lane, scales, i}, rows, count, sums, stride);
        }
    }
}

// Adds the products of R rows and a tile over the blocks from ``first`` to ``last``.
template <class F, int PLANES, int R>
__attribute__((noinline, flatten)) void add_kept(const uint8_t* tile, const RowBlock<PLANES>* rows, long each, long first,
                                                 long last, float* sums, long stride) {
    using Weights = CodedBlock<F, PLANES>;
    using Own = BlockProduct<F, PLANES, R, Weights>;
    typename Own::Totals totals;
    Own::read(totals, sums, stride);
    const uint8_t* unit = tile + first / F::blocks * F::bytes;
    const long soon = SIDES * fetched_soon.of(R);
    for (long block = first; block < last; block += F::blocks, unit += F::bytes) {
        const typename F::Scales scales(unit, 0);
        fetch(unit, F::head, soon);
        for (int i = 0; i < F::blocks; i++, rows += SIDES == 1 ? R : each) {
            const uint8_t* codes = unit + F::head + i * Codes<F::bits>::bytes;
            fetch(codes, Codes<F::bits>::bytes, soon);
            const Weights weights{codes, 0, scales, i};
            Own{weights, rows}.add(totals);
        }
    }
    Own::write(totals, sums, stride);
}

// Numbers of rows whose sums stay in registers from block to block; those in memory wait for the store of the block before.
// With 32 registers, where a vector is as wide as a tile and bytes are multiplied, fewer rows take as long as reading their
// weights, and these 0.9 of the time on Zen 5. With AVX2 one row takes 0.85 to 0.95 of the time on Zen 4, three 0.73 to 0.98.
template <int... R> using Some = std::integer_sequence<int, R...>;
template <class F, int PLANES> constexpr auto kept() {
    if constexpr (SIDES == 1)
        return std::conditional_t<LANES == TILE && multiplies_bytes && PLANES < 3, Some<8, 7, 6, 5>, Some<>>();
    else if constexpr (PLANES == 3)
        return Some<1>();
    else
        return std::conditional_t<PLANES == 2 && F::bits == 5 && !multiplies_bytes, Some<3, 2, 1>, Some<4, 3, 2, 1>>();
}
// Adds the products of rows and a tile if their number is one of these.
template <class F, int PLANES, int... R>
bool add_kept(const uint8_t* tile, const RowBlock<PLANES>* rows, long each, long count, long first, long last, float* sums,
              long stride, std::integer_sequence<int, R...>) {
    return ((count == R && (add_kept<F, PLANES, R>(tile, rows, each, first, last, sums, stride), true)) || ...);
}

// Adds the products of all rows and a tile over the blocks from ``first`` to ``last``.
template <class F, int PLANES>
void add_all(const uint8_t* tile, const RowBlock<PLANES>* rows, long count, long first, long last, float* sums, long stride) {
    const auto are_kept = [&](long from, long some) {
        return add_kept<F>(tile, rows + from, count, some, first, last, sums + from * stride, stride, kept<F, PLANES>());
    };
    if (are_kept(0, count)) return;
    constexpr int R = beside<F, PLANES>();
    constexpr int most = kept<F, PLANES>().size();
    static_assert(SIDES == 1 || (most + 1 >= R && (most >= R || many<F, PLANES>() == R)), "rows that are few are kept");
    const long whole = SIDES == 1 ? count : count / R * R;
    if (!are_kept(0, whole))
        for (int lane = 0; lane < TILE; lane += JOINT)
            add_tile<F, PLANES>(tile, lane, rows, count, whole, first, last, sums + lane, stride);
    if (whole < count) are_kept(whole, count - whole);
}

}  // namespace
