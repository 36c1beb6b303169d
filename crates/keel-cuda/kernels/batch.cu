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
#define PAGE 256
// Slot number of a padding sequence: it has no rows to run and none to commit.
#define NO_SLOT 0xffffffffu

extern "C" __global__ void check_batch(
#include "check_batch.params"
) {
    wait_for_inputs();
    // If several threads find an error, the lowest one reports, so that the numbers belong together.
    __shared__ u32 reporter;
    u32 what = 0, number = 0, bound = 0;
    if (threadIdx.x == 0) reporter = ~0u;
    __syncthreads();
    for (u32 b = threadIdx.x; b < sequences; b += blockDim.x) {
        const u32 first = row_start[b], end = row_start[b + 1];
        if ((b == 0 && first != 0) || first > end || end > rows) { what = ROWS_WRONG; number = end; bound = rows; continue; }
        if (slot) {
            const u32 mine = slot[b];
            if (mine == NO_SLOT && first == end && !(accepted && accepted[b])) continue;
            if (mine >= slots) { what = SLOT_MISSING; number = mine; bound = slots; continue; }
            for (u32 other = 0; other < b; ++other)
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
        for (u64 i = seen; i < used; ++i)
            if (table[(u64)b * table_width + i] >= pages) { what = PAGE_MISSING; number = table[(u64)b * table_width + i]; bound = pages; }
        // Pages that left a window may be reused for later positions, but not while rows of one run still see them: all
        // rows of a run are written before the first one attends.
        for (u64 at = start; window && at < stop; at += run) {
            const u64 end_of_run = min(stop, at + run), from = at + 1 > window ? (at + 1 - window) / PAGE : 0;
            for (u64 i = at / PAGE; i * PAGE < end_of_run; ++i)
                for (u64 j = from; j < i; ++j)
                    if (table[(u64)b * table_width + i] == table[(u64)b * table_width + j]) { what = PAGE_TWICE; number = (u32)(end_of_run - at); bound = window; }
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
