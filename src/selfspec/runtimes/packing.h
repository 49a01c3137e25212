// Weights of few bits from floats, and their values as floats.

#pragma once

#include "packed.h"

namespace {

// The values of a weight row of a unit.
template <class F> void unpack_unit(const uint8_t* unit, int row, float* to) {
    if constexpr (F::is_float) {
        for (int input = 0; input < F::unit; input++) to[input] = F::read(unit, input, row / LANES * LANES)[row % LANES];
    } else {
        const typename F::Scales scales(unit, row / JOINT * JOINT);
        const int side = row % JOINT / LANES;
        for (int index = 0; index < F::scales; index++) {
            const float scale = scales.scale(index, side)[row % LANES];
            float minimum = 0;
            if constexpr (F::has_minimum) minimum = scales.minimum(index, side)[row % LANES];
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

// Of two vectors, the lanes whose number has the bit SIDE, or those that lack it, side by side in steps of SIDE.
template <int SIDE, bool HAS, unsigned... LANE> inline Words chosen(Words a, Words b, std::integer_sequence<unsigned, LANE...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, (LANE & SIDE ? LANES + LANE - (HAS ? 0 : SIDE) : LANE + (HAS ? SIDE : 0))...);
#else
    return __builtin_shuffle(a, b, Words{(LANE & SIDE ? LANES + LANE - (HAS ? 0 : SIDE) : LANE + (HAS ? SIDE : 0))...});
#endif
}
// Makes the lanes of as many vectors their numbers.
template <int SIDE = 1> inline void transpose(Words* vectors) {
    if constexpr (SIDE < LANES) {
        for (int i = 0; i < LANES; i++)
            if (!(i & SIDE)) {
                const std::make_integer_sequence<unsigned, LANES> lanes;
                const Words a = vectors[i], b = vectors[i + SIDE];
                vectors[i] = chosen<SIDE, false>(a, b, lanes), vectors[i + SIDE] = chosen<SIDE, true>(a, b, lanes);
            }
        transpose<2 * SIDE>(vectors);
    }
}

// Makes weights of the symmetric formats of others. Vectors are of weight rows side by side, so that a copy is the same on
// every processor whose additions are fused with multiplications.
template <class T, class F> struct Packer {
    static constexpr int lowest = -F::offset, highest = F::offset - 1;
    static constexpr float STEP = 0.3f, SMALLEST = 1e-30f;
    static constexpr float ROUNDS = 0x1.8p23f;
    using Values = Floats[F::unit];  // of a group
    const T* from;
    uint8_t* to;
    long k, n;

    // The codes of values, each added to ROUNDS: so they are whole, and the low bits of the sum.
    static Floats codes(Floats values, Floats inverse) {
        const Floats first = spread(ROUNDS + lowest), last = spread(ROUNDS + highest);
        Floats found = values * inverse + ROUNDS;
        found = found > first ? found : first;  // which is that of no number, too
        return found < last ? found : last;
    }
    // The sums of squared errors with scales.
    static Floats errors(const Values& values, Floats scales) {
        const Floats inverse = 1.0f / scales;
        Floats sums[2] = {};  // of the even and of the odd inputs: a sum waits for each of its additions
        for (int i = 0; i < F::unit; i += 2)
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++) {
                const Floats value = values[i + odd];
                const Floats difference = multiply_add(value, scales, ROUNDS - codes(value, inverse));
                sums[odd] = multiply_add(sums[odd], difference, difference);
            }
        return sums[0] + sums[1];
    }
    // The scales of groups with the least error: the value of largest magnitude becomes the lowest integer, or nearly.
    static Floats choose(const Values& values) {
        Floats greatest = {}, least = {};
        for (const Floats& value : values) {
            greatest = value > greatest ? value : greatest;
            least = value < least ? value : least;
        }
        const Floats largest = greatest > -least ? greatest : least, size = greatest > -least ? greatest : -least;
        const auto scales_of = [&](int step) {
            return (Floats)(Lanes<bf16>::down_high(largest / (lowest + STEP * step)) & 0xffff0000u);
        };
        Floats best = scales_of(0), smallest = errors(values, best);  // taken where errors are no numbers, or too large
        constexpr int STEPS[] = {-4, -2, -1, 1, 3, -3, 3};  // the last two for finer codes, of which they are enough
        for (int i = F::bits > 4 ? 5 : 0; i < (F::bits > 4 ? 7 : 5); i++) {
            const Floats scales = scales_of(STEPS[i]), found = errors(values, scales);
            best = found < smallest ? scales : best;
            smallest = found < smallest ? found : smallest;
        }
        return size < SMALLEST ? Floats{} : best;
    }
    // A group of some weight rows side by side; those after the last are zeros.
    void lay(long first, long start, Values& values) const {
        for (int block = 0; block < F::unit; block += Lanes<T>::width) {
            Words rows[LANES] = {};
            for (long row = 0; row < std::min(long(LANES), n - first); row++)
                rows[row] = load<Words>(from + (first + row) * k + start + block);
            transpose(rows);
            for (int i = 0; i < Lanes<T>::width; i++)
                values[block + i] = Lanes<T>::part(reinterpret_cast<const T*>(rows + i / Lanes<T>::parts), i % Lanes<T>::parts);
        }
    }

    // Some weight rows side by side.
    void tile(long first) const {
        uint8_t* unit = to + first / TILE * (k / F::unit) * F::bytes;
        uint32_t words[F::unit / 4][TILE];
        for (long start = 0; start < k; start += F::unit, unit += F::bytes) {
            for (long row = 0; row < TILE; row += LANES) {
                Values values;
                lay(first + row, start, values);
                const Floats scales = choose(values), inverse = scales == 0.0f ? Floats{} : 1.0f / scales;
                narrow((Ints)((Words)scales >> 16), reinterpret_cast<int16_t*>(unit) + row);
                for (int group = 0; group < F::unit / 4; group++) {
                    Words word = {};
                    for (int i = 0; i < 4; i++)
                        word |= ((Words)codes(values[4 * group + i], inverse) - (Words)spread(ROUNDS + lowest)) << 8 * i;
                    std::memcpy(words[group] + row, &word, sizeof(Words));
                }
            }
            for (int block = 0; block < F::blocks; block++)
                Codes<F::bits>::write(words + block * GROUPS, unit + F::head + block * Codes<F::bits>::bytes);
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
