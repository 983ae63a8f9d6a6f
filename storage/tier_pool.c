/*
 * The pools that the tier knows, and their being remembered. A pool is known from
 * kvist_tier_put_pool() on, in this process, and on disk from its completion on. Generations only
 * grow: from the call on, blocks of an earlier one are neither written nor read. A pool that is
 * forgotten gets a generation more, so that none of its blocks is current; when they have been
 * removed, so is what is remembered of it, and then its place is free.
 */
#include "proto/base/check.h"
#include "storage/tier_internal.h"

#include <stdlib.h>
#include <string.h>

struct kvist_tier_known_pool *kvist_tier_pool_find(struct kvist_tier *tier,
                                                   const uint8_t pool_id[KVIST_KEY_BYTES])
{
    struct kvist_tier_known_pool *found = NULL;
    (void)pthread_mutex_lock(&tier->table_lock);
    for (uint32_t index = 0; found == NULL && index < tier->pool_high; index++) {
        struct kvist_tier_known_pool *known = tier->pools[index];
        if (known != NULL && memcmp(known->pool.pool_id, pool_id, KVIST_KEY_BYTES) == 0) {
            found = known;
        }
    }
    (void)pthread_mutex_unlock(&tier->table_lock);
    return found;
}

const _Atomic uint64_t *kvist_tier_pool_generation(struct kvist_tier *tier,
                                                   const uint8_t pool_id[KVIST_KEY_BYTES])
{
    const struct kvist_tier_known_pool *pool = kvist_tier_pool_find(tier, pool_id);
    return pool != NULL ? &pool->generation : NULL;
}

/* What is newest is written, so that two puts that overtake each other end right. */
static void put_pool_run(struct kvist_job *job)
{
    struct kvist_tier_request *request = (struct kvist_tier_request *)job;
    struct kvist_tier *tier = request->tier;
    request->status =
        kvist_tier_index_ready(tier->index, KVIST_TIER_INDEX_LAST_BYTES, &request->err);
    if (request->status == KVIST_OK) {
        (void)pthread_mutex_lock(&tier->pool_lock);
        struct kvist_tier_pool pool = request->pool->pool;
        pool.generation = atomic_load(&request->pool->generation);
        request->status = kvist_tier_index_put_pool(tier->index, &pool, &request->err);
        (void)pthread_mutex_unlock(&tier->pool_lock);
    }
}

static void put_pool_done(struct kvist_job *job)
{
    struct kvist_tier_request *request = (struct kvist_tier_request *)job;
    struct kvist_tier *tier = request->tier;
    request->pool->puts_in_flight--;
    request->pool->unsaved = request->status != KVIST_OK;
    if (request->status != KVIST_OK) {
        tier->counters.write_errors_total++;
        kvist_tier_text_set(tier->write_text, &request->err);
    }
    kvist_tier_request_finish(request);
}

static void put_submit(struct kvist_tier_known_pool *pool, struct kvist_tier_request *request)
{
    struct kvist_tier *tier = request->tier;
    request->pool = pool;
    request->job.run = put_pool_run;
    request->job.done = put_pool_done;
    pool->puts_in_flight++;
    if (kvist_workers_submit(tier->workers, &request->job) != KVIST_OK) {
        pool->puts_in_flight--;
        request->status = KVIST_CLOSED;
        kvist_tier_request_finish(request);
    }
}

/* The first free place; the forgotten ones, should there be none, are to be purged once more. */
static enum kvist_status find_place(struct kvist_tier *tier, uint32_t *index_out)
{
    for (uint32_t index = 0; index < KVIST_TIER_POOLS_MAX; index++) {
        if (tier->pools[index] == NULL) {
            *index_out = index;
            return KVIST_OK;
        }
    }
    for (uint32_t index = 0; index < KVIST_TIER_POOLS_MAX; index++) {
        struct kvist_tier_known_pool *known = tier->pools[index];
        known->purge = known->purge || known->forgotten;
    }
    return KVIST_BUSY;
}

static void set_place(struct kvist_tier *tier, uint32_t index, struct kvist_tier_known_pool *known)
{
    (void)pthread_mutex_lock(&tier->table_lock);
    tier->pools[index] = known;
    tier->pool_high = index >= tier->pool_high ? index + 1 : tier->pool_high;
    (void)pthread_mutex_unlock(&tier->table_lock);
}

static enum kvist_status pool_add(struct kvist_tier *tier,
                                  const struct kvist_tier_pool *pool,
                                  struct kvist_tier_known_pool **known_out)
{
    uint32_t place = 0;
    uint32_t tenant = 0;
    if (find_place(tier, &place) != KVIST_OK) {
        return KVIST_BUSY;
    }
    struct kvist_tier_known_pool *known = calloc(1, sizeof(*known));
    if (known == NULL || kvist_extents_tenant(tier->extents, pool->tenant, &tenant) != KVIST_OK) {
        free(known);
        return KVIST_NO_MEMORY;
    }
    known->pool = *pool;
    known->tenant = tenant;
    atomic_store(&known->generation, pool->generation);
    set_place(tier, place, known);
    *known_out = known;
    return KVIST_OK;
}

static bool pool_valid(const struct kvist_tier_pool *pool)
{
    return pool->slot_bytes >= KVIST_BLOCK_BYTES_MIN && pool->slot_bytes <= KVIST_BLOCK_BYTES_MAX &&
           pool->slot_bytes % KVIST_SLOT_ALIGN_BYTES == 0 &&
           memchr(pool->tenant, '\0', sizeof(pool->tenant)) != NULL &&
           memchr(pool->description, '\0', sizeof(pool->description)) != NULL;
}

