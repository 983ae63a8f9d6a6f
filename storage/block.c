/*
 * block - what sessions and operators do to blocks: commit, return, clear, inspect.
 */
#include "storage/internal.h"

#include <stdlib.h>

/* --- Commit ---------------------------------------------------------------------------------- */

/* Publish a granted slot. On anything but OK nothing was published. */
static enum kvist_status publish(struct kvist_store_session *session,
                                 struct kvist_store_pool *pool,
                                 const struct kvist_store_commit *commit)
{
    struct kvist_store_stats *stats = &session->store->stats;
    if (pool->slots[commit->slot].epoch != pool->epoch) {
        stats->commits_stale_total++;
        return KVIST_STALE;
    }
    if (!kvist_page_filled(&session->page, commit->ticket, commit->reservation)) {
        stats->commits_unmarked_total++;
        return KVIST_NOT_FOUND;
    }
    struct kvist_entry_copy found = {.extent = 0};
    uint32_t position = kvist_map_find(&pool->map, commit->key, &found);
    if (position != KVIST_ENTRY_NONE && found.state != KVIST_ENTRY_NVME) {
        stats->commits_duplicate_total++;
        return KVIST_EXISTS;
    }
    struct kvist_entry_copy entry = {
        .state = KVIST_ENTRY_READY,
        .slot = commit->slot,
        .extent = found.extent,
        .generation = kvist_slot_generation(pool, commit->slot),
        .parent_tag = commit->parent_tag,
    };
    memcpy(entry.key, commit->key, sizeof(entry.key));
    if (position == KVIST_ENTRY_NONE) {
        position = kvist_map_place(&pool->map, entry.key);
    }
    if (position == KVIST_ENTRY_NONE) {
        stats->index_full_total++;
        return KVIST_NO_SPACE;
    }
    kvist_slot_prepare(pool, commit->slot, commit->block_bytes);
    kvist_slot_publish(pool, commit->slot, position, &entry);
    return KVIST_OK;
}

/* What to say of a grant that is not, or no longer, the session's. */
static enum kvist_status repeated(const struct kvist_store_session *session,
                                  const struct kvist_store_pool *pool,
                                  const struct kvist_store_commit *commit)
{
    const struct kvist_store *store = session->store;
    if (!kvist_roster_reserved(store, commit->reservation)) {
        return KVIST_INVALID;
    }
    struct kvist_entry_copy entry;
    uint32_t position = kvist_map_find(&pool->map, commit->key, &entry);
    bool done = position != KVIST_ENTRY_NONE && entry.state == KVIST_ENTRY_READY &&
                entry.slot == commit->slot &&
                pool->slots[commit->slot].reservation == commit->reservation;
    return done ? KVIST_OK : KVIST_NOT_FOUND;
}

static bool names_grant(const struct kvist_store_session *session,
                        uint32_t ordinal,
                        uint32_t slot,
                        uint32_t ticket,
                        uint64_t reservation)
{
    const struct kvist_ticket *entry = &session->tickets[ticket];
    return entry->slot == slot && entry->ordinal == ordinal &&
           session->attachments[ordinal].pool->slots[slot].reservation == reservation;
}

/* The pool of an ordinal, when slot and ticket are within bounds; else NULL. */
static struct kvist_store_pool *bounded(const struct kvist_store_session *session,
                                        uint32_t ordinal,
                                        uint32_t slot,
                                        uint32_t ticket)
{
    KVIST_CHECK(session->magic == SESSION_MAGIC);
    struct kvist_store_pool *pool = kvist_session_pool(session, ordinal);
    return pool != NULL && ticket < KVIST_GRANTS_MAX && slot < pool->slot_max ? pool : NULL;
}

