#include "client/core.h"
#include "proto/base/clock.h"
#include "proto/shm/memfd.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define POOL_RETRY_US 1000000U

static struct kvist_pool *find_ordinal(const struct kvist_client *client, uint32_t ordinal)
{
    for (uint32_t index = 0; client->current != NULL && index < KVIST_SESSION_POOLS_MAX; index++) {
        const struct kvist_view *view = client->current->views[index];
        if (view != NULL && view->ordinal == ordinal) {
            return client->pools[index];
        }
    }
    return NULL;
}

static enum kvist_status nonsense(const char *what, struct kvist_error *err)
{
    return kvist_error_set(err, KVIST_PROTOCOL, 0, "peer", "the daemon sent %s", what);
}

/* --- Hello --------------------------------------------------------------------------------- */

/* The page is the one that the epoch has mapped. */
static bool is_same_page(const struct kvist_epoch *epoch, int fd)
{
    struct stat info;
    return fstat(fd, &info) == 0 && info.st_dev == epoch->page_device &&
           info.st_ino == epoch->page_inode;
}

/* Make an epoch that was found again the current one. */
static void resume_locked(struct kvist_client *client, struct kvist_epoch *epoch)
{
    if (client->current == epoch) {
        return;
    }
    for (struct kvist_epoch **link = &client->retired; *link != NULL; link = &(*link)->next) {
        if (*link == epoch) {
            *link = epoch->next;
            break;
        }
    }
    epoch->next = NULL;
    kvist_epoch_retire_locked(client);
    client->current = epoch;
}

/* Continue the epoch of this arena, or start one. */
static enum kvist_status
enter_epoch(struct kvist_client *client, uint64_t instance, int page_fd, struct kvist_error *err)
{
    (void)pthread_mutex_lock(client->lock);
    struct kvist_epoch *epoch = kvist_epoch_find_locked(client, instance);
    enum kvist_status status = KVIST_OK;
    if (epoch != NULL && is_same_page(epoch, page_fd)) {
        resume_locked(client, epoch);
    } else if (epoch != NULL) {
        /* The daemon has forgotten this session, and with it our leases: no more of them, and
         * another try when the last one is given back. */
        if (epoch == client->current) {
            kvist_epoch_retire_locked(client);
        }
        status = kvist_error_set(
            err, KVIST_STALE, 0, "peer", "the daemon replaced the page of this session");
    }
    (void)pthread_mutex_unlock(client->lock);
    if (status != KVIST_OK || epoch != NULL) {
        return status;
    }
    status = kvist_epoch_create(client, instance, page_fd, &epoch, err);
    if (status == KVIST_OK) {
        (void)pthread_mutex_lock(client->lock);
        kvist_epoch_retire_locked(client);
        client->current = epoch;
        (void)pthread_mutex_unlock(client->lock);
    }
    return status;
}

/* The daemon may know of pools that were closed while it was away. */
static void close_absent_locked(struct kvist_client *client)
{
    client->closing = 0;
    for (uint32_t ordinal = 0; client->current != NULL && ordinal < KVIST_SESSION_POOLS_MAX;
         ordinal++) {
        client->closing |= find_ordinal(client, ordinal) == NULL ? 1U << ordinal : 0U;
    }
    kvist_link_close_pools_locked(client);
}

