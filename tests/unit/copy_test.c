/*
 * copy: the same cases for every way of copying.
 */
#include "proto/base/fault.h"
#include "tests/unit/copy_rig.h"

#include <pthread.h>

/* Disjoint ranges of odd sizes at odd places, some in registered memory, some not. */
static void plan_random(struct rig *rig)
{
    size_t slot = rig_random_below(rig, 1UL << 20);
    rig->range_count = 0;
    for (uint32_t tensor = 0; tensor < TENSORS; tensor++) {
        for (uint64_t block = 0; block < rig_shapes[tensor].block_count; block++) {
            uint64_t offset = rig_random_below(rig, rig_shapes[tensor].page);
            uint64_t bytes = 1 + rig_random_below(rig, rig_shapes[tensor].page - offset);
            if (rig_random_below(rig, 3) == 0 || slot + bytes > SLOTS_BYTES) {
                continue;
            }
            rig->ranges[rig->range_count++] = (struct kvist_copy_range){
                .tensor = tensor,
                .block = block,
                .offset = offset,
                .bytes = bytes,
                .slot = rig->slots + slot,
            };
            slot += bytes + rig_random_below(rig, 100);
        }
    }
}

/* --- Kernels ------------------------------------------------------------------------------------
 */

/* Holds a stream until it is opened, then writes a byte over a plan's tensor blocks. */
struct producer {
    struct rig *rig;
    atomic_bool open;
    unsigned char value;
};

static void produce(void *ctx)
{
    struct producer *producer = ctx;
    while (!atomic_load(&producer->open)) {
        rig_pause();
    }
    for (size_t index = 0; index < producer->rig->range_count; index++) {
        const struct kvist_copy_range *range = &producer->rig->ranges[index];
        memset(rig_tensor_at(producer->rig, range), producer->value, range->bytes);
    }
}

/* --- Cases --------------------------------------------------------------------------------------
 */

static void expect_refused(const struct kvist_copy_options *options, enum kvist_status expected)
{
    struct kvist_copy *copy = NULL;
    struct kvist_error err = KVIST_ERROR_INIT;
    KVIST_TEST_STATUS(kvist_copy_create_with(options, kvist_copy_runtime_host(), &copy, &err),
                      expected);
    KVIST_TEST_TRUE(copy == NULL);
    KVIST_TEST_TRUE(err.text[0] != '\0');
}

static void create_refuses(struct rig *rig)
{
    struct kvist_copy_options options = rig_options(rig);
    options.struct_bytes = 8;
    expect_refused(&options, KVIST_INVALID);
    options = rig_options(rig);
    options.tensor_count = 0;
    expect_refused(&options, KVIST_INVALID);
    options.tensor_count = KVIST_COPY_TENSORS_MAX + 1;
    expect_refused(&options, KVIST_INVALID);
    options = rig_options(rig);
    options.thread_count = KVIST_COPY_THREADS_MAX + 1;
    expect_refused(&options, KVIST_INVALID);
    options = rig_options(rig);
    options.staging_bytes = 1;
    expect_refused(&options, KVIST_INVALID);
    options = rig_options(rig);
    options.kind = (enum kvist_copy_kind)3;
    expect_refused(&options, KVIST_INVALID);
    options = rig_options(rig);
    options.device = 1;
    if (options.kind != KVIST_COPY_HOST) {
        expect_refused(&options, KVIST_UNSUPPORTED);
    }
}

static void create_refuses_tensors(struct rig *rig)
{
    const struct kvist_copy_tensor good = rig->tensors[0];
    const struct kvist_copy_tensor bad[] = {
        {NULL, good.block_count, good.block_stride_bytes, good.page_bytes},
        {good.base, 0, good.block_stride_bytes, good.page_bytes},
        {good.base, good.block_count, good.block_stride_bytes, 0},
        {good.base, good.block_count, good.page_bytes - 1, good.page_bytes},
        {good.base, UINT64_MAX / 2, good.block_stride_bytes, good.page_bytes},
        {good.base, UINTPTR_MAX / 8192, good.block_stride_bytes, good.page_bytes},
    };
    struct kvist_copy_options options = rig_options(rig);
    options.tensor_count = 1;
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(bad); index++) {
        options.tensors = &bad[index];
        expect_refused(&options, KVIST_INVALID);
    }
}

