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

// Floats of four bits: blocks [n, units, 16], of which each byte has two inputs after each other, and scales [n, units].
inline void lay_out_mxfp4(const uint8_t* blocks, const uint8_t* scales, uint8_t* to, long k, long n, int threads) {
    using F = Format<MXFP4>;
    const long units = k / F::unit;
    lay_out_tiles<F>(to, units, n, threads, [=](long row, long unit, uint8_t* codes, uint8_t* head, int at) {
        const uint8_t* pairs = blocks + (row * units + unit) * (F::unit / 2);
        put_byte(scales[row * units + unit], head, 0, at);
        for (int i = 0; i < F::unit; i++) codes[i] = pairs[i / 2] >> i % 2 * 4 & 15;
    });
}

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
