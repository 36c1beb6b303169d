// Memory read bandwidth: THREADS threads sum 1 GiB of their own together, PASSES times.
//
//     gcc -O3 -march=native -pthread bandwidth.c -o bandwidth && ./bandwidth THREADS PASSES
//
// Prints GB/s (10^9 bytes) of each pass, one a line. A pass ends when the slowest thread has ended: decoding waits for
// the slowest too. The buffer is far larger than any last-level cache, and every page is touched before the first pass.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { LANES = 64, STREAMS_MAX = 64 };  // 64 lanes: eight 512-bit accumulators, enough to hide the latency of an add
static const size_t TOTAL_BYTES = 1UL << 30;

static int threads, passes;
static pthread_barrier_t barrier;
static volatile uint64_t sink;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint64_t sum(const uint64_t *words, size_t count) {
    uint64_t lanes[LANES] = {0}, total = 0;
    for (size_t i = 0; i + LANES <= count; i += LANES)
        for (int j = 0; j < LANES; j++) lanes[j] += words[i + j];
    for (int j = 0; j < LANES; j++) total += lanes[j];
    return total;
}

static void *reader(void *first) {
    size_t bytes = TOTAL_BYTES / (size_t)threads;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    madvise(memory, bytes, MADV_HUGEPAGE);
    memset(memory, 1, bytes);
    for (int pass = 0; pass < passes; pass++) {
        pthread_barrier_wait(&barrier);
        double start = now_s();
        sink = sum(memory, bytes / sizeof(uint64_t));
        pthread_barrier_wait(&barrier);
        if (first) printf("%.2f\n", 1e-9 * (double)(bytes * (size_t)threads) / (now_s() - start));
    }
    return NULL;
}

int main(int argc, char **argv) {
    threads = argc == 3 ? atoi(argv[1]) : 0;
    passes = argc == 3 ? atoi(argv[2]) : 0;
    if (threads < 1 || threads > STREAMS_MAX || passes < 1) {
        fprintf(stderr, "usage: bandwidth THREADS PASSES, with 1 to %d threads\n", STREAMS_MAX);
        return 2;
    }
    pthread_t others[STREAMS_MAX];
    pthread_barrier_init(&barrier, NULL, (unsigned)threads);
    for (int i = 1; i < threads; i++)
        if (pthread_create(&others[i], NULL, reader, NULL) != 0) return 1;
    reader(&threads);
    for (int i = 1; i < threads; i++) pthread_join(others[i], NULL);
    return 0;
}
