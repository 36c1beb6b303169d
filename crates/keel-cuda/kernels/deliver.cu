// Delivers the host's small writes together. A step's data (ids, positions, tables) goes to many arrays, and one copy
// for each would cost more than the bytes. The words come from the host's pinned memory.
//
// Later kernels may read the data before they wait for their inputs (packed weights, tables). So the kernel after this
// one is launched without overlap.
//
// Launch: a block of 128 threads for each delivery. Bytes: each word once over the bus.
#include "common.cuh"

struct Delivery {
    u32* to;
    const u32* from;
    u64 words;
};

struct Deliveries {
    Delivery list[DELIVERIES];
};
static_assert(sizeof(Deliveries) == 48 * sizeof(u64), "words of a parameter");

extern "C" __global__ void __launch_bounds__(128) deliver(
#include "deliver.params"
) {
    wait_for_inputs();
    const Delivery mine = deliveries.list[blockIdx.x];
    for (u64 i = threadIdx.x; i < mine.words; i += 128) mine.to[i] = mine.from[i];
}
