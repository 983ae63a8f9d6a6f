/*
 * gpu_copy: direct and staged copies on a real device. Exits with 77 where there is none.
 *
 * Role        byte equality, order after the caller's stream, layers, the caller's device; then
 *             bandwidth beside plain pinned cudaMemcpyAsync of the same bytes in the same run
 */
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "tests/support/unit.h"

#include <kvist/copy.h>

#include <cuda_runtime_api.h>

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define EXIT_SKIPPED  77
#define BLOCKS        96U
#define STRIDE        (2UL << 20)
#define TENSOR_BYTES  (BLOCKS * STRIDE)
#define SEGMENT_BYTES (256UL << 20)
#define RANGES_MAX    (TENSOR_BYTES / 16384U)
#define LAYERS        8U
#define ROUNDS        5U
#define GATE_NS       30000000L

static const enum kvist_copy_kind kinds[] = {KVIST_COPY_DIRECT, KVIST_COPY_STAGED};

/* One for all cases: registering and allocating is what takes the time. */
static struct {
    unsigned char *tensor;  /* device */
    unsigned char *segment; /* a mapped memfd, as a client has it */
    unsigned char *shadow;  /* host copy of the tensor */
    unsigned char *pinned;  /* for the comparison */
    cudaStream_t stream;
    struct kvist_copy *copy;
    struct kvist_copy_range *ranges; /* [RANGES_MAX] */
    size_t range_count;
} gpu;

static void cuda_ok(cudaError_t error)
{
    if (error != cudaSuccess) {
        (void)fprintf(stderr, "cuda: %s\n", cudaGetErrorString(error));
    }
    KVIST_TEST_FATAL(error == cudaSuccess);
}

static void fill(unsigned char *memory, size_t bytes, uint64_t seed)
{
    for (size_t at = 0; at < bytes; at += sizeof(seed)) {
        seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
        memcpy(memory + at, &seed, sizeof(seed));
    }
}

static void tensor_fill(uint64_t seed)
{
    fill(gpu.shadow, TENSOR_BYTES, seed);
    cuda_ok(cudaMemcpy(gpu.tensor, gpu.shadow, TENSOR_BYTES, cudaMemcpyHostToDevice));
    cuda_ok(cudaDeviceSynchronize());
}

static void tensor_read(void)
{
    cuda_ok(cudaMemcpy(gpu.shadow, gpu.tensor, TENSOR_BYTES, cudaMemcpyDeviceToHost));
}

static void gpu_open(void)
{
    int memfd = memfd_create("kvist-gpu-test", MFD_CLOEXEC);
    KVIST_TEST_FATAL(memfd >= 0 && ftruncate(memfd, (off_t)SEGMENT_BYTES) == 0);
    gpu.segment = mmap(NULL, SEGMENT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
    KVIST_TEST_FATAL(gpu.segment != MAP_FAILED);
    (void)close(memfd);
    memset(gpu.segment, 0, SEGMENT_BYTES);
    gpu.shadow = malloc(TENSOR_BYTES);
    gpu.ranges = calloc(RANGES_MAX, sizeof(*gpu.ranges));
    KVIST_TEST_FATAL(gpu.shadow != NULL && gpu.ranges != NULL);
    cuda_ok(cudaMalloc((void **)&gpu.tensor, TENSOR_BYTES));
    cuda_ok(cudaMallocHost((void **)&gpu.pinned, TENSOR_BYTES));
    cuda_ok(cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking));
}

static void gpu_close(void)
{
    cuda_ok(cudaStreamDestroy(gpu.stream));
    cuda_ok(cudaFreeHost(gpu.pinned));
    cuda_ok(cudaFree(gpu.tensor));
    (void)munmap(gpu.segment, SEGMENT_BYTES);
    free(gpu.ranges);
    free(gpu.shadow);
}

static void copy_open(enum kvist_copy_kind kind)
{
    struct kvist_copy_tensor tensor = {.base = gpu.tensor,
                                       .block_count = BLOCKS,
                                       .block_stride_bytes = STRIDE,
                                       .page_bytes = STRIDE};
    struct kvist_copy_options options = KVIST_COPY_OPTIONS_INIT;
    options.kind = kind;
    options.tensors = &tensor;
    options.tensor_count = 1;
    struct kvist_error err = KVIST_ERROR_INIT;
    if (kvist_copy_create(&options, &gpu.copy, &err) != KVIST_OK) {
        (void)fprintf(stderr, "create: %s\n", err.text);
    }
    KVIST_TEST_FATAL(gpu.copy != NULL);
    kvist_copy_segment_add(gpu.copy, gpu.segment, SEGMENT_BYTES);
}

