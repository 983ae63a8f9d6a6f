#include "client/core.h"
#include "proto/key/checksum.h"
#include "proto/key/key.h"

/* A block that was found, and where. */
struct found_block {
    uint32_t position;
    struct kvist_entry_copy entry;
};

/* --- Finding ------------------------------------------------------------------------------- */

/* The segment is live and every rank of the session has it mapped. */
static bool
is_segment_mapped(const struct kvist_epoch *epoch, const struct kvist_view *view, uint32_t segment)
{
    const struct kvist_segment_entry *entry = kvist_map_segment(&view->map, segment);
    uint32_t serial = atomic_load_explicit(&entry->serial, memory_order_relaxed);
    if (serial == 0 ||
        atomic_load_explicit(&entry->state, memory_order_relaxed) != KVIST_SEGMENT_LIVE) {
        return false;
    }
    for (uint32_t rank = 0; rank < epoch->page_header.rank_count; rank++) {
        if (atomic_load_explicit(kvist_page_mapped(epoch, rank, view->ordinal, segment),
                                 memory_order_acquire) != serial) {
            return false;
        }
    }
    return true;
}

/* Where a key is; READY only when it could be leased. `unmapped` counts what a rank lacks. */
static enum kvist_probe find_block(const struct kvist_epoch *epoch,
                                   const struct kvist_view *view,
                                   const uint8_t *key,
                                   struct found_block *found_out,
                                   uint64_t *unmapped)
{
    const struct kvist_map_header *header = &view->map.header;
    found_out->position = kvist_index_find(kvist_map_index(&view->map),
                                           header->index_capacity,
                                           header->index_seed,
                                           key,
                                           &found_out->entry);
    if (found_out->position == KVIST_ENTRY_NONE) {
        return KVIST_PROBE_MISS;
    }
    if (found_out->entry.state == KVIST_ENTRY_NVME) {
        return KVIST_PROBE_NVME;
    }
    if (found_out->entry.state == KVIST_ENTRY_LOADING) {
        return KVIST_PROBE_LOADING;
    }
    if (found_out->entry.state != KVIST_ENTRY_READY || found_out->entry.slot >= header->slot_max) {
        return KVIST_PROBE_MISS;
    }
    if (!is_segment_mapped(epoch, view, found_out->entry.slot / header->slots_per_segment)) {
        (*unmapped)++;
        return KVIST_PROBE_MISS;
    }
    return KVIST_PROBE_READY;
}

static size_t batch_of(size_t done, size_t count)
{
    return count - done < KVIST_BATCH_KEYS ? count - done : KVIST_BATCH_KEYS;
}

enum kvist_status kvist_pool_probe(struct kvist_pool *pool,
                                   const uint8_t *keys,
                                   size_t key_count,
                                   uint8_t *probes_out)
{
    struct kvist_client *client = pool->client;
    KVIST_CHECK_OR(pool->magic == KVIST_POOL_MAGIC, KVIST_BUG);
    if (key_count > KVIST_KEYS_MAX) {
        return KVIST_INVALID;
    }
    for (size_t done = 0; done < key_count;) {
        size_t end = done + batch_of(done, key_count);
        uint64_t unmapped = 0;
        kvist_client_lock_soon(client);
        const struct kvist_view *view = kvist_view_current_locked(pool);
        for (; done < end; done++) {
            struct found_block found;
            probes_out[done] =
                view == NULL
                    ? KVIST_PROBE_MISS
                    : (uint8_t)find_block(
                          client->current, view, keys + done * KVIST_KEY_BYTES, &found, &unmapped);
        }
        (void)pthread_mutex_unlock(client->lock);
    }
    return KVIST_OK;
}

/* --- Leasing ------------------------------------------------------------------------------- */

static bool take_record(struct kvist_epoch *epoch, uint32_t *record_out)
{
    if (epoch->free_count > 0) {
        *record_out = epoch->free_records[--epoch->free_count];
        return true;
    }
    if (epoch->lease_next == epoch->page_header.lease_max) {
        return false;
    }
    *record_out = epoch->lease_next++;
    atomic_store_explicit(
        &kvist_page_shared_header(epoch)->lease_high, epoch->lease_next, memory_order_relaxed);
    return true;
}

static void free_record(struct kvist_epoch *epoch, uint32_t record)
{
    atomic_store_explicit(&kvist_page_lease(epoch, record)->ref, 0, memory_order_release);
    epoch->free_records[epoch->free_count++] = record;
}