static enum kvist_status receive_hello(struct kvist_client *client,
                                       const Kvist__Wire__Envelope *envelope,
                                       int fd,
                                       struct kvist_error *err)
{
    const Kvist__Wire__HelloReply *reply = envelope->hello_reply;
    if (client->link != KVIST_LINK_HELLO || envelope->id != client->hello_id) {
        return nonsense("an unexpected hello_reply", err);
    }
    if (reply->wire_major != KVIST_WIRE_MAJOR) {
        (void)pthread_mutex_lock(client->lock);
        client->refused = true;
        client->backoff_us = KVIST_BACKOFF_US_MAX;
        (void)pthread_mutex_unlock(client->lock);
        return kvist_error_set(err,
                               KVIST_VERSION,
                               0,
                               "peer",
                               "kvistd speaks version %u of the protocol, this library %u",
                               reply->wire_major,
                               KVIST_WIRE_MAJOR);
    }
    if ((client->role != KVIST_ROLE_TOOL) != (fd >= 0) || reply->instance == 0) {
        return nonsense("a hello_reply that does not fit", err);
    }
    if (fd >= 0) {
        enum kvist_status status = enter_epoch(client, reply->instance, fd, err);
        if (status != KVIST_OK) {
            return status;
        }
    }
    (void)pthread_mutex_lock(client->lock);
    client->link = KVIST_LINK_UP;
    client->up_since_us = kvist_clock_now_us();
    client->refused = false;
    client->stats.connects++;
    close_absent_locked(client);
    for (uint32_t index = 0; index < KVIST_SESSION_POOLS_MAX; index++) {
        if (client->pools[index] != NULL) {
            kvist_link_open_pool_locked(client, client->pools[index]);
        }
    }
    (void)pthread_mutex_unlock(client->lock);
    return KVIST_OK;
}

/* --- Pools --------------------------------------------------------------------------------- */

static struct kvist_pool *find_request_locked(const struct kvist_client *client, uint64_t id)
{
    for (uint32_t index = 0; index < KVIST_SESSION_POOLS_MAX; index++) {
        struct kvist_pool *pool = client->pools[index];
        if (pool != NULL && pool->state == KVIST_POOL_ASKED && pool->request_id == id) {
            return pool;
        }
    }
    return NULL;
}

static void refuse_locked(struct kvist_pool *pool, const struct kvist_error *why)
{
    pool->state = KVIST_POOL_REFUSED;
    pool->refusal = *why;
    pool->client->last_error = *why;
    if (kvist_status_retry(why->status) != KVIST_RETRY_NEVER) {
        pool->retry_at_us = kvist_clock_now_us() + POOL_RETRY_US;
    }
}

/* Whether a new map can stand in for the view's. */
static bool map_fits(const struct kvist_view *view, const struct kvist_map_header *header)
{
    return memcmp(header->pool_id, view->pool_id, KVIST_KEY_BYTES) == 0 &&
           header->slot_bytes == view->map.header.slot_bytes &&
           header->slots_per_segment == view->map.header.slots_per_segment &&
           header->segment_max >= view->map.header.segment_max;
}

static void swap_maps(struct kvist_map_view *one, struct kvist_map_view *other)
{
    struct kvist_map_view kept = *one;
    *one = *other;
    *other = kept;
}

/* Open a pool's view, or continue it with its present map. `map` is what remains to be closed. */
static enum kvist_status enter_view_locked(struct kvist_pool *pool,
                                           const Kvist__Wire__PoolReply *reply,
                                           struct kvist_map_view *map,
                                           struct kvist_view **fresh,
                                           struct kvist_error *err)
{
    struct kvist_epoch *epoch = pool->client->current;
    struct kvist_view *view = epoch->views[pool->index];
    struct kvist_pool *same = find_ordinal(pool->client, reply->pool);
    if (same != NULL && same != pool) {
        (void)kvist_error_set(
            err, KVIST_INVALID, 0, "client", "a pool of this identity is open already");
        refuse_locked(pool, err);
        return KVIST_OK;
    }
    if (view != NULL && (view->ordinal != reply->pool || !map_fits(view, &map->header))) {
        return nonsense("another pool than before under the same identity", err);
    }
    if (view == NULL) {
        view = *fresh;
        *fresh = NULL;
        view->ordinal = reply->pool;
        memcpy(view->pool_id, map->header.pool_id, KVIST_KEY_BYTES);
        epoch->views[pool->index] = view;
    }
    swap_maps(&view->map, map);
    pool->client->closing &= ~(1U << reply->pool);
    pool->state = KVIST_POOL_OPEN;
    pool->refusal.status = KVIST_OK;
    kvist_grant_return_due_locked(pool->client, pool);
    return KVIST_OK;
}

