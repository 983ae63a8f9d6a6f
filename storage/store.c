/*
 * store - opening, closing, one turn, figures.
 */
#include "proto/base/clock.h"
#include "storage/busy.h"
#include "storage/internal.h"

#include <stdlib.h>

#define DUTY_THREADS  2U
#define JOBS_PER_TURN 64U
#define CHECKSUM_MAX  8U

static enum kvist_status check_options(const struct kvist_store_options *options,
                                       struct kvist_error *err)
{
    if (options->arena_bytes < KVIST_ARENA_BYTES_MIN) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "store",
                               "an arena of %llu bytes is too small; at least %llu are needed",
                               (unsigned long long)options->arena_bytes,
                               KVIST_ARENA_BYTES_MIN);
    }
    if ((uint32_t)options->eviction >= KVIST_EVICTIONS) {
        return kvist_error_set(err, KVIST_INVALID, 0, "store", "there is no such eviction");
    }
    if (options->checksum_threads == 0 || options->checksum_threads > CHECKSUM_MAX) {
        return kvist_error_set(
            err, KVIST_INVALID, 0, "store", "checksum_threads is not 1 to %u", CHECKSUM_MAX);
    }
    return KVIST_OK;
}

static enum kvist_status allocate(struct kvist_store *store)
{
    store->loads = calloc(KVIST_LOADS_MAX, sizeof(store->loads[0]));
    store->holds = calloc(KVIST_HOLDS_MAX, sizeof(store->holds[0]));
    if (store->loads == NULL || store->holds == NULL) {
        return KVIST_NO_MEMORY;
    }
    for (uint32_t index = KVIST_LOADS_MAX; index > 0; index--) {
        store->loads[index - 1].store = store;
        store->loads[index - 1].next = store->load_free;
        store->load_free = &store->loads[index - 1];
    }
    return kvist_spill_init(store);
}

static enum kvist_status start_workers(struct kvist_store *store, struct kvist_error *err)
{
    enum kvist_status status = kvist_workers_create(
        "kvist-sum", store->options.checksum_threads, true, KVIST_SUMS_MAX, &store->idle, err);
    if (status == KVIST_OK) {
        kvist_workers_make_way(store->idle, store->options.make_way ? kvist_busy_open() : -1);
        status = kvist_workers_create(
            "kvist-spill", DUTY_THREADS, false, KVIST_SPILLS_MAX, &store->duty, err);
    }
    if (status == KVIST_OK) {
        status = kvist_workers_create("kvist-populate",
                                      DUTY_THREADS,
                                      false,
                                      KVIST_POOLS_MAX * KVIST_SESSION_POOLS_MAX,
                                      &store->hands,
                                      err);
    }
    return status;
}

enum kvist_status kvist_store_open(const struct kvist_store_options *options,
                                   struct kvist_store **store_out,
                                   struct kvist_error *err)
{
    enum kvist_status status = check_options(options, err);
    if (status != KVIST_OK) {
        return status;
    }
    struct kvist_store *store = calloc(1, sizeof(*store));
    if (store == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "store", "no memory for the store");
    }
    store->magic = STORE_MAGIC;
    store->options = *options;
    store->roster_fd = -1;
    store->now_us = kvist_clock_now_us();
    kvist_spare_init(store);
    status = allocate(store);
    if (status != KVIST_OK) {
        (void)kvist_error_set(err, status, 0, "store", "no memory for the store's queues");
        goto close_store;
    }
    status = kvist_adopt(store, err);
    if (status != KVIST_OK) {
        goto close_store;
    }
    status = start_workers(store, err);
    if (status != KVIST_OK) {
        goto close_store;
    }
    status = kvist_reopen_init(store, err);
    if (status != KVIST_OK) {
        goto close_store;
    }
    *store_out = store;
    return KVIST_OK;

close_store:
    kvist_store_leave(store); /* the next one may have better luck */
    kvist_store_close(&store);
    return status;
}

static void stop_threads(struct kvist_store *store)
{
    store->closing = true;
    store->stop = true;
    kvist_workers_destroy(&store->hands);
    kvist_workers_destroy(&store->duty);
    kvist_workers_destroy(&store->idle);
    kvist_save_turn(store);
    kvist_tier_close(&store->tier);
    kvist_block_turn_clears(store);
}

void kvist_store_make_private(struct kvist_store *store)
{
    bool good = kvist_roster_leave(store, NULL) == KVIST_OK;
    for (uint32_t index = 0; index < store->pool_high; index++) {
        good = (store->pools[index] == NULL ||
                kvist_map_leave(&store->pools[index]->map, NULL) == KVIST_OK) &&
               good;
    }
    KVIST_CHECK(good); /* no memory even for a mapping */
}

