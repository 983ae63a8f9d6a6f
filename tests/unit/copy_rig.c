#include "tests/unit/copy_rig.h"

#include <stdio.h>
#include <time.h>

#define POLL_PAUSE_NS 50000L
#define FILL_PERIOD   65521UL

const struct rig_shape rig_shapes[TENSORS] = {
    {67, 8192, 8001}, {23, 131072 + 64, 131072}, {3, (2UL << 20) + 512, 2UL << 20}};

static const struct rig_config configs[] = {
    {"host, 1 thread", KVIST_COPY_HOST, 1},
    {"host, 3 threads", KVIST_COPY_HOST, 3},
    {"direct", KVIST_COPY_DIRECT, 0},
    {"staged", KVIST_COPY_STAGED, 0},
};

/* xorshift64*, seeded by the case. */
static uint64_t random_next(struct rig *rig)
{
    rig->random ^= rig->random >> 12;
    rig->random ^= rig->random << 25;
    rig->random ^= rig->random >> 27;
    return rig->random * 0x2545f4914f6cdd1dULL;
}

uint64_t rig_random_below(struct rig *rig, uint64_t bound)
{
    return random_next(rig) % bound;
}

/* Random bytes, repeated with a period that no size here is a multiple of. */
void rig_fill(struct rig *rig, unsigned char *memory, size_t bytes)
{
    size_t period = bytes < FILL_PERIOD ? bytes : FILL_PERIOD;
    for (size_t at = 0; at < period; at += sizeof(uint64_t)) {
        uint64_t value = random_next(rig);
        memcpy(memory + at, &value, period - at < sizeof(value) ? period - at : sizeof(value));
    }
    for (size_t at = period; at < bytes; at += period) {
        memcpy(memory + at, memory, bytes - at < period ? bytes - at : period);
    }
}

struct kvist_copy_options rig_options(const struct rig *rig)
{
    struct kvist_copy_options options = KVIST_COPY_OPTIONS_INIT;
    options.kind = rig->config->kind;
    options.thread_count = rig->config->thread_count;
    options.staging_bytes = KVIST_COPY_STAGING_BYTES_MIN;
    options.tensors = rig->tensors;
    options.tensor_count = TENSORS;
    return options;
}

static struct rig *rig_create(const struct rig_config *config)
{
    struct rig *rig = calloc(1, sizeof(*rig));
    KVIST_TEST_FATAL(rig != NULL);
    rig->config = config;
    rig->random = 0x9e3779b97f4a7c15ULL;
    for (size_t index = 0; index < TENSORS; index++) {
        rig->tensor_bytes[index] = rig_shapes[index].block_count * rig_shapes[index].stride;
        unsigned char *base = malloc(rig->tensor_bytes[index]);
        KVIST_TEST_FATAL(base != NULL);
        rig_fill(rig, base, rig->tensor_bytes[index]);
        rig->tensors[index] = (struct kvist_copy_tensor){
            .base = base,
            .block_count = rig_shapes[index].block_count,
            .block_stride_bytes = rig_shapes[index].stride,
            .page_bytes = rig_shapes[index].page,
        };
    }
    rig->slots = malloc(SLOTS_BYTES);
    KVIST_TEST_FATAL(rig->slots != NULL);
    rig_fill(rig, rig->slots, SLOTS_BYTES);
    if (config->kind != KVIST_COPY_HOST) {
        rig->stream = kvist_rt_stream_create();
        KVIST_TEST_FATAL(rig->stream != NULL);
    }
    struct kvist_copy_options options = rig_options(rig);
    struct kvist_error err = KVIST_ERROR_INIT;
    KVIST_TEST_STATUS(kvist_copy_create_with(&options, kvist_copy_runtime_host(), &rig->copy, &err),
                      KVIST_OK);
    KVIST_TEST_FATAL(rig->copy != NULL);
    kvist_copy_segment_add(rig->copy, rig->slots, REGISTERED_HALF);
    return rig;
}

static void rig_destroy(struct rig *rig)
{
    kvist_copy_destroy(&rig->copy);
    KVIST_TEST_TRUE(rig->copy == NULL);
    if (rig->stream != NULL) {
        kvist_rt_stream_destroy(rig->stream);
    }
    for (size_t index = 0; index < TENSORS; index++) {
        free(rig->tensors[index].base);
    }
    free(rig->slots);
    free(rig);
    KVIST_TEST_EQUAL(kvist_rt_live_count(), 0);
}

