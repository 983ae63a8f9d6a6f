/*
 * spare - memory that is populated before a pool asks for it.
 *
 * Role        keeps memfds of the size that most segments have, with their pages, so that the first
 *             blocks of a new pool wait for no page. A segment is made of one when there is one:
 *             its size is set then, and what it is larger is populated with the segment.
 * Limits      KVIST_SPARES_OF_ARENA of the arena, KVIST_SPARE_BYTES_MAX at most; less as segments
 *             leave less of the arena. One at a time, while no pool waits for memory
 * Invariants  spares and segments are never more than the arena, but for the last spare while it is
 *             coming: kvist_spare_trim() after each segment that is made, and when it has come
 */
#include "proto/shm/memfd.h"
#include "storage/internal.h"

#include <sys/mman.h>
#include <unistd.h>

uint64_t kvist_spare_bytes(const struct kvist_store *store)
{
    return (store->spare.count + store->spare.busy) * store->spare.bytes;
}

void kvist_spare_init(struct kvist_store *store)
{
    uint64_t arena_bytes = store->options.arena_bytes;
    uint64_t most = arena_bytes / KVIST_SPARES_OF_ARENA;
    most = most < KVIST_SPARE_BYTES_MAX ? most : KVIST_SPARE_BYTES_MAX;
    store->spare.store = store;
    store->spare.bytes = kvist_pool_segment_bytes_least(arena_bytes);
    uint64_t count = store->options.populate_ahead ? most / store->spare.bytes : 0;
    uint32_t segments_max = store->options.keeper.segments_max;
    if (segments_max != 0 && count > segments_max / KVIST_SPARES_OF_ARENA) {
        count = segments_max / KVIST_SPARES_OF_ARENA; /* each has a descriptor */
    }
    store->spare.count_max = count < KVIST_SPARES_MAX ? (uint32_t)count : KVIST_SPARES_MAX;
}

static void drop(struct kvist_spare_memory *memory, uint64_t bytes)
{
    kvist_memfd_unmap(&memory->map, bytes);
    (void)close(memory->fd);
    memory->fd = -1;
}

static void drop_last(struct kvist_spare *spare)
{
    drop(&spare->ready[--spare->count], spare->bytes);
}

void kvist_spare_fini(struct kvist_store *store)
{
    while (store->spare.count > 0) {
        drop_last(&store->spare);
    }
}

void kvist_spare_trim(struct kvist_store *store)
{
    while (store->spare.count > 0 &&
           store->used_bytes + kvist_spare_bytes(store) > store->options.arena_bytes) {
        drop_last(&store->spare);
    }
}

bool kvist_spare_take(struct kvist_store *store,
                      uint64_t bytes,
                      struct kvist_spare_memory *memory_out)
{
    struct kvist_spare *spare = &store->spare;
    if (spare->count == 0) {
        return false;
    }
    struct kvist_spare_memory *last = &spare->ready[spare->count - 1];
    enum kvist_status status = kvist_memfd_seal(last->fd, bytes, NULL);
    if (status == KVIST_OK && bytes != spare->bytes) {
        kvist_memfd_unmap(&last->map, spare->bytes);
        status = kvist_memfd_map(last->fd, bytes, KVIST_MEMFD_WRITE, &last->map, NULL);
    }
    if (status != KVIST_OK) {
        drop_last(spare);
        return false;
    }
    *memory_out = *last;
    spare->count--;
    return true;
}

static void populate_run(struct kvist_job *job)
{
    struct kvist_spare *spare = (struct kvist_spare *)job;
    struct kvist_spare_memory *memory = &spare->coming;
    spare->status =
        kvist_memfd_map(memory->fd, spare->bytes, KVIST_MEMFD_WRITE, &memory->map, NULL);
    if (spare->status == KVIST_OK && !spare->store->options.huge_pages) {
        (void)madvise(memory->map, spare->bytes, MADV_NOHUGEPAGE);
    }
    if (spare->status == KVIST_OK) {
        spare->status = kvist_memfd_populate(memory->map, spare->bytes, &spare->store->stop, NULL);
    }
}

static void populate_done(struct kvist_job *job)
{
    struct kvist_spare *spare = (struct kvist_spare *)job;
    struct kvist_store *store = spare->store;
    spare->busy = false;
    if (spare->status != KVIST_OK) {
        drop(&spare->coming, spare->bytes);
        spare->after_us = store->now_us + KVIST_POPULATE_RETRY_US;
        return;
    }
    spare->ready[spare->count++] = spare->coming;
    kvist_spare_trim(store);
}

/* Pools go first: what they wait for, and what they have to give back. */
static bool is_wanted(const struct kvist_store *store)
{
    for (uint32_t index = 0; index < store->pool_high; index++) {
        const struct kvist_store_pool *pool = store->pools[index];
        if (pool != NULL && (pool->populating_count > 0 || pool->hungry)) {
            return true;
        }
    }
    return false;
}

void kvist_spare_turn(struct kvist_store *store)
{
    struct kvist_spare *spare = &store->spare;
    if (spare->busy || store->closing || spare->count >= spare->count_max ||
        !kvist_arena_can_keep(store) || store->now_us < spare->after_us ||
        store->used_bytes + kvist_spare_bytes(store) + spare->bytes > store->options.arena_bytes ||
        is_wanted(store)) {
        return;
    }
    spare->after_us = store->now_us + KVIST_POPULATE_RETRY_US;
    spare->coming = (struct kvist_spare_memory){.fd = -1, .serial = kvist_roster_serial(store)};
    char name[KVIST_MEMFD_NAME_BYTES + 1];
    kvist_memfd_name(KVIST_KEPT_SEGMENT, spare->coming.serial, store->roster->instance, name);
    if (!kvist_arena_has_memory(store, spare->bytes) ||
        kvist_memfd_create_open(name, spare->bytes, &spare->coming.fd, NULL) != KVIST_OK) {
        return;
    }
    spare->job = (struct kvist_job){.run = populate_run, .done = populate_done};
    spare->busy = kvist_workers_submit(store->hands, &spare->job) == KVIST_OK;
    if (spare->busy) {
        spare->after_us = 0;
    } else {
        drop(&spare->coming, spare->bytes);
    }
}
