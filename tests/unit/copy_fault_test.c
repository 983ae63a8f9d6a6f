/*
 * copy: what happens when the device fails.
 */
#include "proto/base/fault.h"

#define BLOCKS        (LAYERS * LAYER_BLOCKS) /* more bytes than the staging ring has */
#define DIRECT_BLOCKS 5U /* of them, in registered memory: one layer has some of either kind */
#define SMALL_JOBS    8U
#include "tests/unit/copy_rig.h"

/* A job that is reported as done has copied every byte. */
static void expect_honest(struct rig *rig, uint64_t job, size_t slot_offset)
{
    struct kvist_copy_result result = rig_poll_one(rig);
    KVIST_TEST_EQUAL(result.job, job);
    KVIST_TEST_TRUE(result.status == KVIST_OK || result.status == KVIST_SYSTEM);
    if (result.status == KVIST_OK) {
        rig_plan_blocks(rig, 1, BLOCKS, slot_offset);
        KVIST_TEST_TRUE(rig_plan_equal(rig));
    }
}

static bool submit_layers(struct rig *rig, uint64_t job, enum kvist_copy_direction direction)
{
    size_t starts[LAYERS + 1];
    rig_layer_starts(starts);
    enum kvist_status status = kvist_copy_submit_layers(
        rig->copy, job, direction, rig->ranges, starts, LAYERS, rig->stream, NULL);
    KVIST_TEST_TRUE(status == KVIST_OK || status == KVIST_SYSTEM);
    return status == KVIST_OK;
}

/* A load, then two stores at a time, while a pass through some fault point fails. */
static void faulted_round(struct rig *rig)
{
    const size_t bytes = BLOCKS * rig_shapes[1].page;
    const size_t offsets[] = {REGISTERED_HALF - DIRECT_BLOCKS * rig_shapes[1].page,
                              REGISTERED_HALF - DIRECT_BLOCKS * rig_shapes[1].page,
                              SLOTS_BYTES - bytes};
    memset(rig->slots + offsets[0], 0x21, bytes);
    memset(rig->tensors[1].base, 0x43, rig->tensor_bytes[1]);
    rig_plan_blocks(rig, 1, BLOCKS, offsets[0]);
    if (submit_layers(rig, 0, KVIST_COPY_LOAD)) {
        kvist_copy_wait(rig->copy, 0);
        expect_honest(rig, 0, offsets[0]);
    }
    memset(rig->tensors[1].base, 0x65, rig->tensor_bytes[1]);
    bool submitted[3] = {false};
    for (uint64_t job = 1; job < 3; job++) {
        rig_plan_blocks(rig, 1, BLOCKS, offsets[job]);
        submitted[job] = submit_layers(rig, job, KVIST_COPY_STORE);
    }
    for (uint64_t job = 1; job < 3; job++) {
        if (submitted[job]) {
            kvist_copy_wait(rig->copy, job);
            expect_honest(rig, job, offsets[job]);
        }
    }
}

/* The object works again, and nothing of the failed jobs moves any more. */
static void expect_works(struct rig *rig, unsigned char value)
{
    memset(rig->slots + REGISTERED_HALF - DIRECT_BLOCKS * rig_shapes[1].page,
           0x87,
           BLOCKS * rig_shapes[1].page);
    memset(rig->tensors[1].base, 0xa9, rig->tensor_bytes[1]);
    memset(rig->tensors[0].base, value, rig->tensor_bytes[0]);
    rig_plan_blocks(rig, 0, 60, 0);
    KVIST_TEST_STATUS(rig_submit(rig, 9, KVIST_COPY_STORE, rig->stream), KVIST_OK);
    rig_expect_done(rig, 9);
    KVIST_TEST_TRUE(rig_plan_holds(rig, value, true));
    memset(rig->tensors[0].base, 0, rig->tensor_bytes[0]);
    KVIST_TEST_STATUS(rig_submit(rig, 9, KVIST_COPY_LOAD, rig->stream), KVIST_OK);
    rig_expect_done(rig, 9);
    KVIST_TEST_TRUE(rig_plan_holds(rig, value, false));
    rig_plan_blocks(rig, 1, BLOCKS, REGISTERED_HALF - DIRECT_BLOCKS * rig_shapes[1].page);
    KVIST_TEST_TRUE(rig_plan_holds(rig, 0x87, true));
    KVIST_TEST_TRUE(rig_plan_holds(rig, 0xa9, false));
}

static void failures_fail_the_job_alone(struct rig *rig)
{
    if (rig->config->kind == KVIST_COPY_HOST) {
        return; /* memcpy does not fail */
    }
    uint64_t nth = 0;
    uint64_t passes = 0;
    do {
        uint64_t failed_before = rig_stats(rig).jobs_failed;
        nth++;
        kvist_fault_arm(NULL, nth, false);
        faulted_round(rig);
        passes = kvist_fault_disarm();
        KVIST_TEST_TRUE(rig_stats(rig).jobs_failed - failed_before <= 3);
        expect_works(rig, (unsigned char)nth);
    } while (nth < passes);
    KVIST_TEST_TRUE(nth > 50);
    KVIST_TEST_TRUE(rig_stats(rig).jobs_failed > 20);
}

