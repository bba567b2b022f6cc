// All ranks in one cooperative launch on one GPU.
#include "launch.cuh"

using namespace moelab;

EXPORT int moelab_a2a_launch_virtual(const MoelabShape* shape, const MoelabCall* calls, int what, int halves,
                                     int blocks, int quantize, int out_dtype, void* stream) {
  Plan p;
  if (make_plan(*shape, p) || blocks < 1 || blocks > MOELAB_MOST_BLOCKS || shape->protocol == MOELAB_PUTS)
    return cudaErrorInvalidValue;
  using Ranks = Many<DirectLink>;
  return launch(pick<Ranks>(p, what, halves, quantize), p, Ranks{calls, blocks, {}}, blocks * p.ranks, true, false,
                stream);
}