/* After the fence: the entry, the map and the ranks are as they were found. */
static bool is_still_there(const struct kvist_epoch *epoch,
                           const struct kvist_view *view,
                           const struct found_block *found)
{
    struct kvist_entry_copy again;
    return kvist_entry_read(&kvist_map_index(&view->map)[found->position], &again) &&
           again.state == KVIST_ENTRY_READY && again.slot == found->entry.slot &&
           again.generation == found->entry.generation &&
           memcmp(again.key, found->entry.key, sizeof(again.key)) == 0 &&
           atomic_load_explicit(&kvist_map_shared_header(&view->map)->moved,
                                memory_order_relaxed) == 0 &&
           is_segment_mapped(epoch, view, found->entry.slot / view->map.header.slots_per_segment);
}

/*
 * Lease one block that was found READY; see the protocol in layout.h. The record is written, then
 * the fence, then everything is read again: the entry and the map against the daemon's eviction,
 * the mapped records against a rank that leaves the arena (epoch.c has its side of the fence).
 */
static bool lease_block(struct kvist_client *client,
                        struct kvist_view *view,
                        const struct found_block *found,
                        uint32_t record,
                        struct kvist_lease *lease_out)
{
    struct kvist_epoch *epoch = client->current;
    struct kvist_lease_record *shared = kvist_page_lease(epoch, record);
    uint32_t slot = found->entry.slot;
    atomic_store_explicit(&shared->generation, found->entry.generation, memory_order_relaxed);
    atomic_store_explicit(&shared->ref, kvist_slot_ref(view->ordinal, slot), memory_order_release);
    kvist_lease_fence();
    uint64_t block_bytes = 0;
    if (is_still_there(epoch, view, found)) {
        block_bytes = atomic_load_explicit(&kvist_map_slot(&view->map, slot)->block_bytes,
                                           memory_order_relaxed);
    }
    if (block_bytes == 0 || block_bytes > view->map.header.slot_bytes) {
        free_record(epoch, record);
        return false;
    }
    view->leases++;
    *lease_out = (struct kvist_lease){
        .instance = epoch->instance,
        .generation = found->entry.generation,
        .block_bytes = block_bytes,
        .slot = slot,
        .record = record,
    };
    return true;
}

/* Lease up to `count` keys. @return how many; *stop_out as for acquire, *full_out: no records. */
static size_t acquire_locked(struct kvist_pool *pool,
                             const uint8_t *keys,
                             size_t count,
                             struct kvist_lease *leases_out,
                             enum kvist_probe *stop_out,
                             bool *full_out)
{
    struct kvist_client *client = pool->client;
    struct kvist_view *view = kvist_view_current_locked(pool);
    *stop_out = view == NULL ? KVIST_PROBE_MISS : KVIST_PROBE_READY;
    size_t done = 0;
    while (view != NULL && done < count) {
        struct found_block found;
        uint32_t record = 0;
        enum kvist_probe probe = find_block(client->current,
                                            view,
                                            keys + done * KVIST_KEY_BYTES,
                                            &found,
                                            &client->stats.unmapped_misses);
        if (probe != KVIST_PROBE_READY) {
            *stop_out = probe;
            break;
        }
        if (!take_record(client->current, &record)) {
            *full_out = true;
            break;
        }
        if (!lease_block(client, view, &found, record, &leases_out[done])) {
            client->stats.lease_races++;
            *stop_out = KVIST_PROBE_MISS;
            break;
        }
        done++;
    }
    client->stats.hits += done;
    client->stats.misses += *stop_out != KVIST_PROBE_READY;
    return done;
}

/* --- Touching ------------------------------------------------------------------------------ */

static void touch_slot(struct kvist_epoch *epoch, const struct kvist_view *view, uint32_t slot)
{
    struct kvist_page_header *shared = kvist_page_shared_header(epoch);
    _Atomic uint64_t *ring = kvist_page_at(epoch, epoch->page_header.touch_offset);
    uint64_t head = atomic_load_explicit(&shared->touch_head, memory_order_relaxed);
    atomic_store_explicit(&ring[head % KVIST_TOUCH_RING_COUNT],
                          kvist_slot_ref(view->ordinal, slot),
                          memory_order_relaxed);
    atomic_store_explicit(&shared->touch_head, head + 1, memory_order_release);
}

