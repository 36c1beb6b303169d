// Delivers the host's small writes together. A step's data (ids, positions, tables) goes to many arrays, and one copy
// for each would cost more than the bytes. The words come from the host's pinned memory.
//
// Later kernels may read the data before they wait for their inputs (packed weights, tables). So the kernel after this
// one is launched without overlap.
//
// Copies between places of the device, and parts that are zeroed, go together in the same way: saving the state of a
// sequence takes two copies for each recurrent layer.
//
//   deliver     a block of 128 threads for each delivery. Bytes: each word once over the bus.
//   move_parts  `from` null: zeros. Grid (blocks for the largest part, parts), block 256. Bytes: each word read and
//               written.
#include "common.cuh"

struct Delivery {
    u32* to;
    const u32* from;
    u64 words;
};

struct Moves {
    Delivery list[MOVES];
};
static_assert(sizeof(Moves) == 144 * sizeof(u64), "words of a parameter");

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

extern "C" __global__ void __launch_bounds__(256) move_parts(
#include "move_parts.params"
) {
    wait_for_inputs();
    const Delivery mine = moves.list[blockIdx.y];
    const u64 first = (u64)blockIdx.x * 256 + threadIdx.x, step = (u64)gridDim.x * 256;
    if (((u64)mine.to | (u64)mine.from | 4 * mine.words) % 16 == 0) {
        for (u64 i = first; i < mine.words / 4; i += step)
            ((uint4*)mine.to)[i] = mine.from ? ((const uint4*)mine.from)[i] : make_uint4(0, 0, 0, 0);
    } else {
        for (u64 i = first; i < mine.words; i += step) mine.to[i] = mine.from ? mine.from[i] : 0;
    }
}