enum kvist_status kvist_store_commit(struct kvist_store_session *session,
                                     uint32_t ordinal,
                                     const struct kvist_store_commit *commit)
{
    struct kvist_store_stats *stats = &session->store->stats;
    struct kvist_store_pool *pool = bounded(session, ordinal, commit->slot, commit->ticket);
    if (pool == NULL || commit->block_bytes == 0 || commit->block_bytes > pool->about.slot_bytes) {
        stats->commits_refused_total++;
        return KVIST_INVALID;
    }
    if (!names_grant(session, ordinal, commit->slot, commit->ticket, commit->reservation)) {
        enum kvist_status status = repeated(session, pool, commit);
        stats->commits_refused_total += status == KVIST_INVALID;
        return status;
    }
    enum kvist_status status = publish(session, pool, commit);
    kvist_grant_end(session, commit->ticket);
    kvist_grant_committed(&session->attachments[ordinal]);
    if (status != KVIST_OK) {
        kvist_slot_drop(pool, commit->slot);
        return status;
    }
    stats->commits_total++;
    stats->commit_bytes_total += commit->block_bytes;
    if (pool->fresh_count == KVIST_FRESH_MAX) {
        kvist_block_order_fresh(pool);
    }
    pool->fresh[pool->fresh_count++] = commit->slot;
    kvist_spill_queue_sum(pool, commit->slot);
    return KVIST_OK;
}

void kvist_block_order_fresh(struct kvist_store_pool *pool)
{
    /* From the last to the first: of a chain that was committed root first, the root becomes the
       most recent, so that leaves go before the prefix that they stand on. */
    while (pool->fresh_count > 0) {
        uint32_t slot = pool->fresh[--pool->fresh_count];
        if (kvist_slot_state_of(pool, slot) == KVIST_SLOT_READY) {
            pool->ops->renew(pool->policy, slot);
        }
    }
}

enum kvist_status kvist_store_return(struct kvist_store_session *session,
                                     uint32_t ordinal,
                                     uint32_t slot,
                                     uint32_t ticket,
                                     uint64_t reservation)
{
    const struct kvist_store *store = session->store;
    struct kvist_store_pool *pool = bounded(session, ordinal, slot, ticket);
    if (pool == NULL || !kvist_roster_reserved(store, reservation)) {
        return KVIST_INVALID;
    }
    if (!names_grant(session, ordinal, slot, ticket, reservation)) {
        return KVIST_NOT_FOUND;
    }
    bool unwanted = pool->slots[slot].epoch == pool->epoch; /* else a clear made it worthless */
    kvist_grant_end(session, ticket);
    kvist_slot_drop(pool, slot);
    if (unwanted) {
        kvist_grant_rest(session, ordinal);
    }
    session->store->stats.returns_total++;
    return KVIST_OK;
}

/* --- Clear ----------------------------------------------------------------------------------- */

void kvist_block_unpublish_all(struct kvist_store_pool *pool)
{
    (void)kvist_map_clear(&pool->map);
    pool->nvme_blocks = 0;
    pool->fresh_count = 0;
    for (uint32_t index = 0; index < pool->segment_max; index++) {
        if (pool->segments[index].life != KVIST_LIFE_LIVE &&
            pool->segments[index].life != KVIST_LIFE_DRAINING) {
            continue;
        }
        uint32_t first = index * pool->slots_per_segment;
        for (uint32_t slot = first; slot < first + pool->slots_per_segment; slot++) {
            if (kvist_slot_state_of(pool, slot) == KVIST_SLOT_READY) {
                kvist_slot_discard(pool, slot, 0);
            } else {
                pool->slots[slot].entry = KVIST_ENTRY_NONE; /* of a promotion in flight */
            }
        }
    }
    kvist_evict_scan(pool);
    kvist_slot_sweep_retired(pool);
}

enum kvist_status kvist_store_clear(struct kvist_store *store,
                                    struct kvist_store_pool *pool,
                                    kvist_store_done_fn *done,
                                    void *ctx)
{
    KVIST_CHECK(store->magic == STORE_MAGIC && pool->magic == POOL_MAGIC);
    struct kvist_clear *clear =
        pool->clears_waiting < KVIST_POOL_CLEARS_MAX ? malloc(sizeof(*clear)) : NULL;
    if (clear == NULL) {
        return pool->clears_waiting < KVIST_POOL_CLEARS_MAX ? KVIST_NO_MEMORY : KVIST_BUSY;
    }
    pool->clears_waiting++;
    kvist_roster_set_cleared(pool, true);
    pool->epoch++;
    pool->about.generation++;
    atomic_store_explicit(
        &pool->map.header->generation, pool->about.generation, memory_order_relaxed);
    *clear = (struct kvist_clear){
        .next = store->clears,
        .pool = pool,
        .generation = pool->about.generation,
        .durable = store->tier == NULL,
        .status = kvist_store_tier_is_away(store) ? KVIST_UNAVAILABLE : KVIST_OK,
        .blocks = pool->map.live,
        .bytes = pool->block_bytes_ready,
        .done = done,
        .ctx = ctx,
    };
    store->clears = clear;
    kvist_block_unpublish_all(pool);
    pool->tier_knows = false;
    pool->put_wanted = store->options.tier != NULL;
    store->stats.clears_total++;
    return KVIST_OK;
}