/* Several jobs fail at a time while failures are waited for and cleared. */
static void many_failures_are_reported(struct rig *rig)
{
    if (rig->config->kind == KVIST_COPY_HOST) {
        return;
    }
    const size_t job_bytes = BLOCKS * rig_shapes[0].page;
    for (uint64_t round = 0; round < 150; round++) {
        memset(rig->slots, 0x21, SMALL_JOBS * job_bytes);
        kvist_fault_arm("rt.copy", 1 + rig_random_below(rig, SMALL_JOBS * BLOCKS), round % 2 == 0);
        bool submitted[SMALL_JOBS];
        for (uint64_t job = 0; job < SMALL_JOBS; job++) {
            rig_plan_blocks(rig, 0, BLOCKS, job * job_bytes);
            submitted[job] = submit_layers(rig, job, KVIST_COPY_STORE);
        }
        for (uint64_t job = 0; job < SMALL_JOBS; job++) {
            KVIST_TEST_TRUE(submitted[job]);
            struct kvist_copy_result result = rig_poll_one(rig);
            if (result.status == KVIST_OK) {
                rig_plan_blocks(rig, 0, BLOCKS, result.job * job_bytes);
                KVIST_TEST_TRUE(rig_plan_equal(rig));
            }
        }
        (void)kvist_fault_disarm();
    }
}

static void named_failures_are_reported(struct rig *rig)
{
    static const char *const points[] = {
        "copy.batch", "copy.stream_wait", "copy.layer_record", "copy.event_query", "rt.copy"};
    if (rig->config->kind == KVIST_COPY_HOST) {
        return;
    }
    rig_plan_blocks(rig, 1, 20, 0);
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(points); index++) {
        kvist_fault_arm(points[index], 1, false);
        KVIST_TEST_STATUS(rig_submit(rig, 1, KVIST_COPY_LOAD, rig->stream), KVIST_OK);
        KVIST_TEST_STATUS(rig_poll_one(rig).status, KVIST_SYSTEM);
        (void)kvist_fault_disarm();
    }
    kvist_fault_arm("copy.begin_record", 1, false);
    KVIST_TEST_STATUS(rig_submit(rig, 1, KVIST_COPY_LOAD, rig->stream), KVIST_SYSTEM);
    (void)kvist_fault_disarm();
    kvist_fault_arm("copy.batch", 1, false);
    KVIST_TEST_STATUS(rig_submit(rig, 1, KVIST_COPY_LOAD, rig->stream), KVIST_OK);
    KVIST_TEST_STATUS(kvist_copy_layer_wait(rig->copy, 1, 0, rig->stream, NULL), KVIST_SYSTEM);
    KVIST_TEST_STATUS(rig_poll_one(rig).status, KVIST_SYSTEM);
    (void)kvist_fault_disarm();
    KVIST_TEST_EQUAL(rig_stats(rig).jobs_failed, KVIST_ARRAY_COUNT(points) + 1);
}

static void create_fails_without_a_trace(struct rig *rig)
{
    struct kvist_copy_options options = rig_options(rig);
    size_t live = kvist_rt_live_count();
    uint64_t nth = 0;
    uint64_t passes = 0;
    do {
        nth++;
        struct kvist_copy *copy = NULL;
        kvist_fault_arm(NULL, nth, false);
        enum kvist_status status =
            kvist_copy_create_with(&options, kvist_copy_runtime_host(), &copy, NULL);
        passes = kvist_fault_disarm();
        KVIST_TEST_TRUE((status == KVIST_OK) == (copy != NULL));
        KVIST_TEST_TRUE(status == KVIST_OK || nth <= passes);
        kvist_copy_destroy(&copy);
        KVIST_TEST_EQUAL(kvist_rt_live_count(), live);
    } while (nth < passes);
}

static void failures_fail_the_job_alone_run(void)
{
    rig_each(failures_fail_the_job_alone);
}

static void many_failures_are_reported_run(void)
{
    rig_each(many_failures_are_reported);
}

static void named_failures_are_reported_run(void)
{
    rig_each(named_failures_are_reported);
}

static void create_fails_without_a_trace_run(void)
{
    rig_each(create_fails_without_a_trace);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"failures fail the job alone", failures_fail_the_job_alone_run},
        {"many failures are reported", many_failures_are_reported_run},
        {"named failures are reported", named_failures_are_reported_run},
        {"create fails without a trace", create_fails_without_a_trace_run},
    };
    return kvist_unit_main("copy_fault", cases, KVIST_ARRAY_COUNT(cases), NULL, NULL);
}
