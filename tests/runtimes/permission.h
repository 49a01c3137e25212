// Permission to use the tiles of AMX, which a process asks Linux for.

#pragma once

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// Whether the system permits tiles, or the program has none.
inline bool permits_tiles() {
#if defined(__AMX_BF16__)
    return !syscall(SYS_arch_prctl, 0x1023, 18);
#else
    return true;
#endif
}
