// The processors that threads run on, where a trial has chosen some (reading.py).

#pragma once

#include <atomic>
#if defined(__linux__)
#include <sched.h>
#endif

extern "C" int omp_get_thread_num();

namespace {

#if defined(__linux__)
inline cpu_set_t chosen_processors;
inline std::atomic<int> choices{0};  // how many were made

inline void choose_processors(const int* numbers, int count) {
    CPU_ZERO(&chosen_processors);
    for (int i = 0; i < count; i++) CPU_SET(numbers[i], &chosen_processors);
    choices++;
}
// Called by each thread of a team. Its first one is the caller's own, and stays where the caller has it.
inline void run_on_chosen() {
    thread_local int followed = 0;
    const int newest = choices;
    if (followed == newest || omp_get_thread_num() == 0) return;
    followed = newest;
    sched_setaffinity(0, sizeof(chosen_processors), &chosen_processors);
}
#else
inline void choose_processors(const int*, int) {}
inline void run_on_chosen() {}
#endif

}  // namespace
