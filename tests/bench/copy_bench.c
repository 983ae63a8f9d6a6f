/*
 * copy_bench - the host kind beside plain memcpy of the same blocks in the same run.
 *
 * Role        blocks of several sizes between two populated memfds, in a shuffled order. Rounds of
 *             the ways alternate, so that a busy machine slows all of them; the median is printed.
 * Use         bench_copy [thread_count] [rounds]
 */
#include "proto/base/check.h"
#include "proto/base/clock.h"

#include <kvist/copy.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MEMORY_BYTES (256UL << 20)
#define ROUNDS_MAX   101U

struct bench {
    unsigned char *tensor;
    unsigned char *slots;
    struct kvist_copy_range *ranges;
    size_t range_count;
    size_t range_bytes;
    unsigned thread_count;
};

static unsigned char *memory_map(void)
{
    int memfd = memfd_create("kvist-bench", MFD_CLOEXEC);
    if (memfd < 0 || ftruncate(memfd, (off_t)MEMORY_BYTES) != 0) {
        perror("memfd_create");
        exit(EXIT_FAILURE);
    }
    unsigned char *memory = mmap(NULL, MEMORY_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
    (void)close(memfd);
    if (memory == MAP_FAILED) {
        perror("mmap");
        exit(EXIT_FAILURE);
    }
    memset(memory, 1, MEMORY_BYTES);
    return memory;
}

static void plan_shuffle(struct bench *bench, size_t range_bytes)
{
    bench->range_bytes = range_bytes;
    bench->range_count = MEMORY_BYTES / range_bytes;
    size_t *order = malloc(bench->range_count * sizeof(*order));
    if (order == NULL) {
        exit(EXIT_FAILURE);
    }
    uint64_t seed = 88172645463325252ULL;
    for (size_t index = 0; index < bench->range_count; index++) {
        seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
        size_t other = (seed >> 33) % (index + 1);
        order[index] = order[other];
        order[other] = index;
    }
    for (size_t index = 0; index < bench->range_count; index++) {
        bench->ranges[index] = (struct kvist_copy_range){
            .block = order[index],
            .bytes = range_bytes,
            .slot = bench->slots + order[bench->range_count - 1 - index] * range_bytes,
        };
    }
    free(order);
}

/* One thread's share of the plan by memcpy. */
struct share {
    const struct bench *bench;
    size_t first;
    size_t end;
    pthread_t thread;
};

static void *share_copy(void *ctx)
{
    const struct share *share = ctx;
    const struct bench *bench = share->bench;
    for (size_t index = share->first; index < share->end; index++) {
        const struct kvist_copy_range *range = &bench->ranges[index];
        memcpy(range->slot, bench->tensor + range->block * range->bytes, range->bytes);
    }
    return NULL;
}

static uint64_t memcpy_run(const struct bench *bench)
{
    struct share shares[KVIST_COPY_THREADS_MAX];
    uint64_t start_ns = kvist_clock_now_ns();
    for (unsigned index = 0; index < bench->thread_count; index++) {
        shares[index] = (struct share){
            .bench = bench,
            .first = bench->range_count * index / bench->thread_count,
            .end = bench->range_count * (index + 1) / bench->thread_count,
        };
        if (pthread_create(&shares[index].thread, NULL, share_copy, &shares[index]) != 0) {
            exit(EXIT_FAILURE);
        }
    }
    for (unsigned index = 0; index < bench->thread_count; index++) {
        (void)pthread_join(shares[index].thread, NULL);
    }
    return kvist_clock_now_ns() - start_ns;
}

static uint64_t plan_run(const struct bench *bench, struct kvist_copy *copy)
{
    struct kvist_error err = KVIST_ERROR_INIT;
    struct kvist_copy_result result = {0};
    uint64_t start_ns = kvist_clock_now_ns();
    if (kvist_copy_submit(
            copy, 1, KVIST_COPY_STORE, bench->ranges, bench->range_count, NULL, &err) != KVIST_OK) {
        (void)fprintf(stderr, "submit: %s\n", err.text);
        exit(EXIT_FAILURE);
    }
    kvist_copy_wait(copy, 1);
    if (kvist_copy_poll(copy, &result, 1) != 1 || result.status != KVIST_OK) {
        exit(EXIT_FAILURE);
    }
    return kvist_clock_now_ns() - start_ns;
}

static int compare(const void *left, const void *right)
{
    uint64_t first = *(const uint64_t *)left;
    uint64_t second = *(const uint64_t *)right;
    return first < second ? -1 : first > second;
}

static double median_gigabytes(uint64_t *elapsed_ns, size_t count)
{
    qsort(elapsed_ns, count, sizeof(*elapsed_ns), compare);
    return (double)MEMORY_BYTES / (double)elapsed_ns[count / 2];
}

static void size_run(struct bench *bench, size_t range_bytes, size_t round_count)
{
    uint64_t plain_ns[ROUNDS_MAX];
    uint64_t plan_ns[ROUNDS_MAX];
    plan_shuffle(bench, range_bytes);
    struct kvist_copy_tensor tensor = {
        .base = bench->tensor,
        .block_count = bench->range_count,
        .block_stride_bytes = range_bytes,
        .page_bytes = range_bytes,
    };
    struct kvist_copy_options options = KVIST_COPY_OPTIONS_INIT;
    options.tensors = &tensor;
    options.tensor_count = 1;
    options.thread_count = bench->thread_count;
    struct kvist_copy *copy = NULL;
    struct kvist_error err = KVIST_ERROR_INIT;
    if (kvist_copy_create(&options, &copy, &err) != KVIST_OK) {
        (void)fprintf(stderr, "create: %s\n", err.text);
        exit(EXIT_FAILURE);
    }
    for (size_t round = 0; round < round_count; round++) {
        plain_ns[round] = memcpy_run(bench);
        plan_ns[round] = plan_run(bench, copy);
    }
    kvist_copy_destroy(&copy);
    double plain = median_gigabytes(plain_ns, round_count);
    double plan = median_gigabytes(plan_ns, round_count);
    (void)printf("range_kib=%zu threads=%u memcpy_gbps=%.2f host_gbps=%.2f ratio=%.2f\n",
                 range_bytes >> 10,
                 bench->thread_count,
                 plain,
                 plan,
                 plan / plain);
}

int main(int argc, char **argv)
{
    static const size_t sizes[] = {
        2UL << 10, 16UL << 10, 64UL << 10, 128UL << 10, 512UL << 10, 2UL << 20};
    unsigned long thread_count = argc > 1 ? strtoul(argv[1], NULL, 10) : 1;
    unsigned long round_count = argc > 2 ? strtoul(argv[2], NULL, 10) : 9;
    if (thread_count < 1 || thread_count > KVIST_COPY_THREADS_MAX || round_count < 1 ||
        round_count > ROUNDS_MAX) {
        (void)fprintf(stderr,
                      "usage: bench_copy [threads 1..%u] [rounds 1..%u]\n",
                      KVIST_COPY_THREADS_MAX,
                      ROUNDS_MAX);
        return EXIT_FAILURE;
    }
    struct bench bench = {
        .tensor = memory_map(),
        .slots = memory_map(),
        .ranges = calloc(MEMORY_BYTES / sizes[0], sizeof(*bench.ranges)),
        .thread_count = (unsigned)thread_count,
    };
    if (bench.ranges == NULL) {
        return EXIT_FAILURE;
    }
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(sizes); index++) {
        size_run(&bench, sizes[index], round_count);
    }
    free(bench.ranges);
    (void)munmap(bench.tensor, MEMORY_BYTES);
    (void)munmap(bench.slots, MEMORY_BYTES);
    return EXIT_SUCCESS;
}
