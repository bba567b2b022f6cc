// The simplest kernels that cross the link: what nothing else can beat. For `moelab bench alltoall`, which prints them
// beside its times; no exchange uses them. Like exchange.h: plain memory that the caller lends, 0 or a cudaError_t
// returned, nothing allocated or synchronised.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// One block: a flag to every other rank, and theirs awaited. windows: device array [ranks], each 128 bytes for every
// rank, zeros at first, all mapped here; state: two words of zeros at a multiple of 16 bytes, of which the second
// becomes 1 + a peer that did not come in time. Every rank launches it equally often.
int moelab_floor_flag(uint64_t* const* windows, int rank, int ranks, uint64_t* state, uint64_t timeout_ns,
                      void* stream);
// Does nothing.
int moelab_floor_empty(int blocks, int threads, void* stream);
// Fills `bytes`, a multiple of 16, at `target`, which may be a peer's memory, from `blocks` blocks of 512 threads.
int moelab_floor_stores(uint8_t* target, int64_t bytes, int blocks, void* stream);

#ifdef __cplusplus
}
#endif
