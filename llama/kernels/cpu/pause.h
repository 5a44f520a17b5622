// The instruction that tells the CPU that a thread waits in a loop.
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
inline void pause_briefly() { _mm_pause(); }
#else
inline void pause_briefly() { asm volatile("isb"); }  // "yield" does nothing on most CPUs
#endif