static enum kvist_status receive_pool(struct kvist_client *client,
                                      const Kvist__Wire__Envelope *envelope,
                                      int fd,
                                      struct kvist_error *err)
{
    const Kvist__Wire__PoolReply *reply = envelope->pool_reply;
    struct kvist_map_view map;
    enum kvist_status status = kvist_map_view_open(fd, reply->map_bytes, &map, err);
    if (status != KVIST_OK) {
        return status;
    }
    struct kvist_view *fresh = kvist_client_alloc(1, sizeof(*fresh));
    if (fresh == NULL) {
        kvist_map_view_close(&map);
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "client", "no memory for a pool");
    }
    (void)pthread_mutex_lock(client->lock);
    struct kvist_pool *pool = find_request_locked(client, envelope->id);
    bool closed = pool == NULL && envelope->id <= client->request_id_last;
    if (closed) { /* while the request was on its way */
        client->closing |= find_ordinal(client, reply->pool) == NULL ? 1U << reply->pool : 0U;
    } else if (pool == NULL || client->current == NULL ||
               memcmp(map.header.pool_id, reply->pool_id.data, KVIST_KEY_BYTES) != 0 ||
               map.header.slot_bytes != pool->slot_bytes ||
               reply->slots_per_segment != map.header.slots_per_segment) {
        status = nonsense("a pool_reply that does not fit", err);
    } else {
        status = enter_view_locked(pool, reply, &map, &fresh, err);
    }
    (void)pthread_mutex_unlock(client->lock);
    kvist_map_view_close(&map); /* the one that was replaced, or not wanted */
    free(fresh);
    return status;
}

static enum kvist_status receive_pool_map(struct kvist_client *client,
                                          const Kvist__Wire__PoolMap *message,
                                          int fd,
                                          struct kvist_error *err)
{
    struct kvist_map_view map;
    enum kvist_status status = kvist_map_view_open(fd, message->map_bytes, &map, err);
    if (status != KVIST_OK) {
        return status;
    }
    (void)pthread_mutex_lock(client->lock);
    struct kvist_pool *pool = find_ordinal(client, message->pool);
    if (pool != NULL) { /* else it was closed meanwhile */
        struct kvist_view *view = client->current->views[pool->index];
        if (map_fits(view, &map.header)) {
            swap_maps(&view->map, &map);
        } else {
            status = nonsense("a pool_map that does not fit", err);
        }
    }
    (void)pthread_mutex_unlock(client->lock);
    kvist_map_view_close(&map);
    return status;
}

static enum kvist_status receive_failure(struct kvist_client *client,
                                         const Kvist__Wire__Envelope *envelope,
                                         struct kvist_error *err)
{
    const Kvist__Wire__Failure *failure = envelope->failure;
    enum kvist_status status = kvist_status_from_wire(failure->status);
    status = status == KVIST_OK ? KVIST_PROTOCOL : status;
    (void)kvist_error_set(err, status, 0, "kvistd", "%s", failure->text);
    (void)pthread_mutex_lock(client->lock);
    struct kvist_pool *pool = find_request_locked(client, envelope->id);
    if (pool != NULL) {
        refuse_locked(pool, err);
        status = KVIST_OK;
    } else if (client->link == KVIST_LINK_HELLO) {
        client->refused = kvist_status_retry(status) == KVIST_RETRY_NEVER;
        client->backoff_us = KVIST_BACKOFF_US_MAX;
    }
    (void)pthread_mutex_unlock(client->lock);
    return status;
}

/* --- Segments ------------------------------------------------------------------------------ */

static void post_mapped_locked(struct kvist_client *client, const Kvist__Wire__Segment *segment)
{
    Kvist__Wire__Mapped mapped;
    kvist__wire__mapped__init(&mapped);
    mapped.pool = segment->pool;
    mapped.segment = segment->segment;
    mapped.serial = segment->serial;
    Kvist__Wire__Envelope envelope;
    kvist__wire__envelope__init(&envelope);
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_MAPPED;
    envelope.mapped = &mapped;
    (void)kvist_link_post_locked(client, &envelope);
}

/* The segment can be used: say so in the page, then in a message. */
static void publish_mapped_locked(struct kvist_client *client, const Kvist__Wire__Segment *segment)
{
    atomic_store_explicit(
        kvist_page_mapped(client->current, client->rank, segment->pool, segment->segment),
        segment->serial,
        memory_order_release);
    post_mapped_locked(client, segment);
}

