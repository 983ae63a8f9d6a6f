#include "client/core.h"
#include "proto/shm/memfd.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>

/* --- Session page -------------------------------------------------------------------------- */

static enum kvist_status check_page(const struct kvist_client *client,
                                    struct kvist_epoch *epoch,
                                    uint64_t bytes,
                                    struct kvist_error *err)
{
    struct kvist_page_header *copy = &epoch->page_header;
    memcpy(copy, epoch->page, sizeof(*copy));
    if (!kvist_page_header_check(copy, bytes) || copy->rank_count != client->rank_count ||
        memcmp(copy->session_id, client->session_id, sizeof(copy->session_id)) != 0) {
        return kvist_error_set(
            err, KVIST_CORRUPT, 0, "peer", "the daemon sent a page that is not this session's");
    }
    /* Records that an earlier scheduler process of this session used stay its own: ranks may
     * still be copying from what it leased. */
    epoch->lease_next = copy->lease_high < copy->lease_max ? copy->lease_high : copy->lease_max;
    return KVIST_OK;
}

static enum kvist_status
map_page(struct kvist_epoch *epoch, int page_fd, uint64_t *bytes_out, struct kvist_error *err)
{
    struct stat info;
    uint64_t bytes = 0;
    enum kvist_status status = kvist_memfd_check(page_fd, &bytes, err);
    if (status != KVIST_OK) {
        return status;
    }
    if (bytes < KVIST_HEADER_BYTES) {
        return kvist_error_set(
            err, KVIST_CORRUPT, 0, "peer", "a page of %llu bytes", (unsigned long long)bytes);
    }
    if (fstat(page_fd, &info) != 0) {
        return kvist_error_set_errno(err, errno, "fstat", "cannot inspect the session page");
    }
    status = kvist_memfd_map(page_fd, bytes, KVIST_MEMFD_WRITE, &epoch->page, err);
    if (status == KVIST_OK) {
        epoch->page_device = info.st_dev;
        epoch->page_inode = info.st_ino;
        *bytes_out = bytes;
    }
    return status;
}

static void free_epoch(struct kvist_epoch *epoch, uint64_t page_bytes)
{
    kvist_memfd_unmap(&epoch->page, page_bytes);
    free(epoch->free_records);
    free(epoch->tickets);
    free(epoch);
}

enum kvist_status kvist_epoch_create(const struct kvist_client *client,
                                     uint64_t instance,
                                     int page_fd,
                                     struct kvist_epoch **epoch_out,
                                     struct kvist_error *err)
{
    uint64_t bytes = 0;
    struct kvist_epoch *epoch = kvist_client_alloc(1, sizeof(*epoch));
    if (epoch == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "client", "no memory for a session");
    }
    epoch->instance = instance;
    enum kvist_status status = map_page(epoch, page_fd, &bytes, err);
    if (status == KVIST_OK) {
        status = check_page(client, epoch, bytes, err);
    }
    if (status == KVIST_OK) {
        epoch->free_records =
            kvist_client_alloc(epoch->page_header.lease_max, sizeof(*epoch->free_records));
        epoch->tickets = kvist_client_alloc(epoch->page_header.ticket_max, sizeof(*epoch->tickets));
        if (epoch->free_records == NULL || epoch->tickets == NULL) {
            status = kvist_error_set(err, KVIST_NO_MEMORY, 0, "client", "no memory for a session");
        }
    }
    if (status != KVIST_OK) {
        free_epoch(epoch, bytes);
        return status;
    }
    *epoch_out = epoch;
    return KVIST_OK;
}

void kvist_epoch_destroy(struct kvist_client *client, struct kvist_epoch **epoch_ref)
{
    struct kvist_epoch *epoch = *epoch_ref;
    *epoch_ref = NULL;
    for (uint32_t index = 0; index < KVIST_SESSION_POOLS_MAX; index++) {
        if (epoch->views[index] != NULL) {
            kvist_view_destroy(client, client->pools[index], &epoch->views[index]);
        }
    }
    free_epoch(epoch, epoch->page_header.page_bytes);
}

struct kvist_epoch *kvist_epoch_find_locked(const struct kvist_client *client, uint64_t instance)
{
    if (client->current != NULL && client->current->instance == instance) {
        return client->current;
    }
    for (struct kvist_epoch *epoch = client->retired; epoch != NULL; epoch = epoch->next) {
        if (epoch->instance == instance) {
            return epoch;
        }
    }
    return NULL;
}