static void expect_random_plan(struct rig *rig, uint64_t job, unsigned char *expected)
{
    plan_random(rig);
    bool store = rig_random_below(rig, 2) == 0;
    if (store) {
        memcpy(expected, rig->slots, SLOTS_BYTES);
        for (size_t index = 0; index < rig->range_count; index++) {
            const struct kvist_copy_range *range = &rig->ranges[index];
            memcpy(expected + ((unsigned char *)range->slot - rig->slots),
                   rig_tensor_at(rig, range),
                   range->bytes);
        }
        KVIST_TEST_STATUS(rig_submit(rig, job, KVIST_COPY_STORE, rig->stream), KVIST_OK);
        rig_expect_done(rig, job);
        KVIST_TEST_TRUE(memcmp(rig->slots, expected, SLOTS_BYTES) == 0);
        return;
    }
    uint64_t bytes = rig->tensor_bytes[2]; /* the largest: what lies between ranges stays */
    memcpy(expected, rig->tensors[2].base, bytes);
    for (size_t index = 0; index < rig->range_count; index++) {
        const struct kvist_copy_range *range = &rig->ranges[index];
        if (range->tensor == 2) {
            size_t at = range->block * rig_shapes[2].stride + range->offset;
            memcpy(expected + at, range->slot, range->bytes);
        }
    }
    KVIST_TEST_STATUS(rig_submit(rig, job, KVIST_COPY_LOAD, rig->stream), KVIST_OK);
    rig_expect_done(rig, job);
    KVIST_TEST_TRUE(memcmp(rig->tensors[2].base, expected, bytes) == 0);
    KVIST_TEST_TRUE(rig_plan_equal(rig));
}

static void plans_equal_memcpy(struct rig *rig)
{
    unsigned char *expected = malloc(SLOTS_BYTES);
    KVIST_TEST_FATAL(expected != NULL);
    for (uint64_t job = 0; job < 24; job++) {
        expect_random_plan(rig, job, expected);
    }
    free(expected);
}

static void ranges_outside_are_refused(struct rig *rig)
{
    rig_plan_blocks(rig, 0, 4, 0);
    const struct kvist_copy_range good = rig->ranges[3];
    unsigned char *before = malloc(SLOTS_BYTES);
    KVIST_TEST_FATAL(before != NULL);
    memcpy(before, rig->slots, SLOTS_BYTES);
    struct kvist_copy_range bad[8] = {good, good, good, good, good, good, good, good};
    bad[0].tensor = TENSORS;
    bad[1].block = rig_shapes[0].block_count;
    bad[2].block = UINT64_MAX;
    bad[3].offset = 1;
    bad[4].offset = UINT64_MAX;
    bad[5].bytes = rig_shapes[0].page + 1;
    bad[6].bytes = 0;
    bad[7].slot = NULL;
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(bad); index++) {
        rig->ranges[3] = bad[index];
        KVIST_TEST_STATUS(rig_submit(rig, 1, KVIST_COPY_STORE, rig->stream), KVIST_INVALID);
    }
    rig->ranges[3] = good;
    rig->range_count = KVIST_COPY_RANGES_MAX + 1UL;
    KVIST_TEST_STATUS(rig_submit(rig, 1, KVIST_COPY_STORE, rig->stream), KVIST_INVALID);
    struct kvist_copy_result result;
    KVIST_TEST_EQUAL(kvist_copy_poll(rig->copy, &result, 1), 0);
    KVIST_TEST_TRUE(memcmp(before, rig->slots, SLOTS_BYTES) == 0);
    free(before);
}

static void layers_outside_are_refused(struct rig *rig)
{
    rig_plan_blocks(rig, 0, 4, 0);
    const size_t late[] = {1, 4};
    const size_t crossed[] = {0, 3, 2, 4};
    KVIST_TEST_STATUS(kvist_copy_submit_layers(
                          rig->copy, 1, KVIST_COPY_LOAD, rig->ranges, late, 1, rig->stream, NULL),
                      KVIST_INVALID);
    KVIST_TEST_STATUS(
        kvist_copy_submit_layers(
            rig->copy, 1, KVIST_COPY_LOAD, rig->ranges, crossed, 3, rig->stream, NULL),
        KVIST_INVALID);
    KVIST_TEST_STATUS(kvist_copy_submit_layers(
                          rig->copy, 1, KVIST_COPY_LOAD, rig->ranges, late, 0, rig->stream, NULL),
                      KVIST_INVALID);
    KVIST_TEST_STATUS(kvist_copy_layer_wait(rig->copy, 1, 0, rig->stream, NULL), KVIST_NOT_FOUND);
}