static enum kvist_status check_segment(const struct kvist_view *view,
                                       const Kvist__Wire__Segment *segment,
                                       int fd,
                                       struct kvist_error *err)
{
    uint64_t bytes = 0;
    const struct kvist_map_header *header = &view->map.header;
    enum kvist_status status = kvist_memfd_check(fd, &bytes, err);
    if (status != KVIST_OK) {
        return status;
    }
    if (segment->segment >= header->segment_max || segment->serial == 0 ||
        bytes != segment->bytes || bytes > KVIST_SEGMENT_BYTES_MAX ||
        bytes / header->slot_bytes < header->slots_per_segment) {
        return nonsense("a segment that does not fit its pool", err);
    }
    const struct kvist_segment_view *mapped = &view->segments[segment->segment];
    if (mapped->base != NULL && mapped->serial != segment->serial) {
        return nonsense("a segment in place of one that is mapped", err);
    }
    return KVIST_OK;
}

/* Map a new segment. Only the pumping thread changes views, so `view` stays. */
static enum kvist_status map_segment(struct kvist_client *client,
                                     struct kvist_pool *pool,
                                     struct kvist_view *view,
                                     const Kvist__Wire__Segment *message,
                                     int fd)
{
    struct kvist_error why = KVIST_ERROR_INIT;
    void *base = NULL;
    enum kvist_memfd_access access = pool->read_only ? KVIST_MEMFD_READ : KVIST_MEMFD_WRITE;
    if (kvist_memfd_map(fd, message->bytes, access, &base, &why) != KVIST_OK) {
        /* Blocks in it are misses; the daemon offers it again after the next connect. */
        (void)pthread_mutex_lock(client->lock);
        client->last_error = why;
        (void)pthread_mutex_unlock(client->lock);
        return KVIST_OK;
    }
    kvist_memfd_populate_page_table(base, message->bytes);
    if (client->segment_mapped != NULL) {
        client->segment_mapped(client->ctx, pool, base, message->bytes);
    }
    (void)pthread_mutex_lock(client->lock);
    struct kvist_segment_view *segment = &view->segments[message->segment];
    segment->base = base;
    segment->bytes = message->bytes;
    segment->serial = message->serial;
    segment->leaving = false;
    view->mapped_count++;
    view->mapped_bytes += message->bytes;
    publish_mapped_locked(client, message);
    (void)pthread_mutex_unlock(client->lock);
    return KVIST_OK;
}

static enum kvist_status receive_segment(struct kvist_client *client,
                                         const Kvist__Wire__Segment *message,
                                         int fd,
                                         struct kvist_error *err)
{
    if (!client->maps) {
        return nonsense("a segment to a process that maps none", err);
    }
    (void)pthread_mutex_lock(client->lock);
    struct kvist_pool *pool = find_ordinal(client, message->pool);
    if (pool == NULL) { /* closed meanwhile */
        kvist_link_post_unmapped_locked(client, message->pool, message->segment, message->serial);
        (void)pthread_mutex_unlock(client->lock);
        return KVIST_OK;
    }
    struct kvist_view *view = client->current->views[pool->index];
    enum kvist_status status = check_segment(view, message, fd, err);
    bool is_mapped = status == KVIST_OK && view->segments[message->segment].base != NULL;
    if (is_mapped && !view->segments[message->segment].leaving) {
        publish_mapped_locked(client, message);
    }
    (void)pthread_mutex_unlock(client->lock);
    if (status != KVIST_OK || is_mapped) {
        return status;
    }
    return map_segment(client, pool, view, message, fd);
}

/* The record goes first, so that no lease is made any more; the sweep unmaps and answers. */
static enum kvist_status receive_revoke(struct kvist_client *client,
                                        const Kvist__Wire__Revoke *message,
                                        struct kvist_error *err)
{
    if (message->segment >= KVIST_SEGMENTS_MAX) {
        return nonsense("a revoke of no segment", err);
    }
    (void)pthread_mutex_lock(client->lock);
    struct kvist_pool *pool = find_ordinal(client, message->pool);
    struct kvist_view *view = pool != NULL ? client->current->views[pool->index] : NULL;
    struct kvist_segment_view *segment = view != NULL ? &view->segments[message->segment] : NULL;
    if (segment != NULL && segment->base != NULL && segment->serial == message->serial) {
        view->leaving_count += !segment->leaving;
        segment->leaving = true;
        atomic_store_explicit(
            kvist_page_mapped(client->current, client->rank, view->ordinal, message->segment),
            0,
            memory_order_relaxed);
    } else {
        kvist_link_post_unmapped_locked(client, message->pool, message->segment, message->serial);
    }
    (void)pthread_mutex_unlock(client->lock);
    return KVIST_OK;
}