/* From the tail, so that leaves are older than the prefix that they stand on. */
static void
touch_leases_locked(struct kvist_pool *pool, const struct kvist_lease *leases, size_t lease_count)
{
    const struct kvist_view *view = kvist_view_current_locked(pool);
    struct kvist_epoch *epoch = pool->client->current;
    while (view != NULL && lease_count-- > 0) {
        if (leases[lease_count].instance == epoch->instance) {
            touch_slot(epoch, view, leases[lease_count].slot);
        }
    }
}

void kvist_pool_touch(struct kvist_pool *pool, const uint8_t *keys, size_t key_count)
{
    struct kvist_client *client = pool->client;
    if (!client->schedules || key_count > KVIST_KEYS_MAX) {
        return;
    }
    while (key_count > 0) {
        uint64_t unmapped = 0;
        kvist_client_lock_soon(client);
        const struct kvist_view *view = kvist_view_current_locked(pool);
        size_t batch = batch_of(0, key_count);
        while (batch-- > 0) {
            struct found_block found;
            key_count--;
            if (view != NULL &&
                find_block(
                    client->current, view, keys + key_count * KVIST_KEY_BYTES, &found, &unmapped) ==
                    KVIST_PROBE_READY) {
                touch_slot(client->current, view, found.entry.slot);
            }
        }
        (void)pthread_mutex_unlock(client->lock);
    }
}

/* --- Acquire and release ------------------------------------------------------------------- */

enum kvist_status kvist_pool_acquire(struct kvist_pool *pool,
                                     const uint8_t *keys,
                                     size_t key_count,
                                     struct kvist_lease *leases_out,
                                     size_t *lease_count_out,
                                     enum kvist_probe *stop_out)
{
    struct kvist_client *client = pool->client;
    KVIST_CHECK_OR(pool->magic == KVIST_POOL_MAGIC, KVIST_BUG);
    if (key_count > KVIST_KEYS_MAX || !client->schedules) {
        return KVIST_INVALID;
    }
    enum kvist_probe stop = KVIST_PROBE_READY;
    bool full = false;
    size_t done = 0;
    while (done < key_count && stop == KVIST_PROBE_READY && !full) {
        size_t batch = batch_of(done, key_count);
        kvist_client_lock_soon(client);
        done += acquire_locked(
            pool, keys + done * KVIST_KEY_BYTES, batch, leases_out + done, &stop, &full);
        (void)pthread_mutex_unlock(client->lock);
    }
    kvist_client_lock_soon(client);
    touch_leases_locked(pool, leases_out, done);
    (void)pthread_mutex_unlock(client->lock);
    *lease_count_out = done;
    *stop_out = stop;
    return full ? KVIST_BUSY : KVIST_OK;
}

static void release_locked(struct kvist_pool *pool, const struct kvist_lease *lease)
{
    struct kvist_epoch *epoch = kvist_epoch_find_locked(pool->client, lease->instance);
    struct kvist_view *view = epoch != NULL ? epoch->views[pool->index] : NULL;
    if (view == NULL || lease->record >= epoch->lease_next) {
        return;
    }
    const struct kvist_lease_record *record = kvist_page_lease(epoch, lease->record);
    /* Given back twice, or not ours: the record names something else. */
    if (atomic_load_explicit(&record->ref, memory_order_relaxed) ==
            kvist_slot_ref(view->ordinal, lease->slot) &&
        atomic_load_explicit(&record->generation, memory_order_relaxed) == lease->generation) {
        free_record(epoch, lease->record);
        view->leases--;
    }
}

void kvist_pool_release(struct kvist_pool *pool,
                        const struct kvist_lease *leases,
                        size_t lease_count)
{
    struct kvist_client *client = pool->client;
    for (size_t done = 0; done < lease_count && client->schedules;) {
        size_t end = done + batch_of(done, lease_count);
        kvist_client_lock_soon(client);
        for (; done < end; done++) {
            release_locked(pool, &leases[done]);
        }
        bool wakes = client->retired != NULL;
        (void)pthread_mutex_unlock(client->lock);
        if (wakes) {
            kvist_client_wake(client);
        }
    }
}

/* --- Prefetch ------------------------------------------------------------------------------ */

/* protobuf-c takes what it only reads as not const. */
static ProtobufCBinaryData wire_key(const uint8_t *key)
{
    ProtobufCBinaryData data = {.len = KVIST_KEY_BYTES};
    memcpy(&data.data, &key, sizeof(key));
    return data;
}

