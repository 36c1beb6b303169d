// Writes the times of all kernels, copies and fills of a CUDA program to a file, as they overlap.
//
// A profiler that replays kernels runs them one after the other. This library only listens: the driver loads it into
// the program, and CUPTI reports when each kernel began and ended, also within graphs. It makes steps about 1% slower.
//
// gcc -shared -fPIC -I "$CUDA/include" trace.c -o trace.so "$CUDA/lib64/libcupti.so"
// TRACE_OUT=trace.tsv CUDA_INJECTION64_PATH=$PWD/trace.so keel bench ...
// python3 steps.py trace.tsv
//
// Columns: begin and end in ns, name, and the blocks of a kernel or the bytes of a copy or fill.
#include <cupti.h>
#include <stdio.h>
#include <stdlib.h>

static FILE *out;

static void write_line(uint64_t begin, uint64_t end, const char *name, uint64_t size) {
    fprintf(out, "%llu\t%llu\t%s\t%llu\n", (unsigned long long)begin, (unsigned long long)end, name, (unsigned long long)size);
}

static void CUPTIAPI give_buffer(uint8_t **buffer, size_t *size, size_t *records_max) {
    *size = 8 << 20;
    *buffer = aligned_alloc(16, *size);
    *records_max = 0;
}

static void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
    CUpti_Activity *record = NULL;
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
            const CUpti_ActivityKernel9 *kernel = (const CUpti_ActivityKernel9 *)record;
            write_line(kernel->start, kernel->end, kernel->name, (uint64_t)kernel->gridX * kernel->gridY * kernel->gridZ);
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
            const CUpti_ActivityMemcpy5 *copy = (const CUpti_ActivityMemcpy5 *)record;
            write_line(copy->start, copy->end, "copy", copy->bytes);
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
            const CUpti_ActivityMemset4 *fill = (const CUpti_ActivityMemset4 *)record;
            write_line(fill->start, fill->end, "fill", fill->bytes);
        }
    }
    free(buffer);
}

static void end(void) {
    cuptiActivityFlushAll(1);
    fflush(out);
}

// Called by the driver when it starts.
int InitializeInjection(void) {
    const char *path = getenv("TRACE_OUT");
    if (!path || !(out = fopen(path, "w"))) {
        fprintf(stderr, "trace: TRACE_OUT names no file that can be written\n");
        return 0;
    }
    cuptiActivityRegisterCallbacks(give_buffer, take_buffer);
    cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
    cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY);
    cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMSET);
    atexit(end);
    return 1;
}