static struct kvist_copy_stats copy_stats(void)
{
    struct kvist_copy_stats stats = {0};
    kvist_copy_stats_get(gpu.copy, &stats);
    return stats;
}

static void each(void (*body)(enum kvist_copy_kind kind))
{
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(kinds); index++) {
        copy_open(kinds[index]);
        body(kinds[index]);
        kvist_copy_destroy(&gpu.copy);
        cuda_ok(cudaGetLastError());
    }
}

/* The whole tensor in ranges of one size, the slots from a shift on. */
static void plan_even(size_t range_bytes, size_t shift)
{
    gpu.range_count = TENSOR_BYTES / range_bytes;
    for (size_t index = 0; index < gpu.range_count; index++) {
        size_t at = index * range_bytes;
        gpu.ranges[index] = (struct kvist_copy_range){
            .block = at / STRIDE,
            .offset = at % STRIDE,
            .bytes = range_bytes,
            .slot = gpu.segment + shift + at,
        };
    }
}

/* Odd sizes at odd places. */
static void plan_odd(void)
{
    uint64_t seed = 88172645463325252ULL;
    size_t slot = 1;
    gpu.range_count = 0;
    for (uint64_t block = 0; block < BLOCKS; block++) {
        for (uint64_t part = 0; part < 8; part++) {
            seed = seed * 6364136223846793005ULL + 1442695040888963407ULL;
            uint64_t room = STRIDE / 8;
            uint64_t offset = (seed >> 20) % room;
            uint64_t bytes = 1 + (seed >> 40) % (room - offset);
            gpu.ranges[gpu.range_count++] = (struct kvist_copy_range){
                .block = block,
                .offset = part * room + offset,
                .bytes = bytes,
                .slot = gpu.segment + slot,
            };
            slot += bytes + 3;
        }
    }
}

static void submit(uint64_t job, enum kvist_copy_direction direction)
{
    struct kvist_error err = KVIST_ERROR_INIT;
    KVIST_TEST_STATUS(
        kvist_copy_submit(gpu.copy, job, direction, gpu.ranges, gpu.range_count, gpu.stream, &err),
        KVIST_OK);
}

static void expect_done(uint64_t job)
{
    kvist_copy_wait(gpu.copy, job);
    struct kvist_copy_result result = {0};
    KVIST_TEST_EQUAL(kvist_copy_poll(gpu.copy, &result, 1), 1);
    KVIST_TEST_EQUAL(result.job, job);
    KVIST_TEST_STATUS(result.status, KVIST_OK);
}

static bool plan_equal(void)
{
    for (size_t index = 0; index < gpu.range_count; index++) {
        const struct kvist_copy_range *range = &gpu.ranges[index];
        if (memcmp(gpu.shadow + range->block * STRIDE + range->offset, range->slot, range->bytes) !=
            0) {
            return false;
        }
    }
    return true;
}

static void bytes_arrive(enum kvist_copy_kind kind)
{
    plan_odd();
    tensor_fill(7 + (uint64_t)kind);
    submit(1, KVIST_COPY_STORE);
    expect_done(1);
    KVIST_TEST_TRUE(plan_equal());

    fill(gpu.segment, SEGMENT_BYTES, 99 + (uint64_t)kind);
    submit(2, KVIST_COPY_LOAD);
    expect_done(2);
    tensor_read();
    KVIST_TEST_TRUE(plan_equal());

    struct kvist_copy_stats stats = copy_stats();
    bool direct = kind == KVIST_COPY_DIRECT && stats.segments_registered == 1;
    KVIST_TEST_EQUAL(stats.direct_bytes == 0, !direct);
    KVIST_TEST_EQUAL(stats.staged_bytes == 0, direct);
    (void)printf("registered=%llu refused=%llu ",
                 (unsigned long long)stats.segments_registered,
                 (unsigned long long)stats.segments_refused);
}