void rig_each(void (*body)(struct rig *rig))
{
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(configs); index++) {
        unsigned before = CU_get_number_of_failures();
        struct rig *rig = rig_create(&configs[index]);
        body(rig);
        rig_destroy(rig);
        if (CU_get_number_of_failures() != before) {
            (void)printf("  (%s) ", configs[index].name);
        }
    }
}

/* Whole blocks of one tensor, side by side in the slots from an offset on. */
void rig_plan_blocks(struct rig *rig, uint32_t tensor, size_t block_count, size_t slot_offset)
{
    for (size_t block = 0; block < block_count; block++) {
        rig->ranges[block] = (struct kvist_copy_range){
            .tensor = tensor,
            .block = block,
            .bytes = rig_shapes[tensor].page,
            .slot = rig->slots + slot_offset + block * rig_shapes[tensor].page,
        };
    }
    rig->range_count = block_count;
}

unsigned char *rig_tensor_at(const struct rig *rig, const struct kvist_copy_range *range)
{
    return (unsigned char *)rig->tensors[range->tensor].base +
           range->block * rig_shapes[range->tensor].stride + range->offset;
}

uint64_t rig_plan_bytes(const struct rig *rig)
{
    uint64_t bytes = 0;
    for (size_t index = 0; index < rig->range_count; index++) {
        bytes += rig->ranges[index].bytes;
    }
    return bytes;
}

enum kvist_status
rig_submit(struct rig *rig, uint64_t job, enum kvist_copy_direction direction, void *stream)
{
    struct kvist_error err = KVIST_ERROR_INIT;
    enum kvist_status status =
        kvist_copy_submit(rig->copy, job, direction, rig->ranges, rig->range_count, stream, &err);
    KVIST_TEST_TRUE(status == KVIST_OK || err.text[0] != '\0');
    return status;
}

void rig_pause(void)
{
    struct timespec pause = {.tv_nsec = POLL_PAUSE_NS};
    (void)nanosleep(&pause, NULL);
}

/* Poll until one job is reported. */
struct kvist_copy_result rig_poll_one(struct rig *rig)
{
    struct kvist_copy_result result = {0};
    while (kvist_copy_poll(rig->copy, &result, 1) == 0) {
        rig_pause();
    }
    return result;
}

void rig_expect_done(struct rig *rig, uint64_t job)
{
    kvist_copy_wait(rig->copy, job);
    struct kvist_copy_result result = {0};
    KVIST_TEST_EQUAL(kvist_copy_poll(rig->copy, &result, 1), 1);
    KVIST_TEST_EQUAL(result.job, job);
    KVIST_TEST_STATUS(result.status, KVIST_OK);
    KVIST_TEST_EQUAL(result.bytes, rig_plan_bytes(rig));
}

bool rig_plan_equal(const struct rig *rig)
{
    for (size_t index = 0; index < rig->range_count; index++) {
        const struct kvist_copy_range *range = &rig->ranges[index];
        if (memcmp(rig_tensor_at(rig, range), range->slot, range->bytes) != 0) {
            return false;
        }
    }
    return true;
}

bool rig_plan_holds(const struct rig *rig, unsigned char value, bool in_slots)
{
    for (size_t index = 0; index < rig->range_count; index++) {
        const struct kvist_copy_range *range = &rig->ranges[index];
        const unsigned char *bytes = in_slots ? range->slot : rig_tensor_at(rig, range);
        /* Equal to itself one byte on: all are equal to the first. */
        if (bytes[0] != value || memcmp(bytes, bytes + 1, range->bytes - 1) != 0) {
            return false;
        }
    }
    return true;
}
void rig_layer_starts(size_t starts[LAYERS + 1])
{
    for (size_t layer = 0; layer <= LAYERS; layer++) {
        starts[layer] = layer * LAYER_BLOCKS;
    }
}
struct kvist_copy_stats rig_stats(const struct rig *rig)
{
    struct kvist_copy_stats stats = {0};
    kvist_copy_stats_get(rig->copy, &stats);
    return stats;
}
