// The tiles of AMX that a thread uses, and their shapes.

#pragma once

#include <algorithm>

#include "tile_instructions.h"

namespace {

#if defined(HAS_TILES)

constexpr long TILE_ROWS = 16;  // most rows of a tile, each of up to 64 bytes

// Of some rows, how many are in the first or the second tile.
inline long part(long rows, int index) { return std::min(TILE_ROWS, std::max(0L, rows - TILE_ROWS * index)); }

// To give tiles their shapes takes as long as many products, so a thread keeps them from one product to the next, until
// the end of the parallel region, where this object is.
class TilesOfThread {
  public:
    TilesOfThread() = default;
    TilesOfThread(const TilesOfThread&) = delete;
    ~TilesOfThread() { release(); }

    // Gives the tiles shapes that ``set`` sets; others have other names, which are positive.
    template <class Function> static void shape(long name, const Function& set) {
        if (shaped == name) return;
        release();
        TileShapes shapes;
        set(shapes);
        configure_tiles(shapes);
        shaped = name;
    }

  private:
    static void release() {
        if (shaped) release_tiles();
        shaped = 0;
    }
    inline static thread_local long shaped = 0;
};

#else

struct TilesOfThread {};

#endif

}  // namespace