void kvist_store_clear_rest(struct kvist_store *store, const char *tenant)
{
    KVIST_CHECK(store->magic == STORE_MAGIC);
    if (!store->tier_loaded) {
        kvist_roster_clear_rest(store, tenant);
    }
}

bool kvist_store_tier_hears(const struct kvist_store *store)
{
    return store->tier != NULL && store->tier_loaded;
}

bool kvist_store_clears_are_durable(const struct kvist_store *store)
{
    bool durable = kvist_store_tier_hears(store) && !kvist_roster_has_rest(store);
    for (uint32_t index = 0; durable && index < store->pool_high; index++) {
        durable = store->pools[index] == NULL || !kvist_roster_is_cleared(store->pools[index]);
    }
    return durable;
}

void kvist_block_pool_durable(struct kvist_store_pool *pool, enum kvist_status status)
{
    for (struct kvist_clear *clear = pool->store->clears; clear != NULL; clear = clear->next) {
        if (clear->pool == pool && clear->generation <= pool->put_generation) {
            clear->durable = true;
            clear->status = status;
        }
    }
}

/* Take those that can be answered. */
static struct kvist_clear *take_finished(struct kvist_store *store)
{
    struct kvist_clear *finished = NULL;
    struct kvist_clear **link = &store->clears;
    while (*link != NULL) {
        struct kvist_clear *clear = *link;
        if (!clear->durable && !store->closing) {
            link = &clear->next;
            continue;
        }
        *link = clear->next;
        clear->pool->clears_waiting--;
        clear->next = finished;
        finished = clear;
    }
    return finished;
}

void kvist_block_turn_clears(struct kvist_store *store)
{
    struct kvist_clear *finished = NULL;
    while ((finished = take_finished(store)) != NULL) { /* a callback may clear another pool */
        while (finished != NULL) {
            struct kvist_clear *clear = finished;
            finished = clear->next;
            clear->done(clear->ctx,
                        clear->durable ? clear->status : KVIST_CLOSED,
                        clear->blocks,
                        clear->bytes);
            free(clear);
        }
    }
}

/* --- Inspect --------------------------------------------------------------------------------- */

enum kvist_status kvist_store_inspect(struct kvist_store_pool *pool,
                                      const uint8_t key[KVIST_KEY_BYTES],
                                      struct kvist_store_block_info *info_out)
{
    KVIST_CHECK(pool->magic == POOL_MAGIC);
    struct kvist_entry_copy entry;
    if (kvist_map_find(&pool->map, key, &entry) == KVIST_ENTRY_NONE) {
        return KVIST_NOT_FOUND;
    }
    struct kvist_store_block_info info = {
        .in_dram = entry.state == KVIST_ENTRY_READY,
        .on_nvme = entry.extent != 0,
        .generation = pool->about.generation,
        .parent_tag = entry.parent_tag,
    };
    if (info.in_dram) {
        const struct kvist_slot_entry *slot = &pool->map.slots[entry.slot];
        info.leased = (pool->leased_seen[entry.slot / 8] >> (entry.slot % 8)) & 1;
        info.block_bytes = kvist_slot_block_bytes(pool, entry.slot);
        info.checksummed = (atomic_load_explicit(&slot->flags, memory_order_relaxed) &
                            KVIST_SLOT_CHECKSUMMED) != 0;
        info.checksum = info.checksummed
                            ? atomic_load_explicit(&slot->checksum, memory_order_relaxed)
                            : 0;
    }
    *info_out = info;
    return KVIST_OK;
}