static void unregistered_memory_is_staged(enum kvist_copy_kind kind)
{
    kvist_copy_segment_remove(gpu.copy, gpu.segment, SEGMENT_BYTES);
    plan_even(STRIDE / 2, 0);
    tensor_fill(21 + (uint64_t)kind);
    submit(1, KVIST_COPY_STORE);
    expect_done(1);
    KVIST_TEST_TRUE(plan_equal());
    KVIST_TEST_EQUAL(copy_stats().direct_bytes, 0);
    KVIST_TEST_EQUAL(copy_stats().staged_bytes, TENSOR_BYTES);
}

/* Holds the stream, as a long kernel does. */
static void CUDART_CB gate(void *ctx)
{
    struct timespec pause = {.tv_nsec = GATE_NS};
    (void)nanosleep(&pause, NULL);
    atomic_store((atomic_bool *)ctx, true);
}

static void copies_follow_the_stream(enum kvist_copy_kind kind)
{
    (void)kind;
    atomic_bool passed = false;
    plan_even(STRIDE, 0);
    tensor_fill(5);
    memset(gpu.segment, 0, SEGMENT_BYTES);
    cuda_ok(cudaLaunchHostFunc(gpu.stream, gate, &passed));
    cuda_ok(cudaMemsetAsync(gpu.tensor, 0x6b, TENSOR_BYTES, gpu.stream));
    submit(1, KVIST_COPY_STORE);
    struct kvist_copy_result result;
    size_t reported = kvist_copy_poll(gpu.copy, &result, 1);
    KVIST_TEST_TRUE(reported == 0 || atomic_load(&passed));
    expect_done(1);
    KVIST_TEST_TRUE(atomic_load(&passed));
    memset(gpu.shadow, 0x6b, TENSOR_BYTES);
    KVIST_TEST_TRUE(plan_equal());

    passed = false;
    fill(gpu.segment, SEGMENT_BYTES, 6);
    cuda_ok(cudaLaunchHostFunc(gpu.stream, gate, &passed));
    cuda_ok(cudaMemsetAsync(gpu.tensor, 0x11, TENSOR_BYTES, gpu.stream));
    submit(2, KVIST_COPY_LOAD);
    expect_done(2);
    tensor_read();
    KVIST_TEST_TRUE(plan_equal());
}

/* What follows the wait on the stream sees the layer: each is copied on, device to host. */
static void layers_load_in_order(enum kvist_copy_kind kind)
{
    (void)kind;
    size_t starts[LAYERS + 1];
    plan_even(STRIDE, 0);
    fill(gpu.segment, SEGMENT_BYTES, 17);
    cuda_ok(cudaMemset(gpu.tensor, 0, TENSOR_BYTES));
    cuda_ok(cudaDeviceSynchronize());
    for (size_t layer = 0; layer <= LAYERS; layer++) {
        starts[layer] = layer * (BLOCKS / LAYERS);
    }
    KVIST_TEST_STATUS(
        kvist_copy_submit_layers(
            gpu.copy, 1, KVIST_COPY_LOAD, gpu.ranges, starts, LAYERS, gpu.stream, NULL),
        KVIST_OK);
    size_t layer_bytes = TENSOR_BYTES / LAYERS;
    for (size_t layer = 0; layer < LAYERS; layer++) {
        KVIST_TEST_STATUS(kvist_copy_layer_wait(gpu.copy, 1, layer, gpu.stream, NULL), KVIST_OK);
        cuda_ok(cudaMemcpyAsync(gpu.pinned + layer * layer_bytes,
                                gpu.tensor + layer * layer_bytes,
                                layer_bytes,
                                cudaMemcpyDeviceToHost,
                                gpu.stream));
    }
    cuda_ok(cudaStreamSynchronize(gpu.stream));
    KVIST_TEST_TRUE(memcmp(gpu.pinned, gpu.segment, TENSOR_BYTES) == 0);
    expect_done(1);
}

/* --- Bandwidth ----------------------------------------------------------------------------------
 */

static double gigabytes_per_second(uint64_t elapsed_us)
{
    return elapsed_us == 0 ? 0.0 : (double)TENSOR_BYTES / (double)elapsed_us / 1e3;
}