void kvist_epoch_retire_locked(struct kvist_client *client)
{
    struct kvist_epoch *epoch = client->current;
    if (epoch == NULL) {
        return;
    }
    for (uint32_t index = 0; index < KVIST_SESSION_POOLS_MAX; index++) {
        if (epoch->views[index] != NULL) {
            kvist_view_clear_mapped_locked(client, epoch, epoch->views[index]);
        }
    }
    epoch->next = client->retired;
    client->retired = epoch;
    client->current = NULL;
}

/* --- Views --------------------------------------------------------------------------------- */

/* For good: what is mapped of it is to go. */
static bool is_refused(const struct kvist_pool *pool)
{
    return pool->state == KVIST_POOL_REFUSED && pool->retry_at_us == 0;
}

struct kvist_view *kvist_view_current_locked(const struct kvist_pool *pool)
{
    const struct kvist_epoch *epoch = pool->client->current;
    return epoch != NULL && !is_refused(pool) ? epoch->views[pool->index] : NULL;
}

void kvist_view_clear_mapped_locked(const struct kvist_client *client,
                                    const struct kvist_epoch *epoch,
                                    const struct kvist_view *view)
{
    for (uint32_t segment = 0; client->maps && segment < KVIST_SEGMENTS_MAX; segment++) {
        if (view->segments[segment].base != NULL) {
            atomic_store_explicit(kvist_page_mapped(epoch, client->rank, view->ordinal, segment),
                                  0,
                                  memory_order_relaxed);
        }
    }
}

void kvist_view_destroy(struct kvist_client *client,
                        struct kvist_pool *pool,
                        struct kvist_view **view_ref)
{
    struct kvist_view *view = *view_ref;
    *view_ref = NULL;
    for (uint32_t index = 0; index < KVIST_SEGMENTS_MAX; index++) {
        struct kvist_segment_view *segment = &view->segments[index];
        if (segment->base != NULL && client->segment_unmapping != NULL) {
            client->segment_unmapping(client->ctx, pool, segment->base, segment->bytes);
        }
        kvist_memfd_unmap(&segment->base, segment->bytes);
    }
    kvist_map_view_close(&view->map);
    free(view);
}

enum kvist_status
kvist_map_view_open(int fd, uint64_t bytes, struct kvist_map_view *map_out, struct kvist_error *err)
{
    struct kvist_map_view map;
    uint64_t memfd_bytes = 0;
    enum kvist_status status = kvist_memfd_check(fd, &memfd_bytes, err);
    if (status != KVIST_OK) {
        return status;
    }
    if (memfd_bytes != bytes || bytes < KVIST_HEADER_BYTES) {
        return kvist_error_set(err, KVIST_CORRUPT, 0, "peer", "a pool map of the wrong size");
    }
    status = kvist_memfd_map(fd, bytes, KVIST_MEMFD_READ, &map.base, err);
    if (status != KVIST_OK) {
        return status;
    }
    memcpy(&map.header, map.base, sizeof(map.header));
    if (!kvist_map_header_check(&map.header, bytes)) {
        kvist_memfd_unmap(&map.base, bytes);
        return kvist_error_set(err, KVIST_CORRUPT, 0, "peer", "a pool map with a broken header");
    }
    *map_out = map;
    return KVIST_OK;
}

void kvist_map_view_close(struct kvist_map_view *map)
{
    kvist_memfd_unmap(&map->base, map->header.map_bytes);
}

/* --- Sweeping ------------------------------------------------------------------------------ */

/* A lease of any process of the session, also of one that died: its ranks may be reading.
   `view`: in its pool; NULL: in any. */
static bool has_leases(const struct kvist_epoch *epoch, const struct kvist_view *view)
{
    kvist_lease_fence(); /* after the mapped records were cleared: see acquire in lease.c */
    uint32_t high =
        atomic_load_explicit(&kvist_page_shared_header(epoch)->lease_high, memory_order_relaxed);
    high = high < epoch->page_header.lease_max ? high : epoch->page_header.lease_max;
    for (uint32_t record = 0; record < high; record++) {
        uint64_t ref =
            atomic_load_explicit(&kvist_page_lease(epoch, record)->ref, memory_order_acquire);
        if (ref != 0 && (view == NULL || kvist_slot_ref(view->ordinal, (uint32_t)ref) == ref)) {
            return true;
        }
    }
    return false;
}

