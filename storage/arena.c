/*
 * arena - segments: sealed memfds that are lent to one pool for their whole life.
 *
 * Role        makes and populates them, publishes them in the pool's map, and counts their bytes
 *             from creation until the last member has unmapped them.
 * States      NONE -> POPULATING [kvist_arena_grow] -> LIVE | NONE [populated, failed]
 *             LIVE <-> DRAINING [kvist_slot_set_draining] -> REVOKED [kvist_arena_revoke]
 *             REVOKED -> NONE [kvist_arena_unlend, the last member]
 * Keeping     a populated segment is kept first, and goes LIVE when that is safe: what is lent
 *             outlives this process
 */
#include "proto/base/log.h"
#include "proto/shm/memfd.h"
#include "storage/internal.h"

#include <sys/mman.h>
#include <unistd.h>

static void set_entry(struct kvist_segment *segment, enum kvist_segment_state state)
{
    struct kvist_segment_entry *entry = &segment->pool->map.segments[segment->index];
    bool exists = state != KVIST_SEGMENT_NONE;
    if (exists) {
        atomic_store_explicit(&entry->bytes, segment->bytes, memory_order_relaxed);
    }
    atomic_store_explicit(&entry->serial, exists ? segment->serial : 0, memory_order_relaxed);
    atomic_store_explicit(&entry->state, (uint32_t)state, memory_order_release);
}

static void free_segment(struct kvist_segment *segment)
{
    struct kvist_store_pool *pool = segment->pool;
    bool was_kept = segment->life != KVIST_LIFE_POPULATING || segment->keep_number != 0;
    kvist_memfd_unmap(&segment->map, segment->bytes);
    (void)close(segment->fd);
    segment->fd = -1;
    kvist_tenant_gives_back(segment);
    pool->store->used_bytes -= segment->bytes;
    pool->used_bytes -= segment->bytes;
    pool->segment_count--;
    pool->store->segment_count--;
    segment->life = KVIST_LIFE_NONE;
    set_entry(segment, KVIST_SEGMENT_NONE);
    if (was_kept) {
        kvist_roster_forget(pool->store, KVIST_KEPT_SEGMENT, segment->serial);
    }
}

static void go_live(struct kvist_segment *segment)
{
    struct kvist_store_pool *pool = segment->pool;
    pool->populating_count--;
    segment->life = KVIST_LIFE_LIVE;
    pool->store->populated_bytes += segment->bytes;
    kvist_slot_add_segment(pool, segment);
    set_entry(segment, KVIST_SEGMENT_LIVE);
    pool->lend_wanted = true;
}

void kvist_arena_kept(struct kvist_store_pool *pool)
{
    for (uint32_t index = 0; pool->populating_count > 0 && index < pool->segment_max; index++) {
        struct kvist_segment *segment = &pool->segments[index];
        if (segment->life == KVIST_LIFE_POPULATING && segment->keep_number != 0 &&
            segment->keep_number <= pool->store->kept_count) {
            go_live(segment);
        }
    }
}

static void populate_run(struct kvist_job *job)
{
    struct kvist_segment *segment = (struct kvist_segment *)job;
    segment->populate_status =
        kvist_memfd_populate(segment->map, segment->bytes, &segment->pool->store->stop, NULL);
}

static void populate_done(struct kvist_job *job)
{
    struct kvist_segment *segment = (struct kvist_segment *)job;
    struct kvist_store_pool *pool = segment->pool;
    struct kvist_store *store = pool->store;
    enum kvist_status status = segment->populate_status;
    if (status == KVIST_OK) {
        status = kvist_roster_keep(store, KVIST_KEPT_SEGMENT, segment->serial, segment->fd);
    }
    if (status != KVIST_OK) {
        kvist_log(KVIST_LOG_DEBUG,
                  "cannot populate a segment bytes=%llu status=%s action=retried",
                  (unsigned long long)segment->bytes,
                  kvist_status_name(status));
        store->stats.populate_failures_total++;
        pool->populate_after_us = store->now_us + KVIST_POPULATE_RETRY_US;
        pool->populating_count--;
        free_segment(segment);
        return;
    }
    segment->keep_number = store->keep_count;
    if (store->options.keeper.keep == NULL) {
        go_live(segment);
    }
}

static struct kvist_segment *find_place(struct kvist_store_pool *pool)
{
    for (uint32_t index = 0; index < pool->segment_max; index++) {
        if (pool->segments[index].life == KVIST_LIFE_NONE) {
            return &pool->segments[index];
        }
    }
    return NULL;
}

bool kvist_arena_has_memory(struct kvist_store *store, uint64_t bytes)
{
    if (store->adoption.released_bytes == 0 || store->options.available == NULL ||
        store->options.available(store->options.ctx) >= bytes + KVIST_AVAILABLE_SPARE_BYTES) {
        return true;
    }
    store->stats.populate_waits_total++;
    return false;
}

/* Memory for a segment whose size is set: spare, or new. */
static enum kvist_status make_memory(struct kvist_store *store, struct kvist_segment *segment)
{
    struct kvist_spare_memory memory = {.fd = -1};
    enum kvist_status status = KVIST_OK;
    if (!kvist_spare_take(store, segment->bytes, &memory)) {
        memory.serial = kvist_roster_serial(store);
        char name[KVIST_MEMFD_NAME_BYTES + 1];
        kvist_memfd_name(KVIST_KEPT_SEGMENT, memory.serial, store->roster->instance, name);
        status = kvist_memfd_create(name, segment->bytes, &memory.fd, NULL);
        if (status == KVIST_OK) {
            status =
                kvist_memfd_map(memory.fd, segment->bytes, KVIST_MEMFD_WRITE, &memory.map, NULL);
        }
    }
    if (status == KVIST_OK) {
        segment->fd = memory.fd;
        segment->serial = memory.serial;
        segment->map = memory.map;
    } else if (memory.fd >= 0) {
        (void)close(memory.fd);
    }
    return status;
}

