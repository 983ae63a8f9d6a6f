/*
 * copy_rig - tensors, slots and a copy object to try plans on, for each way of copying.
 *
 * Role        the device ways run on the host runtime, whose streams and events behave as a GPU's
 */
#ifndef KVIST_TESTS_COPY_RIG_H
#define KVIST_TESTS_COPY_RIG_H

#include "cuda/copy_internal.h"
#include "cuda/rt_host.h"
#include "proto/base/check.h"
#include "tests/support/unit.h"

#include <kvist/copy.h>

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define TENSORS         3U
#define SLOTS_BYTES     (12UL << 20)
#define REGISTERED_HALF (SLOTS_BYTES / 2)
#define RANGES_MAX      256U
#define LAYERS          4U
#define LAYER_BLOCKS    3U

struct rig_shape {
    uint64_t block_count;
    uint64_t stride;
    uint64_t page;
};

extern const struct rig_shape rig_shapes[TENSORS];

struct rig_config {
    const char *name;
    enum kvist_copy_kind kind;
    uint32_t thread_count;
};

struct rig {
    const struct rig_config *config;
    struct kvist_copy *copy;
    struct kvist_copy_tensor tensors[TENSORS];
    uint64_t tensor_bytes[TENSORS];
    unsigned char *slots; /* the lower half is a registered segment */
    void *stream;         /* the engine's; NULL for host */
    uint64_t random;
    struct kvist_copy_range ranges[RANGES_MAX];
    size_t range_count;
};

/** Run a case on a fresh rig of each kind; everything must have been given back after it. */
void rig_each(void (*body)(struct rig *rig));

uint64_t rig_random_below(struct rig *rig, uint64_t bound);
void rig_fill(struct rig *rig, unsigned char *memory, size_t bytes);
struct kvist_copy_options rig_options(const struct rig *rig);
struct kvist_copy_stats rig_stats(const struct rig *rig);

/** Plan: whole blocks of one tensor, side by side in the slots from an offset on. */
void rig_plan_blocks(struct rig *rig, uint32_t tensor, size_t block_count, size_t slot_offset);

/** Starts of LAYERS layers of LAYER_BLOCKS ranges. */
void rig_layer_starts(size_t starts[LAYERS + 1]);

uint64_t rig_plan_bytes(const struct rig *rig);
unsigned char *rig_tensor_at(const struct rig *rig, const struct kvist_copy_range *range);

/** Whether slots and tensor blocks of the plan are equal. */
bool rig_plan_equal(const struct rig *rig);

/** Whether all slots, or tensor blocks, of the plan are full of one byte. */
bool rig_plan_holds(const struct rig *rig, unsigned char value, bool in_slots);

/** Submit the plan; a refusal must have a text. */
enum kvist_status
rig_submit(struct rig *rig, uint64_t job, enum kvist_copy_direction direction, void *stream);

/** Poll until one job is reported. */
struct kvist_copy_result rig_poll_one(struct rig *rig);

/** Wait for the only job; it must have gone well. */
void rig_expect_done(struct rig *rig, uint64_t job);

void rig_pause(void);

#endif