static void empty_plans_end(struct rig *rig)
{
    rig->range_count = 0;
    KVIST_TEST_STATUS(rig_submit(rig, 5, KVIST_COPY_LOAD, rig->stream), KVIST_OK);
    KVIST_TEST_STATUS(kvist_copy_layer_wait(rig->copy, 5, 0, rig->stream, NULL), KVIST_OK);
    rig_expect_done(rig, 5);
    KVIST_TEST_STATUS(rig_submit(rig, 5, KVIST_COPY_STORE, NULL), KVIST_OK);
    rig_expect_done(rig, 5);
}

static void jobs_are_bounded_and_reported_once(struct rig *rig)
{
    rig_plan_blocks(rig, 0, 1, 0);
    const unsigned char *slots = rig->slots;
    for (uint64_t job = 0; job < KVIST_COPY_JOBS_MAX; job++) {
        rig->ranges[0].slot = rig->slots + job * rig_shapes[0].page;
        KVIST_TEST_STATUS(rig_submit(rig, job, KVIST_COPY_STORE, rig->stream), KVIST_OK);
    }
    KVIST_TEST_STATUS(rig_submit(rig, 7, KVIST_COPY_STORE, rig->stream), KVIST_EXISTS);
    KVIST_TEST_STATUS(rig_submit(rig, UINT64_MAX, KVIST_COPY_STORE, rig->stream), KVIST_BUSY);
    kvist_copy_wait(rig->copy, UINT64_MAX);
    bool seen[KVIST_COPY_JOBS_MAX] = {false};
    for (size_t left = KVIST_COPY_JOBS_MAX; left > 0;) {
        struct kvist_copy_result results[100];
        size_t count = kvist_copy_poll(rig->copy, results, 100);
        KVIST_TEST_FATAL(count <= 100);
        for (size_t index = 0; index < count; index++) {
            KVIST_TEST_STATUS(results[index].status, KVIST_OK);
            KVIST_TEST_FATAL(results[index].job < KVIST_COPY_JOBS_MAX);
            KVIST_TEST_TRUE(!seen[results[index].job]);
            seen[results[index].job] = true;
        }
        left -= count;
    }
    for (uint64_t job = 0; job < KVIST_COPY_JOBS_MAX; job++) {
        KVIST_TEST_TRUE(memcmp(slots + job * rig_shapes[0].page,
                               rig->tensors[0].base,
                               rig_shapes[0].page) == 0);
    }
    struct kvist_copy_stats stats = {0};
    kvist_copy_stats_get(rig->copy, &stats);
    KVIST_TEST_EQUAL(stats.jobs_done, KVIST_COPY_JOBS_MAX);
    KVIST_TEST_STATUS(rig_submit(rig, 7, KVIST_COPY_STORE, rig->stream), KVIST_OK);
    rig_expect_done(rig, 7);
}

static void destroy_waits_for_jobs(struct rig *rig)
{
    const size_t job_bytes = rig_shapes[0].block_count * rig_shapes[0].page;
    for (uint64_t job = 0; job < 16; job++) {
        rig_plan_blocks(rig, 0, rig_shapes[0].block_count, job * job_bytes);
        KVIST_TEST_STATUS(rig_submit(rig, job, KVIST_COPY_STORE, rig->stream), KVIST_OK);
    }
    kvist_copy_destroy(&rig->copy);
    for (uint64_t job = 0; job < 16; job++) {
        rig_plan_blocks(rig, 0, rig_shapes[0].block_count, job * job_bytes);
        KVIST_TEST_TRUE(rig_plan_equal(rig));
    }
}

