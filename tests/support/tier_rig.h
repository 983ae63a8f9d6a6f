/*
 * tier_rig - a tier in a directory of its own, driven one call at a time.
 *
 * Role        opens and closes a tier, turns it, keeps what it reported; makes blocks whose bytes
 *             tell which block they are, so that a wrong one is seen.
 * Threads     the test's
 */
#ifndef KVIST_TESTS_TIER_RIG_H
#define KVIST_TESTS_TIER_RIG_H

#include "storage/tier.h"

#include <stdatomic.h>

#define KVIST_RIG_PATH_BYTES 256

struct kvist_rig {
    struct kvist_tier_options options;
    struct kvist_tier *tier;
    struct kvist_error err;
    char path[KVIST_RIG_PATH_BYTES];
    uint32_t pools_loaded;
    struct kvist_tier_pool last_pool;
    struct kvist_tier_block *loaded; /* since the last open */
    size_t loaded_count;
    size_t loaded_capacity;
    size_t take_left; /* of those that are told; what is beyond waits */
    bool load_done;
    enum kvist_status load_status;
    uint64_t dropped;
    uint64_t moved;
    uint64_t completed; /* of kvist_rig_submit_write() */
    uint64_t completed_ok;
    uint8_t *memory; /* aligned, for one block */
};

/** A fresh directory below the working directory; the tier is not opened. */
void kvist_rig_init(struct kvist_rig *rig, uint64_t bytes_max);

/** Close the tier, remove the directory. */
void kvist_rig_fini(struct kvist_rig *rig);

enum kvist_status kvist_rig_open(struct kvist_rig *rig);
void kvist_rig_close(struct kvist_rig *rig);

/** Open, and wait until the index was read back. Fatal when that fails. */
void kvist_rig_start(struct kvist_rig *rig);

/** Turn until *flag, at most 20 s. False: it did not come. */
bool kvist_rig_turn_until(struct kvist_rig *rig, const bool *flag);

/** Wait up to 100 ms for something to do, and do it. */
void kvist_rig_turn(struct kvist_rig *rig);

/** Turn until the tier has had nothing to report for so long: what it does by itself. */
void kvist_rig_turn_for(struct kvist_rig *rig, uint64_t us);

/** Pool number `number`, of a tenant ("" for the default). */
struct kvist_tier_pool kvist_rig_pool(uint32_t number, uint64_t slot_bytes, uint64_t generation);

/** A block and its bytes; bytes is aligned and has room for it. */
struct kvist_tier_block kvist_rig_block(const struct kvist_tier_pool *pool,
                                        uint64_t number,
                                        uint64_t version,
                                        uint64_t block_bytes,
                                        void *bytes);

/** Whether bytes are those of some version of this block. */
bool kvist_rig_is(const void *bytes, uint64_t block_bytes, uint32_t pool, uint64_t number);

/* The calls of the tier, waiting for their completion. */
enum kvist_status kvist_rig_put_pool(struct kvist_rig *rig, const struct kvist_tier_pool *pool);
enum kvist_status kvist_rig_write(struct kvist_rig *rig,
                                  const struct kvist_tier_pool *pool,
                                  uint64_t number,
                                  uint64_t version,
                                  uint64_t block_bytes);
enum kvist_status kvist_rig_sync(struct kvist_rig *rig);

/** Read and compare; CORRUPT from the tier is passed on, wrong bytes are fatal. */
enum kvist_status
kvist_rig_read(struct kvist_rig *rig, const struct kvist_tier_pool *pool, uint64_t number);

/** Submit a write from memory that lives on; counted in `completed`. */
enum kvist_status kvist_rig_submit_write(struct kvist_rig *rig,
                                         const struct kvist_tier_block *block,
                                         const void *bytes);

struct kvist_tier_stats kvist_rig_stats(const struct kvist_rig *rig);

/** Bytes on disk of everything under a directory, as du(1) counts. */
uint64_t kvist_rig_du(const char *path);

#endif