static double plain_bandwidth(enum kvist_copy_direction direction)
{
    uint64_t best_us = UINT64_MAX;
    for (unsigned round = 0; round < ROUNDS; round++) {
        uint64_t start_us = kvist_clock_now_us();
        cuda_ok(
            direction == KVIST_COPY_STORE
                ? cudaMemcpyAsync(
                      gpu.pinned, gpu.tensor, TENSOR_BYTES, cudaMemcpyDeviceToHost, gpu.stream)
                : cudaMemcpyAsync(
                      gpu.tensor, gpu.pinned, TENSOR_BYTES, cudaMemcpyHostToDevice, gpu.stream));
        cuda_ok(cudaStreamSynchronize(gpu.stream));
        uint64_t elapsed_us = kvist_clock_now_us() - start_us;
        best_us = elapsed_us < best_us ? elapsed_us : best_us;
    }
    return gigabytes_per_second(best_us);
}

static double plan_bandwidth(enum kvist_copy_direction direction)
{
    uint64_t best_us = UINT64_MAX;
    for (unsigned round = 0; round < ROUNDS; round++) {
        uint64_t start_us = kvist_clock_now_us();
        submit(round, direction);
        expect_done(round);
        uint64_t elapsed_us = kvist_clock_now_us() - start_us;
        best_us = elapsed_us < best_us ? elapsed_us : best_us;
    }
    return gigabytes_per_second(best_us);
}

static void bandwidth(enum kvist_copy_kind kind)
{
    static const size_t sizes[] = {16UL << 10, 128UL << 10, 512UL << 10, 2UL << 20};
    static const char *const names[] = {"store", "load"};
    for (unsigned direction = KVIST_COPY_STORE; direction <= KVIST_COPY_LOAD; direction++) {
        double plain = plain_bandwidth((enum kvist_copy_direction)direction);
        for (size_t index = 0; index < KVIST_ARRAY_COUNT(sizes); index++) {
            plan_even(sizes[index], 0);
            double plan = plan_bandwidth((enum kvist_copy_direction)direction);
            KVIST_TEST_TRUE(plan > 0);
            (void)printf("\n    %s %-5s %4zu KiB ranges: %6.2f GB/s, plain pinned copy %6.2f, "
                         "ratio %.2f",
                         kind == KVIST_COPY_DIRECT ? "direct" : "staged",
                         names[direction],
                         sizes[index] >> 10,
                         plan,
                         plain,
                         plan / plain);
        }
    }
    (void)printf(" ");
}

/* --- Table --------------------------------------------------------------------------------------
 */

#define EACH_CASE(X)                                                                               \
    X(bytes_arrive)                                                                                \
    X(unregistered_memory_is_staged)                                                               \
    X(copies_follow_the_stream)                                                                    \
    X(layers_load_in_order)                                                                        \
    X(bandwidth)

#define CASE_RUN(body)                                                                             \
    static void body##_run(void)                                                                   \
    {                                                                                              \
        each(body);                                                                                \
    }
EACH_CASE(CASE_RUN)

/* A caller on another device stays there, and gets no context there from us. */
static void the_callers_device_stays(void)
{
    int count = 0;
    cuda_ok(cudaGetDeviceCount(&count));
    cuda_ok(cudaSetDevice(count - 1));
    copy_open(KVIST_COPY_DIRECT);
    plan_even(STRIDE, 0);
    tensor_fill(3);
    KVIST_TEST_STATUS(
        kvist_copy_submit(
            gpu.copy, 1, KVIST_COPY_STORE, gpu.ranges, gpu.range_count, gpu.stream, NULL),
        KVIST_OK);
    expect_done(1);
    kvist_copy_destroy(&gpu.copy);
    int current = -1;
    cuda_ok(cudaGetDevice(&current));
    KVIST_TEST_EQUAL(current, count - 1);
    KVIST_TEST_TRUE(plan_equal());
    cuda_ok(cudaSetDevice(0));
}

int main(void)
{
    if (!kvist_copy_available(KVIST_COPY_STAGED, 0)) {
        (void)printf("no CUDA device: skipped\n");
        return EXIT_SKIPPED;
    }
    cuda_ok(cudaSetDevice(0));
#define CASE_ROW(body) {#body, body##_run},
    static const struct kvist_unit_case cases[] = {
        EACH_CASE(CASE_ROW){"the caller's device stays", the_callers_device_stays},
    };
    gpu_open();
    int result = kvist_unit_main("gpu_copy", cases, KVIST_ARRAY_COUNT(cases), NULL, NULL);
    gpu_close();
    return result;
}