static void source_is_free_once_reported(struct rig *rig)
{
    for (unsigned round = 0; round < 20; round++) {
        rig_plan_blocks(rig, 1, 20, REGISTERED_HALF - 10 * rig_shapes[1].page);
        memset(rig->tensors[1].base, (int)round, rig->tensor_bytes[1]);
        KVIST_TEST_STATUS(rig_submit(rig, round, KVIST_COPY_STORE, rig->stream), KVIST_OK);
        KVIST_TEST_STATUS(rig_poll_one(rig).status, KVIST_OK);
        memset(rig->tensors[1].base, 0xee, rig->tensor_bytes[1]);
        KVIST_TEST_TRUE(rig_plan_holds(rig, (unsigned char)round, true));
        /* And back: once the load is reported, the slots may be used again. */
        KVIST_TEST_STATUS(rig_submit(rig, round, KVIST_COPY_LOAD, rig->stream), KVIST_OK);
        KVIST_TEST_STATUS(rig_poll_one(rig).status, KVIST_OK);
        memset(rig->slots, 0xdd, SLOTS_BYTES);
        KVIST_TEST_TRUE(rig_plan_holds(rig, (unsigned char)round, false));
    }
}

static void copies_follow_the_stream(struct rig *rig)
{
    if (rig->stream == NULL) {
        return; /* host: the caller's tensors are ready */
    }
    for (size_t half = 0; half < 2; half++) {
        rig_plan_blocks(rig, 1, 20, half * REGISTERED_HALF);
        memset(rig->slots, 0x11, SLOTS_BYTES);
        struct producer producer = {.rig = rig, .value = 0x77};
        KVIST_TEST_STATUS(kvist_rt_stream_launch(rig->stream, produce, &producer), KVIST_OK);
        KVIST_TEST_STATUS(rig_submit(rig, 1, KVIST_COPY_STORE, rig->stream), KVIST_OK);
        struct kvist_copy_result result;
        for (unsigned round = 0; round < 50; round++) {
            KVIST_TEST_EQUAL(kvist_copy_poll(rig->copy, &result, 1), 0);
            rig_pause();
        }
        atomic_store(&producer.open, true);
        rig_expect_done(rig, 1);
        KVIST_TEST_TRUE(rig_plan_holds(rig, 0x77, true));

        /* A load overwrites what the stream was still writing, not the other way round. */
        memset(rig->slots, 0x22, SLOTS_BYTES);
        struct producer late = {.rig = rig, .value = 0x99};
        KVIST_TEST_STATUS(kvist_rt_stream_launch(rig->stream, produce, &late), KVIST_OK);
        KVIST_TEST_STATUS(rig_submit(rig, 2, KVIST_COPY_LOAD, rig->stream), KVIST_OK);
        KVIST_TEST_EQUAL(kvist_copy_poll(rig->copy, &result, 1), 0);
        atomic_store(&late.open, true);
        rig_expect_done(rig, 2);
        KVIST_TEST_TRUE(rig_plan_holds(rig, 0x22, false));
    }
}

/* A store that waits for a kernel holds up no load. */
static void directions_are_independent(struct rig *rig)
{
    if (rig->stream == NULL) {
        return;
    }
    rig_plan_blocks(rig, 1, 20, REGISTERED_HALF);
    struct producer producer = {.rig = rig, .value = 0x55};
    KVIST_TEST_STATUS(kvist_rt_stream_launch(rig->stream, produce, &producer), KVIST_OK);
    KVIST_TEST_STATUS(rig_submit(rig, 1, KVIST_COPY_STORE, rig->stream), KVIST_OK);
    struct kvist_copy_range range = {
        .tensor = 2, .bytes = rig_shapes[2].page, .slot = rig->slots + 3};
    KVIST_TEST_STATUS(kvist_copy_submit(rig->copy, 2, KVIST_COPY_LOAD, &range, 1, NULL, NULL),
                      KVIST_OK);
    KVIST_TEST_EQUAL(rig_poll_one(rig).job, 2);
    KVIST_TEST_TRUE(memcmp(rig->tensors[2].base, rig->slots + 3, rig_shapes[2].page) == 0);
    atomic_store(&producer.open, true);
    rig_expect_done(rig, 1);
}

/* --- Layers -------------------------------------------------------------------------------------
 */

struct consumer {
    const struct rig *rig;
    size_t layer;
    bool fine;
};

