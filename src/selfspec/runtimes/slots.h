// Keys and values in the cache: as numbers of the model's dtype, or in 8 bits (MXINT8; model/mxint8.py says how).

#pragma once

#include "vectors.h"

namespace {

constexpr long MOST_DIM = 576;  // of a head
constexpr long STRETCH = 128;   // most slots whose keys or values stay in the first caches while queries pass
constexpr long SEEN = 64;       // slots of a block that is seen, or not
constexpr long SHARED = 32;     // numbers of a head with one exponent
constexpr uint32_t LEAST = 7, NO_NUMBER = 255;  // exponents: the least of a block that is not zero; of one that has none

inline long packed_bytes(long dim) { return dim + dim / SHARED; }
inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// A row of a head in 8 bits: its codes, then the exponents of its blocks.
template <class T> void pack_row(const T* from, uint8_t* to, long dim) {
    for (long start = 0; start < dim; start += SHARED) {
        float numbers[SHARED];
        for (long i = 0; i < SHARED; i++) numbers[i] = up(from[start + i]);
        uint32_t bits[SHARED], largest = 0;
        std::memcpy(bits, numbers, sizeof(bits));
        for (long i = 0; i < SHARED; i++) largest = std::max(largest, bits[i] & 0x7fffffff);
        const uint32_t exponent = largest >> 23;
        const bool known = exponent >= LEAST && exponent < NO_NUMBER;
        const float scale = float_of((260 - exponent) << 23);  // 64 over the block's power of two
        for (long i = 0; i < SHARED; i++) {
            const float code = known ? std::nearbyint(numbers[i] * scale) : 0.0f;
            to[start + i] = uint8_t(int8_t(std::min(std::max(code, -127.0f), 127.0f)));
        }
        to[dim + start / SHARED] = uint8_t(exponent < LEAST ? 0 : exponent);
    }
}

// What a code of 1 stands for, by the exponent of its block.
struct Units {
    float by_exponent[256] = {};
    Units() {
        for (uint32_t exponent = LEAST; exponent < NO_NUMBER; exponent++) by_exponent[exponent] = float_of((exponent - 6) << 23);
        by_exponent[NO_NUMBER] = NAN;
    }
};
const Units UNITS;

// LANES codes as the numbers that they stand for. Written out, because compilers convert bytes one by one.
inline Floats unpack(const uint8_t* codes, float unit) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(codes))) * unit;
#elif defined(__AVX2__) && defined(__FMA__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)))) * unit;
#else
    Vector<LANES>::Ints numbers;
    for (int i = 0; i < LANES; i++) numbers[i] = int8_t(codes[i]);
    return __builtin_convertvector(numbers, Floats) * unit;
#endif
}
// Numbers that the dtype has.
inline void write(float* to, Floats numbers) { std::memcpy(to, &numbers, sizeof(numbers)); }
inline void write(bf16* to, Floats numbers) {
#if defined(__AVX512F__)
    const __m256i halves = _mm512_cvtepi32_epi16((__m512i)((Words)numbers >> 16));
    std::memcpy(to, &halves, sizeof(halves));
#else
    const Words words = (Words)numbers >> 16;
    for (int i = 0; i < LANES; i++) to[i].bits = uint16_t(words[i]);
#endif
}

// Keys and values of a layer, [2 * key_heads, capacity, dim], from a slot on.
template <class T> struct Slots {
    const long stretch;  // most rows at a time

    // Some rows, one after the other, as numbers of the dtype; ``room`` is where they may be written.
    virtual const T* rows(long head, long slot, long count, T* room) const = 0;
    // Where a row is in memory.
    virtual const void* at(long head, long slot) const = 0;

  protected:
    explicit Slots(long stretch) : stretch(stretch) {}
    ~Slots() = default;
};

// As numbers of the dtype.
template <class T> struct PlainSlots final : Slots<T> {
    const T* from;
    long capacity, dim;
    PlainSlots(const void* cache, long first, long capacity, long dim)
        : Slots<T>(STRETCH), from(static_cast<const T*>(cache) + first * dim), capacity(capacity), dim(dim) {}

    const T* rows(long head, long slot, long, T*) const override { return from + (head * capacity + slot) * dim; }
    const void* at(long head, long slot) const override { return from + (head * capacity + slot) * dim; }
};

// In 8 bits; every number of them is one of the dtype.
template <class T> struct PackedSlots final : Slots<T> {
    const uint8_t* from;
    long capacity, dim, width = packed_bytes(dim);
    PackedSlots(const void* cache, long first, long capacity, long dim)
        : Slots<T>(STRETCH), from(static_cast<const uint8_t*>(cache) + first * packed_bytes(dim)), capacity(capacity), dim(dim) {}

    const T* rows(long head, long slot, long count, T* to) const override {
        const uint8_t* each = from + (head * capacity + slot) * width;
        for (T* next = to; next < to + count * dim; next += dim, each += width)
            for (long i = 0; i < dim; i += LANES) write(next + i, unpack(each + i, UNITS.by_exponent[each[dim + i / SHARED]]));
        return to;
    }
    const void* at(long head, long slot) const override { return from + (head * capacity + slot) * width; }
};

// What of a text the rows of a draft see: of each layer and key head some blocks of slots, and all slots from one on.
struct SeenBlocks {
    const int* blocks;  // [layers, key_heads, count], ascending
    long key_heads, count;
    long latest;  // the first slot of those that are all seen, a multiple of SEEN

    long slots(long end) const { return count * SEEN + end - latest; }
    const int* of_layer(long layer) const { return blocks + layer * key_heads * count; }
};

// Those, as if they followed each other.
template <class T> struct ChosenSlots final : Slots<T> {
    const Slots<T>& all;
    const SeenBlocks& seen;
    const int* blocks;  // of the layer
    ChosenSlots(const Slots<T>& all, const SeenBlocks& seen, long layer)
        : Slots<T>(SEEN), all(all), seen(seen), blocks(seen.of_layer(layer)) {}

    const T* rows(long head, long slot, long count, T* room) const override {
        return all.rows(head, place(head, slot), count, room);
    }
    const void* at(long head, long slot) const override { return all.at(head, place(head, slot)); }

  private:
    long place(long head, long slot) const {
        const long block = slot / SEEN;
        if (block >= seen.count) return seen.latest + slot - seen.count * SEEN;
        return blocks[head % seen.key_heads * seen.count + block] * SEEN + slot % SEEN;
    }
};

}  // namespace