static enum kvist_status
post_prefetch_locked(struct kvist_pool *pool, const uint8_t *keys, size_t key_count)
{
    ProtobufCBinaryData list[KVIST_BATCH_KEYS];
    const struct kvist_view *view = kvist_view_current_locked(pool);
    if (view == NULL || pool->state != KVIST_POOL_OPEN) {
        pool->client->stats.dropped_messages++;
        return KVIST_UNAVAILABLE;
    }
    for (size_t index = 0; index < key_count; index++) {
        list[index] = wire_key(keys + index * KVIST_KEY_BYTES);
    }
    Kvist__Wire__Prefetch prefetch;
    kvist__wire__prefetch__init(&prefetch);
    prefetch.pool = view->ordinal;
    prefetch.n_keys = key_count;
    prefetch.keys = list;
    Kvist__Wire__Envelope envelope;
    kvist__wire__envelope__init(&envelope);
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_PREFETCH;
    envelope.prefetch = &prefetch;
    return kvist_link_post_locked(pool->client, &envelope);
}

enum kvist_status
kvist_pool_prefetch(struct kvist_pool *pool, const uint8_t *keys, size_t key_count)
{
    struct kvist_client *client = pool->client;
    KVIST_CHECK_OR(pool->magic == KVIST_POOL_MAGIC, KVIST_BUG);
    if (key_count > KVIST_KEYS_MAX || !client->schedules) {
        return KVIST_INVALID;
    }
    enum kvist_status status = KVIST_OK;
    for (size_t done = 0; done < key_count && status == KVIST_OK;) {
        size_t batch = batch_of(done, key_count);
        kvist_client_lock_soon(client);
        status = post_prefetch_locked(pool, keys + done * KVIST_KEY_BYTES, batch);
        (void)pthread_mutex_unlock(client->lock);
        done += batch;
    }
    return status;
}

/* --- Verify -------------------------------------------------------------------------------- */

/* Tell the daemon, which looks for itself. Lost when it is away: who verifies next tells again. */
static void post_suspect_locked(struct kvist_pool *pool, const uint8_t *key, uint64_t instance)
{
    struct kvist_client *client = pool->client;
    const struct kvist_view *view = kvist_view_current_locked(pool);
    if (view == NULL || pool->state != KVIST_POOL_OPEN || client->current->instance != instance) {
        return;
    }
    ProtobufCBinaryData suspected = wire_key(key);
    Kvist__Wire__Suspect suspect;
    kvist__wire__suspect__init(&suspect);
    suspect.pool = view->ordinal;
    suspect.n_keys = 1;
    suspect.keys = &suspected;
    Kvist__Wire__Envelope envelope;
    kvist__wire__envelope__init(&envelope);
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_SUSPECT;
    envelope.suspect = &suspect;
    (void)kvist_link_post_locked(client, &envelope);
}

enum kvist_status kvist_pool_verify(struct kvist_pool *pool,
                                    const uint8_t key[KVIST_KEY_BYTES],
                                    uint64_t instance,
                                    uint32_t slot,
                                    const void *address,
                                    uint64_t block_bytes)
{
    struct kvist_client *client = pool->client;
    KVIST_CHECK_OR(pool->magic == KVIST_POOL_MAGIC, KVIST_BUG);
    uint8_t pool_id[KVIST_KEY_BYTES];
    uint64_t expected = 0;
    enum kvist_status status = KVIST_STALE;
    kvist_client_lock_soon(client);
    const struct kvist_epoch *epoch = kvist_epoch_find_locked(client, instance);
    const struct kvist_view *view = epoch != NULL ? epoch->views[pool->index] : NULL;
    if (view != NULL && (slot >= view->map.header.slot_max || block_bytes > pool->slot_bytes)) {
        status = KVIST_INVALID;
    } else if (view != NULL) {
        const struct kvist_slot_entry *entry = kvist_map_slot(&view->map, slot);
        uint32_t flags = atomic_load_explicit(&entry->flags, memory_order_acquire);
        expected = atomic_load_explicit(&entry->checksum, memory_order_relaxed);
        memcpy(pool_id, view->pool_id, sizeof(pool_id));
        status = (flags & KVIST_SLOT_CHECKSUMMED) != 0 ? KVIST_OK : KVIST_NOT_FOUND;
    }
    (void)pthread_mutex_unlock(client->lock);
    if (status == KVIST_OK &&
        kvist_checksum(address, block_bytes, kvist_key_checksum_seed(key, pool_id)) != expected) {
        status = KVIST_CORRUPT;
        kvist_client_lock_soon(client);
        post_suspect_locked(pool, key, instance);
        (void)pthread_mutex_unlock(client->lock);
    }
    return status;
}
