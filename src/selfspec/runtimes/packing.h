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
