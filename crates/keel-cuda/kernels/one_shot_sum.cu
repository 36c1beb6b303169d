// The sum of small arrays of several GPUs: y[i] = ((x_0[i] + x_1[i]) + x_2[i]) + ..., in the order of ranks. So all
// GPUs get the same bits. Each GPU has a mailbox that its peers write ("one-shot all-reduce"):
//
//   mailbox   flags     BLOCKS lines: the last epoch that each peer has written for this block, by rank
//             progress  BLOCKS lines: the last epoch that this GPU's block has added up, and whether it has left
//             slots     [PARITIES][COUNT - 1 peers][BLOCKS][SLICE] of 16 bytes
//
// Block b adds slice b of the arrays. It shares nothing with other blocks, so each b is a protocol of its own. Epoch e:
//   1. The block writes its slice to the slots of parity e % 2 of all peers.
//   2. It sets its flag at each peer to e, and waits until the peers' flags here are at least e. A peer may be ahead.
//   3. It adds the slices in the order of ranks, and notes that e is done. Memory keeps the epoch, so a graph can hold
//      the kernel.
//
// Visibility. All threads of the block write; then comes a barrier; then a thread releases the flag at system scope. A
// release covers what its thread has seen before, and the barrier makes that the writes of the whole block. The peer's
// thread acquires the flag at system scope, and its barrier passes that on to its block, which then reads.
//
// Two parities are enough. A peer writes the slots of epoch e again in epoch e + 2. Before that it has ended
// epoch e + 1, so it has acquired this block's flag e + 1. This block released that flag in a later launch than the one
// that read the slots of epoch e, and a launch begins with a wait for the end of those before. So it has read before
// the peer writes again.
//
// A peer may fail and never come. So a wait looks at `stop` from time to time, a word of the host's memory. A block
// that stops has left: in later launches it does nothing, until the host has reset the mailboxes of all. It must not go
// on, because it does not know any more which slots its peers have read.
//
// Geometry: blocks of 256 threads, one for 256 groups of 16 bytes, and BLOCKS at most. Bytes: each GPU sends 4 n to
// each peer and receives as many. The floor is the latency of two writes to a peer, the second of which waits for the
// first.
#include "common.cuh"

// By rank. Those of ranks from COUNT on are null.
struct Mailboxes {
    u8* of[8];
};
static_assert(sizeof(Mailboxes) == 64, "as parameters/lists.rs has it");

struct Progress {
    u32 epoch;
    u32 has_left;
};

#define LINE 128
// Reads of a flag between two looks at `stop`, which take longer.
#define TRIES 256

__device__ inline u32* flag_of(u8* mailbox, u32 from) { return (u32*)(mailbox + blockIdx.x * LINE) + from; }
__device__ inline Progress* progress_of(u8* mailbox) { return (Progress*)(mailbox + (BLOCKS + blockIdx.x) * LINE); }

// Where the slice of rank `from` lies in the mailbox of rank `to`.
__device__ inline float4* slot_of(u8* mailbox, u32 to, u32 from, u32 parity) {
    const u32 peer = from < to ? from : from - 1;
    float4* slots = (float4*)(mailbox + 2 * BLOCKS * LINE);
    return slots + ((u64)(parity * (COUNT - 1) + peer) * BLOCKS + blockIdx.x) * SLICE;
}

__device__ inline void release_at_peer(u32* flag, u32 epoch) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(epoch) : "memory");
}
__device__ inline u32 acquire_from_peer(const u32* flag) {
    u32 epoch;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(epoch) : "l"(flag) : "memory");
    return epoch;
}
__device__ inline u32 read_from_host(const u32* word) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

// Elements 4 v to 4 v + 3 of x, and zeros from n on. x need not be aligned to 16 bytes.
__device__ inline float4 load_four(const float* x, u32 v, u32 n) {
    const u32 i = 4 * v;
    if (i + 4 <= n && (u64)x % 16 == 0) return ((const float4*)x)[v];
    float4 four = {x[i], 0.0f, 0.0f, 0.0f};
    if (i + 1 < n) four.y = x[i + 1];
    if (i + 2 < n) four.z = x[i + 2];
    if (i + 3 < n) four.w = x[i + 3];
    return four;
}
__device__ inline void store_four(float* y, u32 v, u32 n, float4 four) {
    const u32 i = 4 * v;
    if (i + 4 <= n && (u64)y % 16 == 0) {
        ((float4*)y)[v] = four;
        return;
    }
    y[i] = four.x;
    if (i + 1 < n) y[i + 1] = four.y;
    if (i + 2 < n) y[i + 2] = four.z;
    if (i + 3 < n) y[i + 3] = four.w;
}

extern "C" __global__ void __launch_bounds__(256) one_shot_sum(
#include "one_shot_sum.params"
) {
    // The next kernel is not let in before the end. On a GPU that several ranks share, its blocks could take the place
    // of kernels that the peers have to run before they come.
    wait_for_inputs();
    u8* own = mailboxes.of[rank];
    Progress* progress = progress_of(own);
    if (progress->has_left) return;
    const u32 epoch = progress->epoch + 1, parity = epoch % PARITIES;
    const u32 fours = (n + 3) / 4, slice = (fours + gridDim.x - 1) / gridDim.x;
    const u32 first = blockIdx.x * slice, end = min(first + slice, fours);

    // Each rank begins with another peer.
    for (u32 v = first + threadIdx.x; v < end; v += blockDim.x) {
        const float4 four = load_four(x, v, n);
#pragma unroll
        for (u32 hop = 1; hop < COUNT; hop++) {
            const u32 peer = (rank + hop) % COUNT;
            slot_of(mailboxes.of[peer], peer, rank, parity)[v - first] = four;
        }
    }
    __syncthreads();

    bool is_stopped = false;
    if (threadIdx.x < COUNT && threadIdx.x != rank) {
        release_at_peer(flag_of(mailboxes.of[threadIdx.x], rank), epoch);
        const u32* flag = flag_of(own, threadIdx.x);
        // Epochs wrap around; their distance is right all the same.
        for (u32 tries = 1; (i32)(acquire_from_peer(flag) - epoch) < 0; tries++) {
            is_stopped = tries % TRIES == 0 && read_from_host(stop) != 0;
            if (is_stopped) break;
        }
    }
    if (__syncthreads_or(is_stopped)) {
        if (threadIdx.x == 0) progress->has_left = 1;
        return;
    }

    for (u32 v = first + threadIdx.x; v < end; v += blockDim.x) {
        const float4 mine = load_four(x, v, n);
        float4 terms[COUNT];
#pragma unroll
        for (u32 from = 0; from < COUNT; from++) {
            terms[from] = from == rank ? mine : slot_of(own, rank, from, parity)[v - first];
        }
        float4 sum = terms[0];
#pragma unroll
        for (u32 from = 1; from < COUNT; from++) {
            const float4 term = terms[from];
            sum = {sum.x + term.x, sum.y + term.y, sum.z + term.z, sum.w + term.w};
        }
        store_four(y, v, n, sum);
    }
    if (threadIdx.x == 0) progress->epoch = epoch;
}
