// All-reduce of small arrays of several GPUs: y[i] = ((x_0[i] + x_1[i]) + x_2[i]) + ..., in the order of ranks. So all
// GPUs get the same bits. Each GPU has a mailbox that its peers write ("one-shot all-reduce"):
//
//   mailbox   turns     [GROUPS] words: the parity of the thread's next sum, or LEFT
//             slots     [2 parities][COUNT - 1 peers][GROUPS] of 16 bytes, EMPTY where nothing has arrived
//
// Thread v adds group v, which is elements 4 v to 4 v + 3. It shares nothing with other threads, so each v is a
// protocol of its own. A thread takes part in the sums that are long enough for it, on all GPUs in the same ones. Its
// sum e:
//   1. It writes its group to the slots of parity e % 2 of all peers.
//   2. It reads its own slots of that parity until no word of them is EMPTY.
//   3. It adds the groups in the order of ranks, makes the slots EMPTY again, and turns the parity. Memory keeps the
//      parity, so a graph can hold the kernel.
//
// The data are the flag. EMPTY is the NaN whose bits are all ones. A word of x with these bits is sent as another NaN,
// and the bits of the sum stay: the hardware's additions give one and the same NaN for all NaNs. Each word tells by
// itself that it has arrived, so neither the order nor the size in which a peer's bytes come matters. There is no
// fence, no barrier and no second message.
//
// Two parities are enough. In its sum e + 2 a thread writes a slot that its peer has read, and made EMPTY, in sum e:
//   - It has ended its sum e + 1, so it has received the peer's group of sum e + 1.
//   - The peer has sent that in a later launch than the one with its sum e. A launch begins with a wait for the end of
//     those before, with all their reads and writes.
// So nothing is lost. And no old word is taken for a new one, because a slot is EMPTY from a sum's end to the next
// write.
// The argument needs nothing of other threads, nor of sums in which v takes no part.
//
// A peer may fail and never come. So a wait looks at `stop` from time to time, a word of the host's memory. A thread
// that stops has left: in later launches it does nothing, until the host has reset the mailboxes of all. It must not go
// on, because it does not know any more which slots its peers have read.
//
// Geometry: blocks of 128 threads, one for each group. Bytes: each GPU sends 4 n to each peer and receives as many. The
// floor is the latency of one write to a peer.
#include "common.cuh"

// By rank. Those of ranks from COUNT on are null.
struct Mailboxes {
    u8* of[8];
};
static_assert(sizeof(Mailboxes) == 64, "as parameters/lists.rs has it");

#define PEERS (COUNT - 1)
#define EMPTY 0xffffffffu
#define OTHER_NAN 0x7fffffffu
#define LEFT 2u
// Reads of the slots between two looks at `stop`, which take longer.
#define TRIES 256

// Where group v of the first peer lies in a mailbox. Those of the next peers follow at a distance of GROUPS.
__device__ inline uint4* slots_of(u8* mailbox, u32 parity, u32 v) {
    return (uint4*)(mailbox + GROUPS * sizeof(u32)) + parity * PEERS * GROUPS + v;
}

// Four words in one access. The others may see them one by one.
__device__ inline void write_slot(uint4* slot, uint4 words) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(slot), "r"(words.x), "r"(words.y),
                 "r"(words.z), "r"(words.w)
                 : "memory");
}
__device__ inline uint4 read_slot(const uint4* slot) {
    uint4 words;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(slot)
                 : "memory");
    return words;
}
__device__ inline u32 read_from_host(const u32* word) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ inline u32 word_of(float x) {
    const u32 bits = __float_as_uint(x);
    return bits == EMPTY ? OTHER_NAN : bits;
}
__device__ inline uint4 words_of(float4 x) { return {word_of(x.x), word_of(x.y), word_of(x.z), word_of(x.w)}; }
__device__ inline float4 floats_of(uint4 words) {
    return {__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z), __uint_as_float(words.w)};
}
__device__ inline bool has_arrived(uint4 words) {
    return (words.x != EMPTY) & (words.y != EMPTY) & (words.z != EMPTY) & (words.w != EMPTY);
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

extern "C" __global__ void __launch_bounds__(128) one_shot_all_reduce(
#include "one_shot_all_reduce.params"
) {
#if !SHARED_GPU
    // The next kernel's blocks fetch their weights while the arrays travel. On a GPU that several ranks share, they
    // could take the place of kernels that the peers have to run before they come.
    let_next_start();
#endif
    wait_for_inputs();
    const u32 v = blockIdx.x * blockDim.x + threadIdx.x;
    if (4 * v >= n) return;
    u32* turn = (u32*)mailboxes.of[rank] + v;
    const u32 parity = *turn;
    const float4 mine = load_four(x, v, n);
    if (parity == LEFT) return;

    // Each rank begins with another peer.
    const uint4 sent = words_of(mine);
#pragma unroll
    for (u32 hop = 1; hop < COUNT; hop++) {
        const u32 peer = (rank + hop) % COUNT;
        write_slot(slots_of(mailboxes.of[peer], parity, v) + (rank < peer ? rank : rank - 1) * GROUPS, sent);
    }

    uint4* slots = slots_of(mailboxes.of[rank], parity, v);
    uint4 received[PEERS];
    for (u32 tries = 1;; tries++) {
        bool have_arrived = true;
#pragma unroll
        for (u32 peer = 0; peer < PEERS; peer++) received[peer] = read_slot(slots + peer * GROUPS);
#pragma unroll
        for (u32 peer = 0; peer < PEERS; peer++) have_arrived &= has_arrived(received[peer]);
        if (have_arrived) break;
        if (tries % TRIES == 0 && read_from_host(stop) != 0) {
            *turn = LEFT;
            return;
        }
    }

    float4 sum = rank == 0 ? mine : floats_of(received[0]);
#pragma unroll
    for (u32 from = 1; from < COUNT; from++) {
        const float4 before = floats_of(received[from - 1]), after = floats_of(received[from < PEERS ? from : 0]);
        const float4 term = from == rank ? mine : from < rank ? after : before;
        sum = {sum.x + term.x, sum.y + term.y, sum.z + term.z, sum.w + term.w};
    }
    store_four(y, v, n, sum);
#pragma unroll
    for (u32 peer = 0; peer < PEERS; peer++) write_slot(slots + peer * GROUPS, {EMPTY, EMPTY, EMPTY, EMPTY});
    *turn = parity ^ 1;
}