static bool layer_equal(const struct rig *rig, size_t layer)
{
    for (size_t index = layer * LAYER_BLOCKS; index < (layer + 1) * LAYER_BLOCKS; index++) {
        const struct kvist_copy_range *range = &rig->ranges[index];
        if (memcmp(rig_tensor_at(rig, range), range->slot, range->bytes) != 0) {
            return false;
        }
    }
    return true;
}

static void consume(void *ctx)
{
    struct consumer *consumer = ctx;
    consumer->fine = layer_equal(consumer->rig, consumer->layer);
}

static void layers_load_in_order(struct rig *rig)
{
    size_t starts[LAYERS + 1];
    rig_layer_starts(starts);
    for (size_t round = 0; round < 6; round++) {
        rig_plan_blocks(rig, 1, LAYERS * LAYER_BLOCKS, round % 3 * (REGISTERED_HALF / 2));
        rig_fill(rig, rig->slots, SLOTS_BYTES);
        KVIST_TEST_STATUS(
            kvist_copy_submit_layers(
                rig->copy, round, KVIST_COPY_LOAD, rig->ranges, starts, LAYERS, rig->stream, NULL),
            KVIST_OK);
        struct consumer consumers[LAYERS];
        for (size_t layer = 0; layer < LAYERS; layer++) {
            KVIST_TEST_STATUS(kvist_copy_layer_wait(rig->copy, round, layer, rig->stream, NULL),
                              KVIST_OK);
            consumers[layer] = (struct consumer){.rig = rig, .layer = layer};
            if (rig->stream != NULL) {
                KVIST_TEST_STATUS(kvist_rt_stream_launch(rig->stream, consume, &consumers[layer]),
                                  KVIST_OK);
            } else {
                consume(&consumers[layer]);
            }
        }
        KVIST_TEST_STATUS(kvist_copy_layer_wait(rig->copy, round, LAYERS, rig->stream, NULL),
                          KVIST_INVALID);
        if (rig->stream != NULL) {
            kvist_rt_stream_synchronize(rig->stream);
        }
        for (size_t layer = 0; layer < LAYERS; layer++) {
            KVIST_TEST_TRUE(consumers[layer].fine);
        }
        rig_expect_done(rig, round);
    }
}

/* What is put on the stream after the wait may overwrite what was stored. */
static void layers_store_before_overwriting(struct rig *rig)
{
    size_t starts[LAYERS + 1];
    rig_layer_starts(starts);
    rig_plan_blocks(rig, 1, LAYERS * LAYER_BLOCKS, REGISTERED_HALF - 5 * rig_shapes[1].page);
    memset(rig->tensors[1].base, 0x3c, rig->tensor_bytes[1]);
    KVIST_TEST_STATUS(
        kvist_copy_submit_layers(
            rig->copy, 1, KVIST_COPY_STORE, rig->ranges, starts, LAYERS, rig->stream, NULL),
        KVIST_OK);
    struct producer producer = {.rig = rig, .open = true, .value = 0x7e};
    for (size_t layer = 0; layer < LAYERS; layer++) {
        KVIST_TEST_STATUS(kvist_copy_layer_wait(rig->copy, 1, layer, rig->stream, NULL), KVIST_OK);
    }
    if (rig->stream != NULL) {
        KVIST_TEST_STATUS(kvist_rt_stream_launch(rig->stream, produce, &producer), KVIST_OK);
        kvist_rt_stream_synchronize(rig->stream);
    } else {
        produce(&producer);
    }
    rig_expect_done(rig, 1);
    KVIST_TEST_TRUE(rig_plan_holds(rig, 0x3c, true));
    KVIST_TEST_TRUE(rig_plan_holds(rig, 0x7e, false));
}

/* --- Segments -----------------------------------------------------------------------------------
 */

