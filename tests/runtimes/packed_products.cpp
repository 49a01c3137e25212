// Products of random weights of every format with random rows: what a level of instructions computes, in whole numbers where
// the arithmetic is exact.
//
// Checks that a row has the same bits alone and among others, and that sums are near those of the unpacked weights. Prints by
// format the sums of rows of 24, 16 and 8 bits.

#include "kernels.cpp"

#include <cstdio>
#include <cstdlib>

#include "permission.h"

namespace {

constexpr long OUTPUTS = 40, ROWS_RUN = 37;  // some rows are more than a tile has, and than those of two tiles
long inputs = 0;  // two units of 256, and one of the format: numbers of blocks that are not a multiple of four, too

uint64_t state = 7;
uint32_t next() { return uint32_t((state = mix(state + GAMMA)) >> 32); }
float next_float() { return float(next() >> 8) / float(1 << 23) - 1; }

void check(bool holds, const char* what, int format) {
    if (!holds) std::fprintf(stderr, "format %d: %s\n", format, what), std::exit(1);
}

// Tiles of a format: any codes and integers of scales, numbers of 16 bits between 2^-7 and 2^-5 with a sign.
template <class F> std::vector<uint8_t> random_tiles(bool is_bfloat16, int numbers) {
    const long units = (OUTPUTS + TILE - 1) / TILE * (inputs / F::unit);
    std::vector<uint8_t> made(units * F::bytes);
    for (uint8_t& byte : made) byte = uint8_t(next());
    for (long unit = 0; unit < units; unit++)
        for (int i = 0; i < numbers * TILE; i++) {
            const uint32_t sign = next() & 0x8000, rest = next();
            const uint16_t number = is_bfloat16 ? uint16_t(sign | (0x3c00 + (rest & 0xff))) : uint16_t(sign | (0x2000 + (rest & 0x7ff)));
            std::memcpy(made.data() + unit * F::bytes + 2 * i, &number, 2);
        }
    return made;
}
// Tiles of a grid: scales of 32 bits between 2^-7 and 2^-5 with a sign, zero points of as many bits as the codes.
template <class F> std::vector<uint8_t> random_grid() {
    std::vector<uint8_t> made = random_tiles<F>(false, 0);
    for (size_t unit = 0; unit < made.size(); unit += F::bytes)
        for (int i = 0; i < TILE; i++) {
            const uint32_t scale = (next() & 0x80000000) | (0x3c000000 + (next() & 0xffffff));
            std::memcpy(made.data() + unit + 4 * i, &scale, 4);
            made[unit + 4 * TILE + i] = uint8_t(int(next() >> (32 - F::bits)) - F::offset);
        }
    return made;
}

// Tiles of floats of four bits, with powers of two between 2^-7 and 1, but for the first weight row: the least one.
inline std::vector<uint8_t> random_powers() {
    std::vector<uint8_t> made = random_tiles<Format<MXFP4>>(false, 0);
    for (size_t unit = 0; unit < made.size(); unit += Format<MXFP4>::bytes)
        for (int i = 0; i < TILE; i++) made[unit + i] = uint8_t(unit || i ? 120 + next() % 8 : 0);
    return made;
}

// Tiles of floats between -1 and 1; of F16 some that are not normal, too.
template <int NUMBER> std::vector<uint8_t> random_floats() {
    std::vector<uint8_t> made = random_tiles<Format<NUMBER>>(false, 0);
    constexpr long size = Format<NUMBER>::bits / 8;
    for (size_t at = 0; at < made.size(); at += size) {
        const float value = next_float();
        uint32_t bits = down<bf16>(value).bits;
        if (NUMBER == F32) std::memcpy(&bits, &value, 4);
        if (NUMBER == F16) bits = (next() % 16 ? 0x2000 + (next() & 0xfff) : next() & 0x3ff) | (next() & 0x8000);
        std::memcpy(made.data() + at, &bits, size);
    }
    return made;
}

template <class T> std::vector<T> run(const Linear& linear, const std::vector<T>& rows, long count, int threads) {
    std::vector<T> out(count * OUTPUTS);
    product<T>(linear, rows.data(), out.data(), count, inputs, OUTPUTS, threads);
    return out;
}

template <class T> void print_sums(Linear linear, int format, bool is_short) {
    linear.short_rows = is_short;
    std::vector<T> rows(ROWS_RUN * inputs), weights(OUTPUTS * inputs);
    for (T& value : rows) value = down<T>(next_float() * (next() % 8 ? 1.0f : 0.01f));
    std::vector<int64_t> places(OUTPUTS);
    for (long i = 0; i < OUTPUTS; i++) places[i] = i;
    std::vector<float> values(OUTPUTS * inputs);
    unpack<float>(linear, places.data(), values.data(), OUTPUTS, inputs, 1);
    const auto sums = run(linear, rows, ROWS_RUN, 2);
    for (long count = 1; count <= ROWS_RUN; count += count < 20 ? 1 : 4) {
        const auto some = run(linear, rows, count, 1);
        check(!std::memcmp(some.data(), sums.data(), some.size() * sizeof(T)), "a row depends on others", format);
    }
    for (long row = 0; row < ROWS_RUN; row++)
        for (long i = 0; i < OUTPUTS; i++) {
            double wanted = 0, size = 0;
            for (long k = 0; k < inputs; k++) {
                const double each = double(up(rows[row * inputs + k])) * values[i * inputs + k];
                wanted += each, size += each * each;
            }
            const double error = std::fabs(up(sums[row * OUTPUTS + i]) - wanted), limit = is_short ? 0.1 : sizeof(T) == 4 ? 1e-4 : 0.02;
            check(error <= limit * (std::sqrt(size) + std::fabs(wanted)), "a sum is wrong", format);
            std::printf("%.9g ", double(up(sums[row * OUTPUTS + i])));
        }
    std::printf("\n");
}

}  // namespace

int main() {
    check(permits_tiles(), "the system does not permit tiles", 0);
    for (int format = 1; format < FORMATS; format++)
        with_format(format, [&](auto number) {
            using F = Format<number>;
            inputs = 512 + F::unit;
            constexpr bool is_grid = number >= GRID2 && number < F16;
            const int numbers = F::has_minimum ? 2 : 1;
            std::vector<uint8_t> tiles;
            if constexpr (F::is_float)
                tiles = random_floats<number>();
            else if constexpr (number == MXFP4)
                tiles = random_powers();
            else
                tiles = is_grid ? random_grid<F>() : random_tiles<F>(F::is_symmetric, numbers);
            const Stored part{tiles.data(), OUTPUTS, format};
            std::vector<int32_t> order(inputs);  // of grids: backwards
            for (long i = 0; i < inputs; i++) order[i] = int32_t(inputs - 1 - i);
            const Linear linear{nullptr, nullptr, &part, 1, 0, is_grid ? order.data() : nullptr};
            print_sums<float>(linear, format, false);
            print_sums<bf16>(linear, format, false);
            print_sums<float>(linear, format, true);
        });
#if defined(TILE_INSTRUCTIONS)
    check(byte_tile_products > 0, "no product ran in tiles", 0);
#endif
}
