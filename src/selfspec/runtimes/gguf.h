// Weights of a GGUF file into tiles: the same numbers in another order.

#pragma once

#include "formats.h"

namespace {

// How GGUF stores a unit of inputs of one weight row: its bytes, and how its codes [unit] and its scales are read. Scales go
// to their places for a weight row in the head of a unit of 16.
template <int NUMBER> struct Raw;

inline void put_number(const uint8_t* from, uint8_t* head, int row) { std::memcpy(head + 2 * row, from, 2); }
inline void put_byte(uint8_t byte, uint8_t* head, int index, int row) { head[index * TILE + row] = byte; }

// Codes of a block whose first half is in the low bits of bytes and whose second half is in the high ones.
inline void read_halves(const uint8_t* from, uint8_t* codes) {
    for (int i = 0; i < BLOCK / 2; i++) codes[i] = from[i] & 15, codes[i + BLOCK / 2] = from[i] >> 4;
}
// The fifth bits of a block.
inline void add_fifth_bits(const uint8_t* from, uint8_t* codes) {
    const uint32_t bits = load<uint32_t>(from);
    for (int i = 0; i < BLOCK; i++) codes[i] |= (bits >> i & 1) << 4;
}
// Codes of a unit of which each byte has two, those of two blocks after each other.
inline void read_blocks(const uint8_t* from, uint8_t* codes) {
    for (int pair = 0; pair < 4; pair++)
        for (int i = 0; i < BLOCK; i++) {
            codes[2 * pair * BLOCK + i] = from[pair * BLOCK + i] & 15;
            codes[(2 * pair + 1) * BLOCK + i] = from[pair * BLOCK + i] >> 4;
        }
}
// Two bits of each code of a unit.
inline void read_pairs(const uint8_t* from, uint8_t* codes) {
    for (int half = 0; half < 2; half++)
        for (int block = 0; block < 4; block++)
            for (int i = 0; i < BLOCK; i++)
                codes[(4 * half + block) * BLOCK + i] = from[half * BLOCK + i] >> 2 * block & 3;
}

template <> struct Raw<Q4_0> {
    static constexpr long bytes = 18;
    static void read(const uint8_t* from, uint8_t* codes, uint8_t* head, int row) {
        put_number(from, head, row);
        read_halves(from + 2, codes);
    }
};
template <> struct Raw<IQ4_NL> : Raw<Q4_0> {};
template <> struct Raw<Q4_1> {
    static constexpr long bytes = 20;
    static void read(const uint8_t* from, uint8_t* codes, uint8_t* head, int row) {
        put_number(from, head, row), put_number(from + 2, head + 2 * TILE, row);
        read_halves(from + 4, codes);
    }
};
template <> struct Raw<Q5_0> {
    static constexpr long bytes = 22;
    static void read(const uint8_t* from, uint8_t* codes, uint8_t* head, int row) {
        put_number(from, head, row);
        read_halves(from + 6, codes);
        add_fifth_bits(from + 2, codes);
    }
};
template <> struct Raw<Q5_1> {
    static constexpr long bytes = 24;
    static void read(const uint8_t* from, uint8_t* codes, uint8_t* head, int row) {
        put_number(from, head, row), put_number(from + 2, head + 2 * TILE, row);
        read_halves(from + 8, codes);
        add_fifth_bits(from + 4, codes);
    }
};
template <> struct Raw<Q8_0> {
    static constexpr long bytes = 34;
    static void read(const uint8_t* from, uint8_t* codes, uint8_t* head, int row) {
        put_number(from, head, row);
        for (int i = 0; i < BLOCK; i++) codes[i] = from[2 + i] ^ 0x80;
    }
};
template <> struct Raw<Q2_K> {
    static constexpr long bytes = 84;
    static void read(const uint8_t* from, uint8_t* codes, uint8_t* head, int row) {
        put_number(from + 80, head, row), put_number(from + 82, head + 2 * TILE, row);
        for (int i = 0; i < 16; i++) put_byte(from[i], head, 4 + i, row);
        read_pairs(from + 16, codes);
    }
};
template <> struct Raw<Q3_K> {
    static constexpr long bytes = 110;
    static void read(const uint8_t* from, uint8_t* codes, uint8_t* head, int row) {
        const uint8_t *high = from, *scales = from + 96;
        put_number(from + 108, head, row);
        for (int i = 0; i < 16; i++) {
            const int low = scales[i % 8] >> i / 8 * 4 & 15, top = scales[8 + i % 4] >> i / 4 * 2 & 3;
            put_byte(uint8_t((low | top << 4) - 32), head, 2 + i, row);
        }
        read_pairs(from + 32, codes);
        for (int block = 0; block < 8; block++)
            for (int i = 0; i < BLOCK; i++) codes[block * BLOCK + i] |= (high[i] >> block & 1) << 2;
    }
};
template <> struct Raw<Q4_K> {
    static constexpr long bytes = 144;
    static void read_scales(const uint8_t* from, uint8_t* head, int row) {
        put_number(from, head, row), put_number(from + 2, head + 2 * TILE, row);
        for (int i = 0; i < 12; i++) put_byte(from[4 + i], head, 4 + i, row);
    }
    static void read(const uint8_t* from, uint8_t* codes, uint8_t* head, int row) {
        read_scales(from, head, row);
        read_blocks(from + 16, codes);
    }
};
template <> struct Raw<Q5_K> {
    static constexpr long bytes = 176;
    static void read(const uint8_t* from, uint8_t* codes, uint8_t* head, int row) {
        Raw<Q4_K>::read_scales(from, head, row);
        read_blocks(from + 48, codes);
        for (int block = 0; block < 8; block++)
            for (int i = 0; i < BLOCK; i++) codes[block * BLOCK + i] |= (from[16 + i] >> block & 1) << 4;
    }
};
template <> struct Raw<Q6_K> {
    static constexpr long bytes = 210;
    static void read(const uint8_t* from, uint8_t* codes, uint8_t* head, int row) {
        put_number(from + 208, head, row);
        for (int i = 0; i < 16; i++) put_byte(from[192 + i], head, 2 + i, row);
        for (int half = 0; half < 2; half++)
            for (int block = 0; block < 4; block++) {
                const uint8_t *low = from + 64 * half + block % 2 * BLOCK, *high = from + 128 + half * BLOCK;
                uint8_t* to = codes + (4 * half + block) * BLOCK;
                for (int i = 0; i < BLOCK; i++) to[i] = (low[i] >> block / 2 * 4 & 15) | (high[i] >> 2 * block & 3) << 4;
            }
    }
};
template <> struct Raw<MXFP4> {
    static constexpr long bytes = 17;
    static void read(const uint8_t* from, uint8_t* codes, uint8_t* head, int row) {
        put_byte(from[0], head, 0, row);
        read_halves(from + 1, codes);
    }
};
template <> struct Raw<IQ4_XS> {
    static constexpr long bytes = 136;
    static void read(const uint8_t* from, uint8_t* codes, uint8_t* head, int row) {
        put_number(from, head, row);
        const int high = load<uint16_t>(from + 2);
        for (int block = 0; block < 8; block++) {
            const int low = from[4 + block / 2] >> block % 2 * 4 & 15;
            put_byte(uint8_t((low | (high >> 2 * block & 3) << 4) - 32), head, 2 + block, row);
            read_halves(from + 8 + block * (BLOCK / 2), codes + block * BLOCK);
        }
    }
};

// Lays out n weight rows of as many units in tiles; those after the last are zeros. ``read`` is given a weight row and a unit,
// and writes its codes, and its scales to the head of a unit of 16 weight rows, where it has the last argument's place.
template <class F, class Read> void lay_out_tiles(uint8_t* to, long units, long n, int threads, const Read& read) {
#pragma omp parallel for num_threads(threads) schedule(guided)
    for (long tile = 0; tile < (n + TILE - 1) / TILE; tile++) {
        uint8_t* unit = to + tile * units * F::bytes;
        for (long index = 0; index < units; index++, unit += F::bytes) {
            uint32_t words[F::blocks][GROUPS][TILE] = {};
            std::fill_n(unit, F::head, uint8_t(0));
            for (int row = 0; row < std::min(TILE, n - tile * TILE); row++) {
                uint8_t codes[F::unit];
                read(tile * TILE + row, index, codes, unit, row);
                for (int i = 0; i < F::unit; i += 4) words[i / BLOCK][i % BLOCK / 4][row] = load<uint32_t>(codes + i);
            }
            for (int block = 0; block < F::blocks; block++)
                Codes<F::bits>::write(words[block], unit + F::head + block * Codes<F::bits>::bytes);
        }
    }
}

// The same for floats.
template <class F> void lay_out_floats(const uint8_t* from, const int64_t* order, uint8_t* to, long k, long n, int threads) {
    constexpr long size = F::bits / 8;
#pragma omp parallel for num_threads(threads) schedule(guided)
    for (long tile = 0; tile < (n + TILE - 1) / TILE; tile++) {
        uint8_t* own = to + tile * k * TILE * size;
        const long rows = std::min(TILE, n - tile * TILE);
        if (rows < TILE) std::fill_n(own, k * TILE * size, uint8_t(0));
        for (long row = 0; row < rows; row++) {
            const long place = tile * TILE + row;
            const uint8_t* numbers = from + (order ? order[place] : place) * k * size;
            for (long input = 0; input < k; input++)
                std::memcpy(own + (input * TILE + row) * size, numbers + input * size, size);
        }
    }
}

// Lays out weight rows [n, k] of a file, of which ``order`` gives the place of each where it is not null.
inline void lay_out(int number, const uint8_t* from, const int64_t* order, uint8_t* to, long k, long n, int threads) {
    with_format(number, [&](auto constant) {
        if constexpr (Format<constant>::is_float) {
            lay_out_floats<Format<constant>>(from, order, to, k, n, threads);
        } else if constexpr ((constant >= Q4_0 && constant < GRID2) || constant == MXFP4) {
            const long units = k / Format<constant>::unit;
            lay_out_tiles<Format<constant>>(to, units, n, threads, [=](long row, long unit, uint8_t* codes, uint8_t* head, int at) {
                using Raw = ::Raw<constant>;
                Raw::read(from + ((order ? order[row] : row) * units + unit) * Raw::bytes, codes, head, at);
            });
        }
    });
}

}  // namespace
