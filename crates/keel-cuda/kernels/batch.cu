// Checks the arrays that say which rows belong to which sequence, before other kernels trust them. One block of 256
// threads.
// A wrong batch is reported and emptied on the device: no sequence has rows, all have slot 0 and page 0. So later
// kernels touch only memory that is theirs. If a message has two numbers next to the wrong one, they share a word, 16
// bits each. Pointers that an operation does not have are null. No kernel starts before the check is done, so later
// kernels may read these arrays before they wait.
#include "common.cuh"

#define ROWS_WRONG 2
#define SLOT_MISSING 3
#define SLOT_TWICE 4
#define TABLE_SHORT 5
#define PAGE_MISSING 6
#define OFF_GRID 7
#define ACCEPTED_MISSING 8
#define LOG_SHORT 9
#define PAGE_TWICE 10
#define PAGE_SHARED 11
#define PAGE_OVERWRITTEN 12
#define PAGE 256
// Slot number of a padding sequence: it has no rows to run and none to commit.
#define NO_SLOT 0xffffffffu

// The pages that sequences write, in shared memory: each as one word, with the number of a sequence that writes it in
// the low half. It lies in the first place that was free, counted from its own number on.
#define PLACES 2048
#define FREE 0xffffffffffffffffull

__device__ inline void free_places(u64* written) {
    for (u32 i = threadIdx.x; i < PLACES; i += blockDim.x) written[i] = FREE;
}
// Enters that `sequence` writes `page`. Returns the word that the page has already, or FREE. There is a place for it,
// unless the rows of sequences overlap, which is reported in any case.
__device__ inline u64 enter(u64* written, u32 page, u32 sequence) {
#pragma unroll 1
    for (u32 i = 0; i < PLACES; ++i) {
        const u64 found = atomicCAS(&written[(page + i) % PLACES], FREE, (u64)page << 32 | sequence);
        if (found == FREE || found >> 32 == page) return found;
    }
    return FREE;
}
// Whether the first sequence that entered `page` is this one.
__device__ inline bool is_written_by(const volatile u64* written, u32 page, u32 sequence) {
#pragma unroll 1
    for (u32 i = 0; i < PLACES; ++i) {
        const u64 found = written[(page + i) % PLACES];
        if (found == FREE || found >> 32 == page) return found == ((u64)page << 32 | sequence);
    }
    return false;
}

