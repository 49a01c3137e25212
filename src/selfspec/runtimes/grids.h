// Weights of a quantised checkpoint into tiles: the same numbers in another order.

#pragma once

#include "gguf.h"

namespace {

// Integers of weights as a checkpoint packs them, in words or bytes, along inputs or along outputs.
struct Codes2D {
    const uint8_t* bytes;
    const int64_t *outputs, *inputs;  // in bits: the place of a code is the sum for its output and its input
    int bits, flipped;                // of a code; its bits that are flipped

    uint8_t operator()(long output, long input) const {
        const int64_t at = outputs[output] + inputs[input];
        const int shift = at & 7;
        int code = bytes[at >> 3] >> shift;
        if (shift + bits > 8) code |= bytes[(at >> 3) + 1] << (8 - shift);
        return uint8_t((code & ((1 << bits) - 1)) ^ flipped);
    }
};

// A scale and a zero point, less the format's offset, a unit: [n, units].
inline void lay_out(int number, const Codes2D& from, const float* scales, const int8_t* zeros, uint8_t* to, long k, long n,
                    int threads) {
    with_format(number, [&](auto constant) {
        if constexpr (constant >= GRID2 && constant < F16) {
            using F = Format<constant>;
            const long units = k / F::unit;
            lay_out_tiles<F>(to, units, n, threads, [=](long row, long unit, uint8_t* codes, uint8_t* head, int at) {
                std::memcpy(head + 4 * at, scales + row * units + unit, 4);
                head[4 * TILE + at] = uint8_t(zeros[row * units + unit]);
                for (int i = 0; i < F::unit; i++) codes[i] = from(row, unit * F::unit + i);
            });
        }
    });
}

}  // namespace