static bool has_pins(const struct kvist_epoch *epoch)
{
    for (uint32_t index = 0; index < KVIST_SESSION_POOLS_MAX; index++) {
        if (epoch->views[index] != NULL && epoch->views[index]->pins > 0) {
            return true;
        }
    }
    return false;
}

/* Take one retired epoch that nobody uses out of the list. */
static struct kvist_epoch *take_unused_locked(struct kvist_client *client)
{
    for (struct kvist_epoch **link = &client->retired; *link != NULL; link = &(*link)->next) {
        struct kvist_epoch *epoch = *link;
        if (!has_pins(epoch) && !has_leases(epoch, NULL)) {
            *link = epoch->next;
            return epoch;
        }
    }
    return NULL;
}

/* Take one revoked segment out of an epoch's views when nobody can have an address in it. */
static bool take_leaving_locked(struct kvist_client *client,
                                struct kvist_segment_view *segment_out,
                                struct kvist_pool **pool_out,
                                uint32_t *ordinal_out,
                                uint32_t *index_out)
{
    for (uint32_t slot = 0; client->current != NULL && slot < KVIST_SESSION_POOLS_MAX; slot++) {
        struct kvist_view *view = client->current->views[slot];
        if (view == NULL || view->leaving_count == 0 || view->pins > 0) {
            continue;
        }
        for (uint32_t index = 0; index < KVIST_SEGMENTS_MAX; index++) {
            struct kvist_segment_view *segment = &view->segments[index];
            if (segment->base != NULL && segment->leaving) {
                *segment_out = *segment;
                *pool_out = client->pools[slot];
                *ordinal_out = view->ordinal;
                *index_out = index;
                view->leaving_count--;
                view->mapped_count--;
                view->mapped_bytes -= segment->bytes;
                memset(segment, 0, sizeof(*segment));
                return true;
            }
        }
    }
    return false;
}

static void unmap_leaving(struct kvist_client *client)
{
    struct kvist_segment_view segment;
    struct kvist_pool *pool = NULL;
    uint32_t ordinal = 0;
    uint32_t index = 0;
    (void)pthread_mutex_lock(client->lock);
    while (take_leaving_locked(client, &segment, &pool, &ordinal, &index)) {
        (void)pthread_mutex_unlock(client->lock);
        if (client->segment_unmapping != NULL) {
            client->segment_unmapping(client->ctx, pool, segment.base, segment.bytes);
        }
        kvist_memfd_unmap(&segment.base, segment.bytes);
        (void)pthread_mutex_lock(client->lock);
        kvist_link_post_unmapped_locked(client, ordinal, index, segment.serial);
    }
    (void)pthread_mutex_unlock(client->lock);
}

/* The daemon has refused the pool to a process that had it open: nobody finds anything there any
   more, and when nobody reads or fills what was found, it is unmapped, and closed like any other.
   @return whether somebody does */
static bool unmap_refused(struct kvist_client *client)
{
    bool waits = false;
    (void)pthread_mutex_lock(client->lock);
    for (uint32_t index = 0; client->current != NULL && index < KVIST_SESSION_POOLS_MAX; index++) {
        struct kvist_pool *pool = client->pools[index];
        struct kvist_view *view = client->current->views[index];
        if (pool == NULL || view == NULL || !is_refused(pool)) {
            continue;
        }
        kvist_view_clear_mapped_locked(client, client->current, view);
        if (view->pins > 0 || has_leases(client->current, view)) {
            waits = true;
            continue;
        }
        kvist_grant_close_locked(client, pool);
        client->current->views[index] = NULL;
        uint32_t closing = 1U << view->ordinal;
        (void)pthread_mutex_unlock(client->lock);
        kvist_view_destroy(client, pool, &view);
        (void)pthread_mutex_lock(client->lock);
        client->closing |= closing;
        kvist_link_close_pools_locked(client);
    }
    (void)pthread_mutex_unlock(client->lock);
    return waits;
}

bool kvist_epoch_sweep(struct kvist_client *client)
{
    unmap_leaving(client);
    bool refused_waits = unmap_refused(client);
    for (;;) {
        (void)pthread_mutex_lock(client->lock);
        struct kvist_epoch *epoch = take_unused_locked(client);
        bool waits = client->retired != NULL;
        (void)pthread_mutex_unlock(client->lock);
        if (epoch == NULL) {
            return waits || refused_waits;
        }
        kvist_epoch_destroy(client, &epoch);
    }
}