enum kvist_status kvist_arena_grow(struct kvist_store_pool *pool)
{
    struct kvist_store *store = pool->store;
    struct kvist_segment *segment = find_place(pool);
    if (segment == NULL || !kvist_arena_can_keep(store) ||
        kvist_tenant_room(store, pool->tenant, false) < pool->segment_bytes) {
        return KVIST_NO_SPACE;
    }
    if (!kvist_arena_has_memory(store, pool->segment_bytes)) {
        return KVIST_NO_MEMORY; /* tried again after a while */
    }
    segment->job = (struct kvist_job){.run = populate_run, .done = populate_done};
    segment->pool = pool;
    segment->index = (uint32_t)(segment - pool->segments);
    segment->bytes = pool->segment_bytes;
    segment->free_head = KVIST_SLOT_NONE;
    segment->free_count = 0;
    segment->lent_count = 0;
    segment->keep_number = 0;
    enum kvist_status status = make_memory(store, segment);
    if (status != KVIST_OK) {
        store->stats.populate_failures_total++;
        return KVIST_NO_MEMORY; /* NO_SPACE, of a limit of file sizes, is not the arena's */
    }
    if (!store->options.huge_pages) {
        (void)madvise(segment->map, segment->bytes, MADV_NOHUGEPAGE);
    }
    status = kvist_workers_submit(store->hands, &segment->job);
    if (status != KVIST_OK) {
        kvist_memfd_unmap(&segment->map, segment->bytes);
        (void)close(segment->fd);
        segment->fd = -1;
        return status;
    }
    segment->life = KVIST_LIFE_POPULATING;
    store->used_bytes += segment->bytes;
    pool->tenant->used_bytes += segment->bytes;
    pool->used_bytes += segment->bytes;
    pool->segment_count++;
    store->segment_count++;
    pool->populating_count++;
    kvist_spare_trim(store);
    return KVIST_OK;
}

void kvist_arena_end_revoked(struct kvist_store_pool *pool, struct kvist_segment *segment)
{
    pool->store->draining_bytes -= segment->bytes;
    pool->store->populated_bytes -= segment->bytes;
    free_segment(segment);
}

void kvist_arena_revoke(struct kvist_store_pool *pool, struct kvist_segment *segment)
{
    kvist_slot_remove_segment(pool, segment);
    pool->draining_count--;
    segment->life = KVIST_LIFE_REVOKED;
    segment->drain_since_us = pool->store->now_us;
    set_entry(segment, KVIST_SEGMENT_REVOKED);
    pool->store->stats.revokes_total++;
    if (segment->lent_count == 0) {
        kvist_arena_end_revoked(pool, segment);
    } else {
        pool->lend_wanted = true;
    }
}

void kvist_arena_unlend(struct kvist_store_pool *pool, struct kvist_segment *segment)
{
    KVIST_CHECK(segment->lent_count > 0);
    segment->lent_count--;
    if (segment->lent_count == 0 && segment->life == KVIST_LIFE_REVOKED) {
        kvist_arena_end_revoked(pool, segment);
    }
}

enum kvist_status
kvist_arena_adopt(struct kvist_store_pool *pool, uint32_t index, uint32_t serial, int fd)
{
    struct kvist_store *store = pool->store;
    struct kvist_segment *segment = &pool->segments[index];
    bool revoked = atomic_load_explicit(&pool->map.segments[index].state, memory_order_relaxed) ==
                   KVIST_SEGMENT_REVOKED;
    enum kvist_status status =
        kvist_memfd_map(fd, pool->segment_bytes, KVIST_MEMFD_WRITE, &segment->map, NULL);
    if (status != KVIST_OK) {
        return status;
    }
    if (!store->options.huge_pages) {
        (void)madvise(segment->map, pool->segment_bytes, MADV_NOHUGEPAGE);
    }
    segment->pool = pool;
    segment->life = revoked ? KVIST_LIFE_REVOKED : KVIST_LIFE_LIVE;
    segment->index = index;
    segment->serial = serial;
    segment->fd = fd;
    segment->bytes = pool->segment_bytes;
    segment->free_head = KVIST_SLOT_NONE;
    store->used_bytes += segment->bytes;
    store->populated_bytes += segment->bytes;
    store->draining_bytes += revoked ? segment->bytes : 0;
    pool->used_bytes += segment->bytes;
    pool->segment_count++;
    store->segment_count++;
    return KVIST_OK;
}

void kvist_arena_free_all(struct kvist_store_pool *pool)
{
    for (uint32_t index = 0; index < pool->segment_max; index++) {
        struct kvist_segment *segment = &pool->segments[index];
        if (segment->life == KVIST_LIFE_DRAINING || segment->life == KVIST_LIFE_REVOKED) {
            kvist_arena_end_revoked(pool, segment);
        } else if (segment->life == KVIST_LIFE_LIVE) {
            pool->store->populated_bytes -= segment->bytes;
            free_segment(segment);
        } else if (segment->life == KVIST_LIFE_POPULATING && segment->keep_number != 0) {
            pool->populating_count--;
            free_segment(segment);
        }
        KVIST_CHECK(segment->life == KVIST_LIFE_NONE);
    }
}