static void each_range_goes_its_way(struct rig *rig)
{
    rig_plan_blocks(rig, 1, 20, REGISTERED_HALF - 10 * rig_shapes[1].page - rig_shapes[1].page / 2);
    KVIST_TEST_STATUS(rig_submit(rig, 1, KVIST_COPY_STORE, rig->stream), KVIST_OK);
    rig_expect_done(rig, 1);
    KVIST_TEST_TRUE(rig_plan_equal(rig));
    struct kvist_copy_stats stats = rig_stats(rig);
    bool direct = rig->config->kind == KVIST_COPY_DIRECT;
    bool host = rig->config->kind == KVIST_COPY_HOST;
    KVIST_TEST_EQUAL(stats.host_bytes, host ? 20 * rig_shapes[1].page : 0);
    /* The block that lies half in the segment is staged too. */
    KVIST_TEST_EQUAL(stats.direct_bytes, direct ? 10 * rig_shapes[1].page : 0);
    KVIST_TEST_EQUAL(stats.staged_bytes, (host ? 0 : direct ? 10 : 20) * rig_shapes[1].page);
    KVIST_TEST_EQUAL(stats.segments_registered, direct ? 1 : 0);

    kvist_copy_segment_remove(rig->copy, rig->slots, REGISTERED_HALF);
    KVIST_TEST_STATUS(rig_submit(rig, 2, KVIST_COPY_LOAD, rig->stream), KVIST_OK);
    rig_expect_done(rig, 2);
    KVIST_TEST_EQUAL(rig_stats(rig).direct_bytes, stats.direct_bytes);
    KVIST_TEST_EQUAL(rig_stats(rig).segments_registered, 0);
    kvist_copy_segment_remove(rig->copy, rig->slots, REGISTERED_HALF);
    KVIST_TEST_EQUAL(rig_stats(rig).segments_registered, 0);
}

static void refused_segments_are_staged(struct rig *rig)
{
    kvist_fault_arm("copy.register", 1, false);
    kvist_copy_segment_add(rig->copy, rig->slots + REGISTERED_HALF, REGISTERED_HALF);
    (void)kvist_fault_disarm();
    bool direct = rig->config->kind == KVIST_COPY_DIRECT;
    KVIST_TEST_EQUAL(rig_stats(rig).segments_refused, direct ? 1 : 0);
    rig_plan_blocks(rig, 1, 20, REGISTERED_HALF);
    KVIST_TEST_STATUS(rig_submit(rig, 1, KVIST_COPY_STORE, rig->stream), KVIST_OK);
    rig_expect_done(rig, 1);
    KVIST_TEST_TRUE(rig_plan_equal(rig));
    KVIST_TEST_EQUAL(rig_stats(rig).direct_bytes, 0);
    /* Overlapping a segment that is known: refused, and the known one stays. */
    kvist_copy_segment_add(rig->copy, rig->slots + 4096, REGISTERED_HALF);
    KVIST_TEST_EQUAL(rig_stats(rig).segments_refused, direct ? 2 : 0);
    KVIST_TEST_EQUAL(rig_stats(rig).segments_registered, direct ? 1 : 0);
}

struct pump {
    struct rig *rig;
    atomic_bool stop;
};

static void *pump_run(void *ctx)
{
    struct pump *pump = ctx;
    while (!atomic_load(&pump->stop)) {
        unsigned char *base = pump->rig->slots + REGISTERED_HALF;
        kvist_copy_segment_add(pump->rig->copy, base + (1UL << 20), 1UL << 20);
        kvist_copy_segment_add(pump->rig->copy, base + (3UL << 20), 1UL << 20);
        kvist_copy_segment_remove(pump->rig->copy, base + (1UL << 20), 1UL << 20);
        kvist_copy_segment_remove(pump->rig->copy, base + (3UL << 20), 1UL << 20);
        (void)rig_stats(pump->rig);
    }
    return NULL;
}

static void segments_come_and_go_beside_jobs(struct rig *rig)
{
    struct pump pump = {.rig = rig};
    pthread_t thread;
    KVIST_TEST_FATAL(pthread_create(&thread, NULL, pump_run, &pump) == 0);
    for (uint64_t job = 0; job < 50; job++) {
        /* The last million bytes of each half: no job uses a segment that goes. */
        rig_plan_blocks(rig, 0, 60, job % 2 == 0 ? 0 : REGISTERED_HALF + (5UL << 20));
        KVIST_TEST_STATUS(rig_submit(rig, job, KVIST_COPY_STORE, rig->stream), KVIST_OK);
        rig_expect_done(rig, job);
        KVIST_TEST_TRUE(rig_plan_equal(rig));
    }
    atomic_store(&pump.stop, true);
    (void)pthread_join(thread, NULL);
}

/* --- Table --------------------------------------------------------------------------------------
 */