enum kvist_status kvist_tier_put_pool(struct kvist_tier *tier,
                                      const struct kvist_tier_pool *pool,
                                      kvist_tier_done_fn *done,
                                      void *ctx)
{
    KVIST_CHECK(tier->magic == KVIST_TIER_MAGIC);
    struct kvist_tier_known_pool *known = kvist_tier_pool_find(tier, pool->pool_id);
    if (!pool_valid(pool)) {
        return KVIST_INVALID;
    }
    if (known != NULL && (pool->generation < atomic_load(&known->generation) ||
                          (pool->generation == atomic_load(&known->generation) &&
                           pool->slot_bytes != known->pool.slot_bytes))) {
        return KVIST_STALE;
    }
    struct kvist_tier_request *request =
        kvist_tier_request_take(tier, KVIST_TIER_PUT_POOL, done, ctx);
    if (request == NULL) {
        return KVIST_BUSY;
    }
    memcpy(request->record.block.pool_id, pool->pool_id, KVIST_KEY_BYTES);
    request->record.block.pool_generation = pool->generation;
    if (known == NULL) {
        enum kvist_status status = pool_add(tier, pool, &known);
        if (status != KVIST_OK) {
            request->next = tier->free;
            tier->free = request;
            tier->in_flight--;
            return status;
        }
    } else if (atomic_load(&known->generation) != pool->generation) {
        (void)pthread_mutex_lock(&tier->pool_lock);
        known->pool.slot_bytes = pool->slot_bytes;
        atomic_store(&known->generation, pool->generation); /* from here on, earlier is stale */
        (void)pthread_mutex_unlock(&tier->pool_lock);
        known->purge = true;
    }
    known->forgotten = false;
    put_submit(known, request);
    return KVIST_OK;
}

void kvist_tier_forget_pool(struct kvist_tier *tier, const uint8_t pool_id[KVIST_KEY_BYTES])
{
    KVIST_CHECK(tier->magic == KVIST_TIER_MAGIC);
    struct kvist_tier_known_pool *known = kvist_tier_pool_find(tier, pool_id);
    if (known != NULL && !known->forgotten) {
        known->forgotten = true;
        known->purge = true;
        atomic_fetch_add(&known->generation, 1);
    }
}

enum kvist_status kvist_tier_pool_erase(struct kvist_tier *tier,
                                        struct kvist_tier_known_pool *pool,
                                        bool *gone_out,
                                        struct kvist_error *err)
{
    enum kvist_status status = KVIST_OK;
    /* A put that comes between writes it again when this is done. */
    (void)pthread_mutex_lock(&tier->pool_lock);
    bool forgotten = pool->forgotten;
    if (forgotten) {
        status = kvist_tier_index_forget_pool(tier->index, pool->pool.pool_id, err);
    }
    (void)pthread_mutex_unlock(&tier->pool_lock);
    *gone_out = forgotten && status == KVIST_OK;
    return status;
}

void kvist_tier_pool_remove(struct kvist_tier *tier, struct kvist_tier_known_pool *pool)
{
    if (!pool->forgotten || pool->purge || pool->puts_in_flight > 0) {
        return;
    }
    for (uint32_t index = 0; index < tier->pool_high; index++) {
        if (tier->pools[index] == pool) {
            set_place(tier, index, NULL);
        }
    }
    free(pool);
}

void kvist_tier_pool_save(struct kvist_tier *tier, struct kvist_tier_known_pool *pool)
{
    if (pool->unsaved && pool->puts_in_flight == 0) {
        struct kvist_tier_request *request =
            kvist_tier_request_take(tier, KVIST_TIER_PUT_POOL, NULL, NULL);
        if (request != NULL) {
            put_submit(pool, request);
        }
    }
}

enum kvist_status kvist_tier_pools_open(struct kvist_tier *tier, struct kvist_error *err)
{
    size_t count = 0;
    struct kvist_tier_pool *pools = calloc(KVIST_TIER_POOLS_MAX, sizeof(pools[0]));
    if (pools == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "tier", "no memory for pools");
    }
    enum kvist_status status =
        kvist_tier_index_pools(tier->index, pools, KVIST_TIER_POOLS_MAX, &count, err);
    for (size_t index = 0; status == KVIST_OK && index < count; index++) {
        struct kvist_tier_known_pool *known = NULL;
        status = pool_add(tier, &pools[index], &known);
        if (status == KVIST_OK) {
            known->loaded = true;
        } else {
            (void)kvist_error_set(err, status, 0, "tier", "no memory for pools");
        }
    }
    free(pools);
    return status;
}

void kvist_tier_set_tenant(struct kvist_tier *tier,
                           const char *tenant,
                           uint64_t bytes_max,
                           uint32_t weight)
{
    KVIST_CHECK(tier->magic == KVIST_TIER_MAGIC && weight > 0);
    uint32_t index = 0;
    if (kvist_extents_tenant(tier->extents, tenant, &index) == KVIST_OK) {
        kvist_extents_set_tenant(tier->extents, index, bytes_max, weight);
    }
}

uint64_t kvist_tier_tenant_bytes(struct kvist_tier *tier, const char *tenant)
{
    KVIST_CHECK(tier->magic == KVIST_TIER_MAGIC);
    uint32_t index = 0;
    uint64_t bytes_max = 0;
    return kvist_extents_tenant(tier->extents, tenant, &index) == KVIST_OK
               ? kvist_extents_tenant_bytes(tier->extents, index, &bytes_max)
               : 0;
}