void kvist_store_leave(struct kvist_store *store)
{
    if (store == NULL || store->options.keeper.keep == NULL || store->roster == NULL) {
        return;
    }
    KVIST_CHECK(store->magic == STORE_MAGIC);
    stop_threads(store);
    store->roster->adopts = 0; /* whatever it ends of, it is not of what it adopted */
    kvist_store_make_private(store);
    store->left = true;
}

void kvist_store_close(struct kvist_store **store)
{
    if (*store == NULL) {
        return;
    }
    struct kvist_store *old = *store;
    KVIST_CHECK(old->magic == STORE_MAGIC);
    stop_threads(old);
    for (uint32_t index = 0; index < KVIST_SESSIONS_MAX; index++) {
        kvist_store_session_close(&old->sessions[index]);
    }
    for (uint32_t index = 0; index < KVIST_POOLS_MAX; index++) {
        kvist_pool_destroy(&old->pools[index]);
    }
    KVIST_CHECK(old->used_bytes == 0 && old->populated_bytes == 0 && old->draining_bytes == 0);
    if (old->roster != NULL) {
        kvist_roster_forget(old, KVIST_KEPT_ROSTER, 0);
        kvist_roster_fini(old);
    }
    kvist_spare_fini(old);
    free(old->holds);
    free(old->loads);
    kvist_spill_fini(old);
    old->magic = 0;
    free(old);
    *store = NULL;
}

size_t kvist_store_fds(const struct kvist_store *store, int fds_out[4])
{
    size_t count = 0;
    fds_out[count++] = kvist_workers_fd(store->idle);
    fds_out[count++] = kvist_workers_fd(store->duty);
    fds_out[count++] = kvist_workers_fd(store->hands);
    if (store->tier != NULL) {
        fds_out[count++] = kvist_tier_fd(store->tier);
    }
    return count;
}

static void turn_pools(struct kvist_store *store)
{
    for (uint32_t index = 0; index < store->pool_high; index++) {
        struct kvist_store_pool *pool = store->pools[index];
        if (pool == NULL) {
            continue;
        }
        kvist_block_order_fresh(pool);
        kvist_pool_grow_map(pool);
        kvist_pool_put(pool);
        kvist_evict_turn(pool);
        if (pool->lend_wanted) {
            kvist_session_lend(pool);
        }
    }
}

static void turn_sessions(struct kvist_store *store)
{
    /* Another one comes first each time, so that none starves when slots are short. */
    uint32_t first = store->session_turn++ % KVIST_SESSIONS_MAX;
    for (uint32_t step = 0; step < KVIST_SESSIONS_MAX; step++) {
        struct kvist_store_session *session = store->sessions[(first + step) % KVIST_SESSIONS_MAX];
        if (session != NULL) {
            kvist_grant_top_up(session);
            kvist_session_tell_promoted(session);
        }
    }
}

uint64_t kvist_store_instance(const struct kvist_store *store)
{
    return store->roster->instance;
}

void kvist_store_kept(struct kvist_store *store, uint64_t count)
{
    KVIST_CHECK(count <= store->keep_count);
    store->kept_count = count;
    for (uint32_t index = 0; index < store->pool_high; index++) {
        if (store->pools[index] != NULL) {
            kvist_arena_kept(store->pools[index]);
            store->pools[index]->lend_wanted |= store->pools[index]->lend_waits;
            store->pools[index]->lend_waits = false;
        }
    }
}

bool kvist_store_turn(struct kvist_store *store, uint64_t now_us)
{
    KVIST_CHECK(store->magic == STORE_MAGIC);
    store->now_us = now_us;
    store->roster->adopts = 0; /* this one lives */
    bool more = kvist_workers_turn(store->idle, JOBS_PER_TURN) == JOBS_PER_TURN;
    more = kvist_workers_turn(store->duty, JOBS_PER_TURN) == JOBS_PER_TURN || more;
    more = kvist_workers_turn(store->hands, JOBS_PER_TURN) == JOBS_PER_TURN || more;
    if (store->tier != NULL) {
        more = kvist_tier_turn(store->tier) || more;
    }
    kvist_reopen_turn(store);
    for (uint32_t index = 0; index < KVIST_SESSIONS_MAX; index++) {
        if (store->sessions[index] != NULL) {
            kvist_session_drain_touches(store->sessions[index]);
        }
    }
    kvist_tenant_turn(store);
    kvist_evict_shrink(store);
    turn_pools(store);
    kvist_spare_turn(store);
    kvist_evict_turn_retired(store);
    kvist_promote_turn(store);
    turn_sessions(store);
    kvist_spill_turn(store);
    kvist_save_turn(store);
    kvist_block_turn_clears(store);
    return more;
}