#define EACH_CASE(X)                                                                               \
    X(create_refuses)                                                                              \
    X(create_refuses_tensors)                                                                      \
    X(plans_equal_memcpy)                                                                          \
    X(ranges_outside_are_refused)                                                                  \
    X(layers_outside_are_refused)                                                                  \
    X(empty_plans_end)                                                                             \
    X(jobs_are_bounded_and_reported_once)                                                          \
    X(destroy_waits_for_jobs)                                                                      \
    X(source_is_free_once_reported)                                                                \
    X(copies_follow_the_stream)                                                                    \
    X(directions_are_independent)                                                                  \
    X(layers_load_in_order)                                                                        \
    X(layers_store_before_overwriting)                                                             \
    X(each_range_goes_its_way)                                                                     \
    X(refused_segments_are_staged)                                                                 \
    X(segments_come_and_go_beside_jobs)
#define CASE_RUN(body)                                                                             \
    static void body##_run(void)                                                                   \
    {                                                                                              \
        rig_each(body);                                                                            \
    }
EACH_CASE(CASE_RUN)

/* Without a GPU the device kinds say so, whether CUDA was built in or not. */
static void machines_without_a_gpu_are_told(void)
{
    KVIST_TEST_TRUE(kvist_copy_available(KVIST_COPY_HOST, 0));
    KVIST_TEST_TRUE(!kvist_copy_available(KVIST_COPY_DIRECT, -1));
    KVIST_TEST_TRUE(!kvist_copy_available((enum kvist_copy_kind)7, 0));
    struct kvist_copy_tensor tensor = {
        .base = &tensor, .block_count = 1, .block_stride_bytes = 8, .page_bytes = 8};
    struct kvist_copy_options options = KVIST_COPY_OPTIONS_INIT;
    options.tensors = &tensor;
    options.tensor_count = 1;
    options.device = 1000;
    for (unsigned kind = KVIST_COPY_DIRECT; kind <= KVIST_COPY_STAGED; kind++) {
        options.kind = (enum kvist_copy_kind)kind;
        struct kvist_copy *copy = NULL;
        struct kvist_error err = KVIST_ERROR_INIT;
        KVIST_TEST_STATUS(kvist_copy_create(&options, &copy, &err), KVIST_UNSUPPORTED);
        KVIST_TEST_TRUE(copy == NULL);
        KVIST_TEST_TRUE(err.text[0] != '\0');
    }
    struct kvist_copy *none = NULL;
    kvist_copy_destroy(&none);
    kvist_copy_destroy(NULL);
    kvist_copy_wait(NULL, 1);
    kvist_copy_segment_add(NULL, &tensor, 8);
}

/* Every length and misalignment around the sizes at which the copy loop changes. */
static void bytes_are_copied_at_any_alignment(void)
{
    enum { ROOM = 3 * 16384 + 512 };
    unsigned char *source = malloc(ROOM);
    unsigned char *target = malloc(ROOM);
    KVIST_TEST_FATAL(source != NULL && target != NULL);
    for (size_t at = 0; at < ROOM; at++) {
        source[at] = (unsigned char)(at * 131U >> 3);
    }
    static const size_t sizes[] = {
        0, 1, 63, 4096, 16383, 16384, 16447, 16448, 16449, 32767, 32832, 49152};
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(sizes); index++) {
        for (size_t shift = 0; shift < 130; shift += 13) {
            memset(target, 0xa5, ROOM);
            kvist_copy_bytes(target + 64 + shift, source + 129 - shift, sizes[index]);
            KVIST_TEST_TRUE(memcmp(target + 64 + shift, source + 129 - shift, sizes[index]) == 0);
            KVIST_TEST_EQUAL(target[63 + shift], 0xa5);
            KVIST_TEST_EQUAL(target[64 + shift + sizes[index]], 0xa5);
        }
    }
    free(source);
    free(target);
}

int main(void)
{
#define CASE_ROW(body) {#body, body##_run},
    static const struct kvist_unit_case cases[] = {
        EACH_CASE(CASE_ROW){"machines without a gpu are told", machines_without_a_gpu_are_told},
        {"bytes are copied at any alignment", bytes_are_copied_at_any_alignment},
    };
    return kvist_unit_main("copy", cases, KVIST_ARRAY_COUNT(cases), NULL, NULL);
}