/* --- Grants -------------------------------------------------------------------------------- */

static enum kvist_status receive_grant(struct kvist_client *client,
                                       const Kvist__Wire__Grant *message,
                                       struct kvist_error *err)
{
    if (!client->schedules) {
        return nonsense("a grant to a process that takes none", err);
    }
    enum kvist_status status = KVIST_OK;
    (void)pthread_mutex_lock(client->lock);
    struct kvist_pool *pool = find_ordinal(client, message->pool);
    if (pool != NULL) {
        status = kvist_grant_receive_locked(
            client, pool, client->current->views[pool->index], message, err);
    }
    (void)pthread_mutex_unlock(client->lock);
    return status;
}

static enum kvist_status receive_recall(struct kvist_client *client,
                                        const Kvist__Wire__Recall *message,
                                        struct kvist_error *err)
{
    if (!client->schedules) {
        return nonsense("a recall to a process that takes no grants", err);
    }
    (void)pthread_mutex_lock(client->lock);
    struct kvist_pool *pool = find_ordinal(client, message->pool);
    if (pool != NULL) { /* else it was closed meanwhile, and gave all back */
        kvist_grant_give_back_locked(client, pool, message->count);
    }
    (void)pthread_mutex_unlock(client->lock);
    return KVIST_OK;
}

/* --- Dispatch ------------------------------------------------------------------------------ */

static enum kvist_status receive_body(struct kvist_client *client,
                                      const Kvist__Wire__Envelope *envelope,
                                      int fd,
                                      struct kvist_error *err)
{
    /* Not an enum for the compiler: protobuf-c's has members that only make it an int. */
    switch ((int)envelope->body_case) {
    case KVIST__WIRE__ENVELOPE__BODY_HELLO_REPLY:
        return receive_hello(client, envelope, fd, err);
    case KVIST__WIRE__ENVELOPE__BODY_FAILURE:
        return receive_failure(client, envelope, err);
    case KVIST__WIRE__ENVELOPE__BODY_POOL_REPLY:
        return receive_pool(client, envelope, fd, err);
    case KVIST__WIRE__ENVELOPE__BODY_GRANT:
        return receive_grant(client, envelope->grant, err);
    case KVIST__WIRE__ENVELOPE__BODY_RECALL:
        return receive_recall(client, envelope->recall, err);
    case KVIST__WIRE__ENVELOPE__BODY_SEGMENT:
        return receive_segment(client, envelope->segment, fd, err);
    case KVIST__WIRE__ENVELOPE__BODY_POOL_MAP:
        return receive_pool_map(client, envelope->pool_map, fd, err);
    case KVIST__WIRE__ENVELOPE__BODY_REVOKE:
        return receive_revoke(client, envelope->revoke, err);
    case KVIST__WIRE__ENVELOPE__BODY_PROMOTED:
        return KVIST_OK; /* probing tells */
    default:
        return nonsense("a reply that was not asked for", err);
    }
}

enum kvist_status kvist_receive(struct kvist_client *client,
                                const Kvist__Wire__Envelope *envelope,
                                int fd,
                                struct kvist_error *err)
{
    bool early = client->link == KVIST_LINK_HELLO &&
                 envelope->body_case != KVIST__WIRE__ENVELOPE__BODY_HELLO_REPLY &&
                 envelope->body_case != KVIST__WIRE__ENVELOPE__BODY_FAILURE;
    enum kvist_status status = early ? nonsense("a message before hello_reply", err)
                                     : receive_body(client, envelope, fd, err);
    if (fd >= 0) {
        (void)close(fd);
    }
    return status;
}