/* --- Figures --------------------------------------------------------------------------------- */

static void add_pool(const struct kvist_store_pool *pool, struct kvist_store_stats *stats)
{
    stats->pools++;
    stats->segments += pool->segment_count;
    stats->slots_free += pool->counts[KVIST_SLOT_FREE];
    stats->slots_granted += pool->counts[KVIST_SLOT_GRANTED];
    stats->free_bytes += pool->counts[KVIST_SLOT_FREE] * pool->about.slot_bytes;
    stats->granted_bytes += pool->counts[KVIST_SLOT_GRANTED] * pool->about.slot_bytes;
    stats->slots_ready += pool->counts[KVIST_SLOT_READY];
    stats->slots_retired += pool->counts[KVIST_SLOT_RETIRED];
    stats->slots_loading += pool->counts[KVIST_SLOT_LOADING];
    stats->block_bytes_ready += pool->block_bytes_ready;
    stats->map_bytes += pool->map.bytes;
}

void kvist_store_count_leases(struct kvist_store *store)
{
    KVIST_CHECK(store->magic == STORE_MAGIC);
    (void)kvist_evict_count_leases(store, NULL);
}

void kvist_store_stats(struct kvist_store *store, struct kvist_store_stats *stats_out)
{
    KVIST_CHECK(store->magic == STORE_MAGIC);
    kvist_store_count_leases(store);
    struct kvist_store_stats stats = store->stats;
    stats.arena_bytes = store->options.arena_bytes;
    stats.adopted_blocks = store->adoption.blocks;
    stats.adopted_bytes = store->adoption.bytes;
    stats.adopted_blocks_dropped = store->adoption.blocks_dropped;
    stats.adopted_files_mistaken = store->adoption.files_mistaken;
    stats.adopted_processes_dropped = store->adoption.processes_dropped;
    stats.adopted_pools_dropped = store->adoption.pools_dropped;
    stats.adopted_us = store->adoption.adopted ? store->adoption.took_us : 0;
    stats.arena_used_bytes = store->used_bytes;
    stats.populated_bytes = store->populated_bytes;
    stats.spare_bytes = kvist_spare_bytes(store);
    stats.sessions = store->session_count;
    stats.processes = store->process_count;
    for (uint32_t index = 0; index < store->pool_high; index++) {
        if (store->pools[index] != NULL) {
            add_pool(store->pools[index], &stats);
        }
    }
    for (uint32_t index = 0; index < KVIST_SESSIONS_MAX; index++) {
        stats.map_bytes += store->sessions[index] != NULL ? store->sessions[index]->page.bytes : 0;
    }
    stats.has_tier = store->options.tier != NULL;
    stats.tier_is_away = kvist_store_tier_is_away(store);
    if (stats.tier_is_away) {
        kvist_reopen_stats(store, &stats.tier);
    } else if (stats.has_tier) {
        kvist_tier_stats(store->tier, &stats.tier);
    }
    *stats_out = stats;
}

bool kvist_store_pool_info(struct kvist_store *store,
                           uint32_t index,
                           struct kvist_store_pool_info *info_out)
{
    KVIST_CHECK(store->magic == STORE_MAGIC);
    for (uint32_t place = 0; place < store->pool_high; place++) {
        const struct kvist_store_pool *pool = store->pools[place];
        if (pool == NULL || index-- > 0) {
            continue;
        }
        struct kvist_store_pool_info info = {
            .tenant = pool->about.tenant,
            .description = pool->about.description,
            .slot_bytes = pool->about.slot_bytes,
            .generation = pool->about.generation,
            .segments = pool->segment_count,
            .sessions = pool->session_count,
            .slots_free = pool->counts[KVIST_SLOT_FREE],
            .slots_granted = pool->counts[KVIST_SLOT_GRANTED],
            .slots_ready = pool->counts[KVIST_SLOT_READY],
            .slots_leased = pool->leased_count,
            .nvme_blocks = pool->nvme_blocks,
            .block_bytes_ready = pool->block_bytes_ready,
        };
        memcpy(info.pool_id, pool->about.pool_id, sizeof(info.pool_id));
        *info_out = info;
        return true;
    }
    return false;
}
