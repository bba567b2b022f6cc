// One rank's launches over windows that can be stored to.
#include "launch.cuh"

using namespace moelab;

EXPORT const char* moelab_a2a_sizes(const MoelabShape* shape, int64_t sizes[4]) {
  Plan p;
  if (const char* why = make_plan(*shape, p)) return why;
  const int64_t s[4] = {p.window_bytes, p.state_bytes, p.slot_bytes, p.capacity};
  for (int i = 0; i < 4; ++i) sizes[i] = s[i];
  return nullptr;
}

EXPORT void moelab_a2a_struct_bytes(int64_t bytes[2]) {
  bytes[0] = sizeof(MoelabShape), bytes[1] = sizeof(MoelabCall);
}

EXPORT int moelab_a2a_most_blocks(const MoelabShape* shape, int what, int halves, int quantize) {
  Plan p;
  if (make_plan(*shape, p)) return -cudaErrorInvalidValue;
  if (shape->protocol == MOELAB_PUTS) return most_blocks_puts(p, what, halves, quantize);
  return most_blocks(pick<One<DirectLink>>(p, what, halves, quantize));
}

EXPORT int moelab_a2a_launch(const MoelabShape* shape, const MoelabCall* call, int what, int halves, int blocks,
                             int early, void* stream) {
  Plan p;
  if (make_plan(*shape, p) || blocks < 0) return cudaErrorInvalidValue;
  if (shape->protocol == MOELAB_PUTS) return launch_puts(p, *call, what, halves, blocks, early, stream);
  return launch_one(p, *call, DirectLink{}, what, halves, blocks, early, stream);
}