extern "C" __global__ void check_batch(
#include "check_batch.params"
) {
    __shared__ u64 written[PLACES];
    if (table) free_places(written);
    wait_for_inputs();
    // If several threads find an error, the lowest one reports, so that the numbers belong together.
    __shared__ u32 reporter;
    u32 what = 0, number = 0, bound = 0;
    if (threadIdx.x == 0) reporter = ~0u;
    __syncthreads();
    // Threads of a group share the pages of a sequence: few sequences may have a thousand pages each.
    const u32 group = max(1u, min(32u, blockDim.x / max(1u, sequences))), lane = threadIdx.x % group;
    for (u32 b = threadIdx.x / group; b < sequences; b += blockDim.x / group) {
        const u32 first = row_start[b], end = row_start[b + 1];
        if ((b == 0 && first != 0) || first > end || end > rows) { what = ROWS_WRONG; number = end; bound = rows; continue; }
        if (slot) {
            const u32 mine = slot[b];
            if (mine == NO_SLOT && first == end && !(accepted && accepted[b])) continue;
            if (mine >= slots) { what = SLOT_MISSING; number = mine; bound = slots; continue; }
            for (u32 other = lane; other < b; other += group)
                if (slot[other] == mine) { what = SLOT_TWICE; number = mine; bound = other << 16 | b; }
        }
        if (accepted && accepted[b] > records) { what = ACCEPTED_MISSING; number = accepted[b]; bound = records << 16 | b; }
        if (keep_open && end - first > records) { what = LOG_SHORT; number = end - first; bound = records; }
        if (first == end) continue;
        const u32 start = position ? position[b] : 0;
        if (grid && start % grid != 0) { what = OFF_GRID; number = start; bound = grid; }
        if (!table) continue;
        const u64 stop = (u64)start + (end - first), used = (stop + PAGE - 1) / PAGE;
        const u64 seen = window && start + 1 > window ? (start + 1 - window) / PAGE : 0;
        if (used > table_width) { what = TABLE_SHORT; number = (u32)stop; bound = table_width; continue; }
        const u32 first_written = table[(u64)b * table_width + start / PAGE];
        for (u64 i = seen + lane; i < used; i += group) {
            const u32 page = table[(u64)b * table_width + i];
            if (page >= pages) { what = PAGE_MISSING; number = page; bound = pages; }
            // Without a window all earlier keys are seen. Later pages than the first one are looked at below.
            if (!window && page == first_written && i < start / PAGE) { what = PAGE_OVERWRITTEN; number = page; bound = b; }
        }
        // Pages that left a window may be reused for later positions, but not while rows of one run still see them: all
        // rows of a run are written before the first one attends. Runs end at multiples of `run`; if it is 0, all rows
        // are one run.
        for (u64 at = start, end_of_run; window && at < stop; at = end_of_run) {
            end_of_run = run ? min(stop, at - at % run + run) : stop;
            const u64 from = at + 1 > window ? (at + 1 - window) / PAGE : 0;
            for (u64 i = at / PAGE; i * PAGE < end_of_run; ++i)
                for (u64 j = from; j < i; ++j)
                    if (table[(u64)b * table_width + i] == table[(u64)b * table_width + j]) { what = PAGE_TWICE; number = (u32)(end_of_run - at); bound = window; }
        }
    }
    // Below, a thread has other sequences than above, whose tables it reads only if all are sound.
    const bool sound = !__syncthreads_or(what != 0);
    // One round, unless more pages are written than there are places. Then a round takes the pages of one remainder,
    // which have places in any case.
    const u32 rounds = rows / PAGE + 2 * sequences <= PLACES ? 1 : (pages + PLACES - 1) / PLACES;
    for (u32 round = 0; sound && table && round < rounds; ++round) {
        if (round > 0) {
            __syncthreads();
            free_places(written);
            __syncthreads();
        }
        for (u32 b = threadIdx.x; b < sequences && what == 0; b += blockDim.x) {
            const u32 count = row_start[b + 1] - row_start[b], start = position ? position[b] : 0;
            if (count == 0) continue;
            const u32* own = table + (u64)b * table_width;
            const u32 begin = start / PAGE, used = (u32)(((u64)start + count + PAGE - 1) / PAGE);
            for (u32 i = begin; i < used; ++i) {
                const u32 page = own[i];
                if (rounds > 1 && page % rounds != round) continue;
                const u64 before = enter(written, page, b);
                if (before == FREE) continue;
                const u32 other = (u32)before;
                if (other == b && window) continue; // a later run may come back to a page
                number = page;
                what = other == b ? PAGE_OVERWRITTEN : PAGE_SHARED;
                bound = other == b ? b : min(b, other) << 16 | max(b, other);
            }
            for (u32 i = 0; !window && begin + 1 < used && i < begin; ++i)
                if (is_written_by(written, own[i], b)) { what = PAGE_OVERWRITTEN; number = own[i]; bound = b; }
        }
    }
    if (what != 0) atomicMin(&reporter, threadIdx.x);
    __syncthreads();
    if (reporter == ~0u) return;
    if (threadIdx.x == reporter) report(fault, kernel, what, number, bound);
    for (u32 b = threadIdx.x; b <= sequences; b += blockDim.x) row_start[b] = 0;
    for (u32 b = threadIdx.x; b < sequences; b += blockDim.x) {
        if (slot) slot[b] = 0;
        if (position) position[b] = 0;
        if (accepted) accepted[b] = 0;
        for (u32 i = 0; table && i < table_width; ++i) table[(u64)b * table_width + i] = 0;
    }
    __threadfence();
}
