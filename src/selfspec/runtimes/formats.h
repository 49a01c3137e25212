// The formats of weights of few bits: what a code stands for, (code - offset) times a scale minus a minimum.
//
// Weights are stored in tiles of 16 weight rows, one unit of inputs after the other. A unit has its scales first and then
// the codes of its blocks. The symmetric formats are those of our own low-bit copies. GGUF's have its names: they keep the
// numbers of the file and take as many bytes (Q3_K and IQ4_XS 4 and 2 of 110 and 136 more). The grids are those of quantised
// checkpoints (GPTQ, AWQ and others), whose scales they keep in 32 bits. MXFP4 is of both. Matrices of floats that are not of the rows' dtype
// have neither codes nor scales: a block has its 32 inputs one after the other, each with those of 16 weight rows.

#pragma once

#include <type_traits>

#include "codes.h"

namespace {

// By the numbers that the Python code knows them by.
enum FormatNumber {
    SYMMETRIC8 = 1, SYMMETRIC6 = 4, SYMMETRIC4 = 7,  // each with groups of 32, 64, 128
    Q4_0 = 10, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS,
    GRID2 = 22, GRID3 = 25, GRID4 = 28, GRID8 = 31,  // each with groups of 32, 64, 128
    F16 = 34, BF16, F32,
    MXFP4 = 37,
    FORMATS = 38
};

// What all formats have. UNIT: inputs of a unit; SCALED: inputs that share a scale.
template <int BITS, int UNIT, int SCALED, int OFFSET, long HEAD> struct FormatBase {
    static constexpr int bits = BITS, unit = UNIT, scaled = SCALED, offset = OFFSET;
    static constexpr int blocks = UNIT / BLOCK, scales = UNIT / SCALED;  // of a unit
    static constexpr long head = HEAD, bytes = HEAD + blocks * Codes<BITS>::bytes;
    static constexpr bool has_minimum = false, looks_up = false, is_symmetric = false, is_float = false;
};

// Numbers of JOINT weight rows.
struct Numbers {
    Floats of[SIDES];
    template <class Function> explicit Numbers(const Function& read) {
#pragma GCC unroll 2
        for (int side = 0; side < SIDES; side++) of[side] = read(side * LANES);
    }
    template <class T> explicit Numbers(const T* from) : Numbers([=](int at) { return widen(from + at); }) {}
};
// What is read of the head of a unit for JOINT weight rows from ``first`` on: scale(index, side) and, where there are any,
// minimum(index, side).
struct OneScale {
    const Numbers only;
    Floats scale(int, int side) const { return only.of[side]; }
};
struct TwoNumbers {
    int first;
    const Numbers number, other;
    TwoNumbers(const uint8_t* head, int first)
        : first(first), number(reinterpret_cast<const f16*>(head) + first),
          other(reinterpret_cast<const f16*>(head) + TILE + first) {}
    Floats scaled(const Numbers& numbers, const uint8_t* integers, int index, int side) const {
        return numbers.of[side] * widen(integers + index * TILE + first + side * LANES);
    }
};

// One scale a group.
template <int BITS, int GROUP> struct Symmetric : FormatBase<BITS, GROUP, GROUP, 1 << (BITS - 1), 2 * TILE> {
    static constexpr bool is_symmetric = true;
    struct Scales : OneScale {
        Scales(const uint8_t* head, int first) : OneScale{Numbers(reinterpret_cast<const bf16*>(head) + first)} {}
    };
};
template <int BITS, int OFFSET> struct Scaled : FormatBase<BITS, 32, 32, OFFSET, 2 * TILE> {
    struct Scales : OneScale {
        Scales(const uint8_t* head, int first) : OneScale{Numbers(reinterpret_cast<const f16*>(head) + first)} {}
    };
};
// One scale and one minimum a block.
template <int BITS> struct Shifted : FormatBase<BITS, 32, 32, 0, 4 * TILE> {
    static constexpr bool has_minimum = true;
    struct Scales : TwoNumbers {
        using TwoNumbers::TwoNumbers;
        Floats scale(int, int side) const { return number.of[side]; }
        Floats minimum(int, int side) const { return -other.of[side]; }
    };
};
// One scale of 32 bits and one zero point a group, which counts from the offset.
template <int BITS, int GROUP> struct Grid : FormatBase<BITS, GROUP, GROUP, 1 << (BITS - 1), 5 * TILE> {
    static constexpr bool has_minimum = true;
    struct Scales : OneScale {
        const Numbers zero;
        Scales(const uint8_t* head, int first)
            : OneScale{Numbers(reinterpret_cast<const float*>(head) + first)},
              zero(reinterpret_cast<const int8_t*>(head) + 4 * TILE + first) {}
        Floats minimum(int, int side) const { return only.of[side] * zero.of[side]; }
    };
};
// Integers of six bits that scale two numbers, a block each: the low four bits of the last four are in the last four bytes,
// their high two bits above those of the first four.
template <int BITS> struct SixBits : FormatBase<BITS, 256, 32, 0, 16 * TILE> {
    static constexpr bool has_minimum = true;
    struct Scales : TwoNumbers {
        uint8_t scales[8 * TILE], minima[8 * TILE];
        Scales(const uint8_t* head, int first) : TwoNumbers(head, first) {
            constexpr int HALF = 4 * TILE;
            const uint8_t *low = head + HALF, *high = low + HALF, *both = high + HALF;
#pragma omp simd
            for (int i = 0; i < HALF; i++) {
                scales[i] = low[i] & 63, minima[i] = high[i] & 63;
                scales[i + HALF] = uint8_t((both[i] & 15) | (low[i] >> 2 & 48));
                minima[i + HALF] = uint8_t(both[i] >> 4 | (high[i] >> 2 & 48));
            }
        }
        Floats scale(int index, int side) const { return scaled(number, scales, index, side); }
        Floats minimum(int index, int side) const { return scaled(other, minima, index, side); }
    };
};
// Integers of eight bits that scale one number.
template <int BITS, int SCALED, int OFFSET>
struct EightBits : FormatBase<BITS, 256, SCALED, OFFSET, (2 + 256 / SCALED) * TILE> {
    struct Scales {
        const int8_t* integers;
        const Numbers number;
        Scales(const uint8_t* head, int first)
            : integers(reinterpret_cast<const int8_t*>(head) + 2 * TILE + first),
              number(reinterpret_cast<const f16*>(head) + first) {}
        Floats scale(int index, int side) const {
            return number.of[side] * widen(integers + index * TILE + side * LANES);
        }
    };
};
// Integers of four bits that scale two numbers: in a byte that of the scale and, above it, that of the minimum.
struct FourBits : FormatBase<2, 256, 16, 0, 20 * TILE> {
    static constexpr bool has_minimum = true;
    struct Scales : TwoNumbers {
        uint8_t scales[16 * TILE], minima[16 * TILE];
        Scales(const uint8_t* head, int first) : TwoNumbers(head, first) {
            const uint8_t* both = head + 4 * TILE;
#pragma omp simd
            for (int i = 0; i < 16 * TILE; i++) scales[i] = both[i] & 15, minima[i] = both[i] >> 4;
        }
        Floats scale(int index, int side) const { return scaled(number, scales, index, side); }
        Floats minimum(int index, int side) const { return scaled(other, minima, index, side); }
    };
};
// Codes that are places in a table of 16 values, to which 128 has been added.
template <class Format> struct Table : Format {
    static constexpr bool looks_up = true;
    static constexpr uint8_t values[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
};
// Half of powers of two, LANES of them, of exponents with 127 added.
inline Floats half_powers(const uint8_t* exponents) {
    const Ints each = nearest(widen(exponents));
    return (Floats)(each << 23 | ((each == 0) & 0x00400000)) * 0.5f;  // that of 0 is not normal
}
// Floats of four bits (E2M1) with a power of two a block (E8M0): a sign, then 0, 0.5, 1, 1.5, 2, 3, 4, 6. The table has the
// double, with 128 added.
struct Microscaled : FormatBase<4, 32, 32, 128, TILE> {
    static constexpr bool looks_up = true;
    static constexpr uint8_t values[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};
    struct Scales : OneScale {
        Scales(const uint8_t* head, int first)
            : OneScale{Numbers([=](int at) { return half_powers(head + first + at); })} {}
    };
};
// Numbers as they are.
template <class T> struct Real : FormatBase<8 * int(sizeof(T)), BLOCK, BLOCK, 0, 0> {
    static constexpr bool is_float = true;
    // An input of LANES weight rows from ``first`` on.
    static Floats read(const uint8_t* unit, int input, int first) {
        return widen(reinterpret_cast<const T*>(unit) + input * TILE + first);
    }
};

template <int NUMBER> struct Format;
template <> struct Format<SYMMETRIC4> : Symmetric<4, 32> {};
template <> struct Format<SYMMETRIC4 + 1> : Symmetric<4, 64> {};
template <> struct Format<SYMMETRIC4 + 2> : Symmetric<4, 128> {};
template <> struct Format<SYMMETRIC6> : Symmetric<6, 32> {};
template <> struct Format<SYMMETRIC6 + 1> : Symmetric<6, 64> {};
template <> struct Format<SYMMETRIC6 + 2> : Symmetric<6, 128> {};
template <> struct Format<SYMMETRIC8> : Symmetric<8, 32> {};
template <> struct Format<SYMMETRIC8 + 1> : Symmetric<8, 64> {};
template <> struct Format<SYMMETRIC8 + 2> : Symmetric<8, 128> {};
template <> struct Format<Q4_0> : Scaled<4, 8> {};
template <> struct Format<Q4_1> : Shifted<4> {};
template <> struct Format<Q5_0> : Scaled<5, 16> {};
template <> struct Format<Q5_1> : Shifted<5> {};
template <> struct Format<Q8_0> : Scaled<8, 128> {};
template <> struct Format<Q2_K> : FourBits {};
template <> struct Format<Q3_K> : EightBits<3, 16, 4> {};
template <> struct Format<Q4_K> : SixBits<4> {};
template <> struct Format<Q5_K> : SixBits<5> {};
template <> struct Format<Q6_K> : EightBits<6, 16, 32> {};
template <> struct Format<IQ4_NL> : Table<Scaled<4, 128>> {};
template <> struct Format<IQ4_XS> : Table<EightBits<4, 32, 128>> {};
template <> struct Format<GRID2> : Grid<2, 32> {};
template <> struct Format<GRID2 + 1> : Grid<2, 64> {};
template <> struct Format<GRID2 + 2> : Grid<2, 128> {};
template <> struct Format<GRID3> : Grid<3, 32> {};
template <> struct Format<GRID3 + 1> : Grid<3, 64> {};
template <> struct Format<GRID3 + 2> : Grid<3, 128> {};
template <> struct Format<GRID4> : Grid<4, 32> {};
template <> struct Format<GRID4 + 1> : Grid<4, 64> {};
template <> struct Format<GRID4 + 2> : Grid<4, 128> {};
template <> struct Format<GRID8> : Grid<8, 32> {};
template <> struct Format<GRID8 + 1> : Grid<8, 64> {};
template <> struct Format<GRID8 + 2> : Grid<8, 128> {};
template <> struct Format<F16> : Real<f16> {};
template <> struct Format<BF16> : Real<bf16> {};
template <> struct Format<F32> : Real<float> {};
template <> struct Format<MXFP4> : Microscaled {};

template <class Function, int... PLACE>
void with_format(int number, const Function& function, std::integer_sequence<int, PLACE...>) {
    ((number == PLACE + 1 && (function(std::integral_constant<int, PLACE + 1>()), true)) || ...);
}
// Calls a function with the number of a format as a constant.
template <class Function> void with_format(int number, const Function& function) {
    with_format(number, function, std::make_integer_sequence<int, FORMATS - 1>());
}

}  // namespace
