// Moves words between places of the device and the host's pinned memory, many in one launch: a launch or a copy of the
// driver for each would cost more than the bytes.
// - The host's small writes. A step's data (ids, positions, tables) goes to many arrays.
// - The result of a step, to the host.
// - Copies and zeroed parts. Saving the state of a sequence takes two copies for each recurrent layer.
//
// Later kernels may read the data before they wait for their inputs (packed weights, tables). So the kernel after this
// one is launched without overlap.
//
//   move_words  `from` null: zeros. Grid (blocks for the largest move, moves), block 256. Bytes: each word read and
//               written.
#include "common.cuh"

struct Move {
    u32* to;
    const u32* from;
    u64 words;
};

struct Moves {
    Move list[MOVES];
};
static_assert(sizeof(Moves) == 144 * sizeof(u64), "words of a parameter");

extern "C" __global__ void __launch_bounds__(256) move_words(
#include "move_words.params"
) {
    wait_for_inputs();
    const Move mine = moves.list[blockIdx.y];
    const u64 first = (u64)blockIdx.x * 256 + threadIdx.x, step = (u64)gridDim.x * 256;
    if (((u64)mine.to | (u64)mine.from | 4 * mine.words) % 16 == 0) {
        for (u64 i = first; i < mine.words / 4; i += step)
            ((uint4*)mine.to)[i] = mine.from ? ((const uint4*)mine.from)[i] : make_uint4(0, 0, 0, 0);
    } else {
        for (u64 i = first; i < mine.words; i += step) mine.to[i] = mine.from ? mine.from[i] : 0;
    }
}
