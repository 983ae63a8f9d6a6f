/*
 * evict - what goes, and who yields to whom.
 *
 * Role        lease scan, eviction by policy, draining of segments that another pool needs, and the
 *             shares between pools.
 * Shares      a pool that is short of slots takes free memory, as far as its tenant may have more
 *             (tenant.c); else a segment of the tenant that has most, by weight, when that leaves it
 *             no less than the one that gets it. Within a tenant: of the pool that has been idle
 *             longest; else of the largest pool, when that leaves it no smaller than the pool that
 *             gets it (which is max-min with equal weights), or when the pool that gets it has none.
 *             Else it evicts its own blocks.
 * Source      proto/shm/layout.h, the lease protocol
 */
#include "storage/internal.h"

#define AHEAD_BYTES_MAX (512ULL << 20)
#define AHEAD_OF_ARENA  16U
#define POPULATING_MAX  4U /* segments of one pool at a time */
#define BURST_OF_AHEAD  4U /* taken from an idle pool at a time, of what is populated ahead */
#define LOW_PART        32U /* a pool keeps one slot of so many free, and evicts as many more */
#define BATCH_MAX       1024U
#define LOOKED_FACTOR   4U /* candidates looked at for each block wanted, */
#define LOOKED_MIN      1024U /* and at least: the first may be pinned, held, or draining */

/* --- Lease scan ------------------------------------------------------------------------------ */

static void flag_leased(struct kvist_store_pool *pool,
                        const struct kvist_page *page,
                        uint32_t ordinal)
{
    const uint64_t base = kvist_slot_ref(ordinal, 0);
    const uint64_t slot_max = pool->slot_max;
    const uint8_t *states = pool->states;
    uint32_t high = kvist_page_lease_high(page);
    for (uint32_t index = 0; index < high; index++) {
        uint64_t slot = kvist_page_lease(page, index) - base;
        if (slot < slot_max && states[slot] == KVIST_SLOT_RETIRED) {
            pool->slots[slot].flags |= KVIST_FLAG_LEASED;
        }
    }
}

void kvist_evict_scan(struct kvist_store_pool *pool)
{
    const struct kvist_store *store = pool->store;
    kvist_lease_fence();
    for (uint32_t index = 0; index < KVIST_SESSIONS_MAX; index++) {
        const struct kvist_store_session *session = store->sessions[index];
        for (uint32_t ordinal = 0; session != NULL && ordinal < KVIST_SESSION_POOLS_MAX;
             ordinal++) {
            if (session->attachments[ordinal].pool == pool) {
                flag_leased(pool, &session->page, ordinal);
            }
        }
    }
}

/* Set the seen bit of every leased slot of a session. @return bits that were not set before */
static uint64_t see_leases(const struct kvist_store_session *session, uint64_t *bytes_out)
{
    uint64_t count = 0;
    uint32_t high = kvist_page_lease_high(&session->page);
    for (uint32_t index = 0; index < high; index++) {
        uint64_t ref = kvist_page_lease(&session->page, index);
        uint32_t slot = (uint32_t)ref;
        struct kvist_store_pool *pool = kvist_session_pool(session, (ref >> 32) - 1);
        if (pool == NULL || slot >= pool->slot_max ||
            (kvist_slot_state_of(pool, slot) != KVIST_SLOT_READY &&
             kvist_slot_state_of(pool, slot) != KVIST_SLOT_RETIRED)) {
            continue;
        }
        uint8_t bit = (uint8_t)(1U << (slot % 8));
        if ((pool->leased_seen[slot / 8] & bit) == 0) {
            pool->leased_seen[slot / 8] |= bit;
            pool->leased_count++;
            *bytes_out += kvist_slot_block_bytes(pool, slot);
            count++;
        }
    }
    return count;
}

uint64_t kvist_evict_count_leases(struct kvist_store *store, struct kvist_store_session *session)
{
    for (uint32_t index = 0; index < store->pool_high; index++) {
        struct kvist_store_pool *pool = store->pools[index];
        if (pool != NULL && pool->leased_count > 0) {
            memset(pool->leased_seen, 0, pool->slot_max / 8 + 1);
            pool->leased_count = 0;
        }
    }
    uint64_t bytes = 0;
    if (session != NULL) {
        return see_leases(session, &bytes);
    }
    uint64_t count = 0;
    for (uint32_t index = 0; index < KVIST_SESSIONS_MAX; index++) {
        if (store->sessions[index] != NULL) {
            count += see_leases(store->sessions[index], &bytes);
        }
    }
    store->stats.leased_slots = count;
    store->stats.leased_bytes = bytes;
    return count;
}

/* --- Evicting -------------------------------------------------------------------------------- */

uint32_t kvist_evict_slots(struct kvist_store_pool *pool,
                           const uint32_t *slots,
                           uint32_t count,
                           bool by_policy)
{
    struct kvist_store_stats *stats = &pool->store->stats;
    for (uint32_t index = 0; index < count; index++) {
        kvist_slot_retire(pool, slots[index]);
    }
    kvist_evict_scan(pool);
    /* The leased ones first: settling others cleans up tombstones, theirs included. */
    uint32_t gone = count;
    for (uint32_t index = 0; index < count; index++) {
        struct kvist_slot *info = &pool->slots[slots[index]];
        if ((info->flags & KVIST_FLAG_LEASED) != 0) {
            info->flags &= (uint8_t)~KVIST_FLAG_LEASED;
            kvist_slot_restore(pool, slots[index]);
            pool->ops->renew(pool->policy, slots[index]);
            stats->evictions_leased_total++;
            gone--;
        } else {
            kvist_slot_forget(pool, slots[index], by_policy);
        }
    }
    for (uint32_t index = 0; gone > 0 && index < count; index++) {
        if (kvist_slot_state_of(pool, slots[index]) == KVIST_SLOT_RETIRED) {
            kvist_slot_settle(pool, slots[index]);
        }
    }
    stats->evictions_total += gone;
    return gone;
}

uint32_t kvist_evict_slot_count(const struct kvist_store_pool *pool)
{
    uint32_t count = 0;
    for (uint32_t state = 0; state < KVIST_ARRAY_COUNT(pool->counts); state++) {
        count += pool->counts[state];
    }
    return count;
}

uint32_t kvist_evict_low(const struct kvist_store_pool *pool)
{
    uint32_t count = kvist_evict_slot_count(pool);
    uint32_t low = count / LOW_PART > 4 ? count / LOW_PART : 4;
    return low < count / 4 ? low : count / 4;
}

uint32_t kvist_evict_critical(const struct kvist_store_pool *pool)
{
    uint32_t low = kvist_evict_low(pool);
    return low > 4 ? low / 4 : low > 0;
}

static bool is_movable(const struct kvist_store_pool *pool, uint32_t slot)
{
    return kvist_slot_state_of(pool, slot) == KVIST_SLOT_READY && pool->slots[slot].pins == 0 &&
           (pool->slots[slot].flags & KVIST_FLAG_HELD) == 0;
}

uint32_t kvist_evict_blocks(struct kvist_store_pool *pool, uint32_t want)
{
    struct kvist_store *store = pool->store;
    want = want < KVIST_VICTIMS_MAX ? want : KVIST_VICTIMS_MAX;
    bool starved = pool->starved_since_us != 0 &&
                   store->now_us - pool->starved_since_us > KVIST_SPILL_PATIENCE_US;
    uint32_t unspilled = starved ? kvist_evict_low(pool) : 0;
    bool spill_full = false;
    uint32_t count = 0;
    uint32_t pending = 0; /* blocks on their way to NVMe will be free soon: hotter ones stay */
    uint32_t looks = want * LOOKED_FACTOR > LOOKED_MIN ? want * LOOKED_FACTOR : LOOKED_MIN;
    uint32_t slot = pool->ops->victim(pool->policy, KVIST_SLOT_NONE);
    for (uint32_t looked = 0; slot != KVIST_SLOT_NONE && count + pending < want && looked < looks;
         looked++, slot = pool->ops->victim(pool->policy, slot)) {
        pending += (pool->slots[slot].flags & KVIST_FLAG_SPILLING) != 0;
        if (!is_movable(pool, slot) ||
            kvist_slot_segment(pool, slot)->life != KVIST_LIFE_LIVE) {
            continue;
        }
        if (kvist_spill_wanted(pool, slot)) {
            spill_full = spill_full || kvist_spill_start(pool, slot, false) != KVIST_OK;
            if (!spill_full || unspilled == 0) {
                pending++;
                continue;
            }
            unspilled--;
            pool->starved_since_us = store->now_us;
            store->stats.spill_skipped_total++;
        }
        store->victims[count++] = slot;
    }
    return count == 0 ? 0 : kvist_evict_slots(pool, store->victims, count, true);
}

/* --- Draining a segment ---------------------------------------------------------------------- */

static void drain_step(struct kvist_store_pool *pool, struct kvist_segment *segment)
{
    struct kvist_store *store = pool->store;
    uint32_t first = segment->index * pool->slots_per_segment;
    uint32_t count = 0;
    bool spilling = false;
    for (uint32_t slot = first;
         segment->counts[KVIST_SLOT_READY] > 0 && slot < first + pool->slots_per_segment &&
         count < KVIST_VICTIMS_MAX;
         slot++) {
        if (!is_movable(pool, slot)) {
            spilling = spilling || pool->slots[slot].pins > 0;
            continue;
        }
        if (kvist_spill_wanted(pool, slot)) {
            spilling = kvist_spill_start(pool, slot, false) != KVIST_UNSUPPORTED || spilling;
            continue;
        }
        store->victims[count++] = slot;
    }
    uint32_t gone = count == 0 ? 0 : kvist_evict_slots(pool, store->victims, count, false);
    if (segment->counts[KVIST_SLOT_FREE] == pool->slots_per_segment) {
        kvist_arena_revoke(pool, segment);
    } else if (gone == 0 && !spilling &&
               store->now_us - segment->drain_since_us > KVIST_DRAIN_GIVE_UP_US) {
        kvist_slot_set_draining(pool, segment, false); /* leased for long: take another one */
    }
}

static bool has_leases(const struct kvist_store_pool *pool, const struct kvist_segment *segment)
{
    uint32_t first = segment->index * pool->slots_per_segment;
    for (uint32_t slot = first; slot < first + pool->slots_per_segment; slot++) {
        if (((pool->leased_seen[slot / 8] >> (slot % 8)) & 1) != 0) {
            return true;
        }
    }
    return false;
}

static bool may_drain(const struct kvist_store_pool *pool, const struct kvist_segment *segment)
{
    return segment->life == KVIST_LIFE_LIVE && segment->counts[KVIST_SLOT_GRANTED] == 0 &&
           segment->counts[KVIST_SLOT_LOADING] == 0 && segment->counts[KVIST_SLOT_RETIRED] == 0 &&
           !has_leases(pool, segment);
}

static struct kvist_segment *choose_empty(const struct kvist_store_pool *pool)
{
    for (uint32_t left = pool->segment_max; left > 0; left--) {
        struct kvist_segment *segment = &pool->segments[left - 1];
        if (segment->life == KVIST_LIFE_LIVE && segment->counts[KVIST_SLOT_READY] == 0 &&
            may_drain(pool, segment)) {
            return segment;
        }
    }
    return NULL;
}

/* An empty segment, else the one that holds the coldest block of those that can be emptied. */
static struct kvist_segment *choose_segment(struct kvist_store_pool *pool)
{
    struct kvist_segment *empty = choose_empty(pool);
    if (empty != NULL) {
        return empty;
    }
    const struct kvist_segment *refused = NULL;
    uint32_t slot = pool->ops->victim(pool->policy, KVIST_SLOT_NONE);
    for (uint32_t looked = 0; slot != KVIST_SLOT_NONE && looked < KVIST_VICTIMS_MAX; looked++) {
        struct kvist_segment *segment = kvist_slot_segment(pool, slot);
        if (segment != refused && may_drain(pool, segment)) {
            return segment;
        }
        refused = segment;
        slot = pool->ops->victim(pool->policy, slot);
    }
    return NULL;
}

/* --- Shares ---------------------------------------------------------------------------------- */

static uint32_t live_segments(const struct kvist_store_pool *pool)
{
    return kvist_evict_slot_count(pool) / pool->slots_per_segment - pool->draining_count;
}

static bool may_yield(const struct kvist_store_pool *donor)
{
    return donor != NULL && live_segments(donor) > 0 &&
           donor->store->now_us >= donor->keeps_until_us;
}

static bool yields_to(const struct kvist_store_pool *donor, const struct kvist_store_pool *pool)
{
    if (donor == pool || !may_yield(donor)) {
        return false;
    }
    if (donor->tenant != pool->tenant) {
        /* What is idle is its tenant's nevertheless, unless there is nothing in it. */
        bool is_empty = donor->session_count == 0 && donor->counts[KVIST_SLOT_READY] == 0;
        return kvist_tenant_fits(pool->tenant, pool->segment_bytes) &&
               ((is_empty && kvist_tenant_can_spare(donor)) ||
                kvist_tenant_outweighs(donor, pool));
    }
    if (donor->session_count == 0) {
        return true;
    }
    if (pool->segment_count == 0) {
        return live_segments(donor) >= 2;
    }
    return donor->used_bytes >= pool->used_bytes + pool->segment_bytes + donor->segment_bytes &&
           live_segments(donor) >= 2;
}

static bool is_better(const struct kvist_store_pool *donor, const struct kvist_store_pool *best)
{
    if (best == NULL) {
        return true;
    }
    if (donor->tenant != best->tenant) {
        return kvist_tenant_gives_first(donor->tenant, best->tenant);
    }
    bool donor_idle = donor->session_count == 0;
    bool best_idle = best->session_count == 0;
    if (donor_idle != best_idle) {
        return donor_idle;
    }
    return donor_idle ? donor->last_used_us < best->last_used_us
                      : donor->used_bytes > best->used_bytes;
}

static uint64_t ahead_bytes(const struct kvist_store_pool *pool)
{
    uint64_t bytes = pool->store->options.arena_bytes / AHEAD_OF_ARENA;
    bytes = bytes < AHEAD_BYTES_MAX ? bytes : AHEAD_BYTES_MAX;
    /* Without a writer only promotions need slots. */
    return bytes > pool->segment_bytes && pool->writer_count > 0 ? bytes : pool->segment_bytes;
}

/* A smaller pool waits for memory, or one of a tenant that has less: what others gave up for it is
   not for this one. */
static bool is_outranked(const struct kvist_store_pool *pool)
{
    const struct kvist_store *store = pool->store;
    for (uint32_t index = 0; index < store->pool_high; index++) {
        const struct kvist_store_pool *other = store->pools[index];
        if (other == NULL || other == pool || !other->hungry) {
            continue;
        }
        if (other->tenant == pool->tenant
                ? other->used_bytes + other->segment_bytes <= pool->used_bytes
                : kvist_tenant_fits(other->tenant, other->segment_bytes) &&
                      kvist_tenant_outweighs(pool, other)) {
            return true;
        }
    }
    return false;
}

/* Memory that the pool may have now, or will. */
static uint64_t bytes_to_come(const struct kvist_store_pool *pool)
{
    return kvist_tenant_room(pool->store, pool->tenant, true);
}

static void give_up(struct kvist_store_pool *donor, struct kvist_segment *segment)
{
    segment->drain_since_us = donor->store->now_us;
    donor->store->taken_us = donor->store->now_us;
    kvist_slot_set_draining(donor, segment, true);
    donor->tenant->leaving_bytes += segment->bytes;
    donor->store->leaving_bytes += segment->bytes;
}

/* Whether it has segments that hold nothing and that it does without: an idle pool does without all
   of them, another one without what it would not populate ahead. */
static bool has_spare(const struct kvist_store_pool *donor, const struct kvist_store_pool *pool)
{
    if (donor == NULL || donor == pool ||
        (donor->tenant != pool->tenant &&
         !(kvist_tenant_fits(pool->tenant, pool->segment_bytes) &&
           kvist_tenant_can_spare(donor)))) {
        return false;
    }
    uint64_t free_bytes = donor->usable_free * donor->about.slot_bytes;
    if (live_segments(donor) == 0 || donor->usable_free < donor->slots_per_segment) {
        return false;
    }
    return donor->session_count == 0 || free_bytes >= ahead_bytes(donor) + donor->segment_bytes;
}

/* What holds nothing elsewhere is as good as free memory: it is had ahead of need. */
static void take_spare(struct kvist_store_pool *pool)
{
    struct kvist_store *store = pool->store;
    uint64_t there = (pool->usable_free +
                      (uint64_t)pool->populating_count * pool->slots_per_segment) *
                     pool->about.slot_bytes;
    uint64_t wanted = ahead_bytes(pool);
    there += bytes_to_come(pool);
    if (there >= wanted || pool->segment_count >= pool->segment_max || is_outranked(pool) ||
        store->now_us < pool->spare_after_us) {
        return;
    }
    bool counted = false;
    for (uint32_t index = 0; index < store->pool_high && there < wanted; index++) {
        struct kvist_store_pool *donor = store->pools[index];
        while (there < wanted && has_spare(donor, pool)) {
            if (!counted) {
                (void)kvist_evict_count_leases(store, NULL);
                counted = true;
            }
            struct kvist_segment *segment = choose_empty(donor);
            if (segment == NULL) {
                break;
            }
            give_up(donor, segment);
            there += donor->segment_bytes;
        }
    }
    if (there < wanted) {
        pool->spare_after_us = store->now_us + KVIST_TAKE_RETRY_US;
    }
}

static struct kvist_store_pool *find_donor(const struct kvist_store_pool *pool)
{
    const struct kvist_store *store = pool->store;
    struct kvist_store_pool *best = NULL;
    for (uint32_t index = 0; index < store->pool_high; index++) {
        struct kvist_store_pool *donor = store->pools[index];
        if (yields_to(donor, pool) && is_better(donor, best)) {
            best = donor;
        }
    }
    return best;
}

/* Have another pool give a segment up; an idle one as many as a burst may need. @return whether
   memory is on its way */
static bool take_from_others(struct kvist_store_pool *pool)
{
    struct kvist_store *store = pool->store;
    uint64_t to_come = bytes_to_come(pool);
    uint64_t burst = ahead_bytes(pool) / BURST_OF_AHEAD;
    if (pool->segment_count >= pool->segment_max || store->now_us < pool->take_after_us) {
        return false;
    }
    if (to_come >= pool->segment_bytes) {
        return store->leaving_bytes > 0 && store->now_us - store->taken_us < KVIST_KEEPS_US;
    }
    struct kvist_store_pool *donor = find_donor(pool);
    if (donor == NULL) {
        return false;
    }
    (void)kvist_evict_count_leases(store, NULL);
    struct kvist_segment *segment = choose_segment(donor);
    if (segment == NULL) { /* try another pool, and later this one again */
        (void)kvist_grant_recall(donor);
        donor->keeps_until_us = store->now_us + KVIST_KEEPS_US;
        pool->take_after_us = store->now_us + KVIST_TAKE_RETRY_US;
        return false;
    }
    while (segment != NULL) {
        give_up(donor, segment);
        to_come += donor->segment_bytes;
        bool more = donor->session_count == 0 &&
                    (to_come < pool->segment_bytes || to_come < burst) && live_segments(donor) > 0;
        segment = more ? choose_segment(donor) : NULL;
    }
    return true;
}

/* Of one tenant; NULL: of any. */
static void shrink(struct kvist_store *store, const struct kvist_tenant *tenant)
{
    struct kvist_store_pool *best = NULL;
    for (uint32_t index = 0; index < store->pool_high; index++) {
        struct kvist_store_pool *pool = store->pools[index];
        if (may_yield(pool) && (tenant == NULL || pool->tenant == tenant) &&
            is_better(pool, best)) {
            best = pool;
        }
    }
    if (best == NULL) {
        return;
    }
    (void)kvist_evict_count_leases(store, NULL);
    struct kvist_segment *segment = choose_segment(best);
    if (segment == NULL) { /* what engines were granted is in all of them */
        (void)kvist_grant_recall(best);
        best->keeps_until_us = store->now_us + KVIST_KEEPS_US;
        store->shrink_after_us = store->now_us + KVIST_TAKE_RETRY_US;
        return;
    }
    give_up(best, segment);
}

static bool is_over_arena(const struct kvist_store *store)
{
    return store->used_bytes - store->draining_bytes > store->options.arena_bytes;
}

bool kvist_evict_is_over(const struct kvist_store_pool *pool)
{
    return is_over_arena(pool->store) || kvist_tenant_is_over_quota(pool->tenant);
}

void kvist_evict_shrink(struct kvist_store *store)
{
    if (store->now_us < store->shrink_after_us) {
        return;
    }
    if (is_over_arena(store)) {
        shrink(store, NULL);
    }
    for (uint32_t index = 0; index < store->tenant_count; index++) {
        if (kvist_tenant_is_over_quota(&store->tenants[index])) {
            shrink(store, &store->tenants[index]);
        }
    }
}

bool kvist_evict_has_room(const struct kvist_store_pool *pool)
{
    return pool->segment_count < pool->segment_max && kvist_arena_can_keep(pool->store) &&
           kvist_tenant_room(pool->store, pool->tenant, false) >= pool->segment_bytes &&
           !is_outranked(pool);
}

static void populate_ahead(struct kvist_store_pool *pool)
{
    const struct kvist_store *store = pool->store;
    if (is_outranked(pool)) {
        return;
    }
    while (pool->populating_count < POPULATING_MAX && store->now_us >= pool->populate_after_us) {
        uint64_t free_slots = pool->usable_free +
                              (uint64_t)pool->populating_count * pool->slots_per_segment;
        /* Not fewer than eviction wants free: of a large pool that is more than what is ahead. */
        if (free_slots * pool->about.slot_bytes >= ahead_bytes(pool) &&
            free_slots >= kvist_evict_low(pool)) {
            return;
        }
        enum kvist_status status = kvist_arena_grow(pool);
        if (status != KVIST_OK) {
            if (status != KVIST_NO_SPACE) {
                pool->populate_after_us = store->now_us + KVIST_POPULATE_RETRY_US;
            }
            return;
        }
    }
}

void kvist_evict_turn(struct kvist_store_pool *pool)
{
    for (uint32_t index = 0; pool->draining_count > 0 && index < pool->segment_max; index++) {
        if (pool->segments[index].life == KVIST_LIFE_DRAINING) {
            drain_step(pool, &pool->segments[index]);
        }
    }
    pool->hungry = false;
    if (pool->session_count == 0) {
        return;
    }
    populate_ahead(pool);
    take_spare(pool);
    uint32_t low = kvist_evict_low(pool);
    uint32_t count = kvist_evict_slot_count(pool);
    if (pool->populating_count > 0 || (pool->usable_free >= low && count > 0)) {
        pool->starved_since_us = 0;
        return;
    }
    pool->hungry = pool->segment_count < pool->segment_max;
    /* What nobody uses goes before what somebody may. */
    bool coming = kvist_grant_recall(pool) && pool->usable_free >= kvist_evict_critical(pool);
    coming = coming || take_from_others(pool);
    uint64_t now_us = pool->store->now_us;
    if (pool->usable_free >= kvist_evict_critical(pool)) {
        pool->starved_since_us = 0;
    } else if (pool->starved_since_us == 0) {
        pool->starved_since_us = now_us;
    }
    if (coming && (pool->starved_since_us == 0 ||
                   now_us - pool->starved_since_us <= KVIST_SPILL_PATIENCE_US)) {
        return; /* what is idle goes before a block of a pool that is in use */
    }
    uint32_t batch = count / LOW_PART < BATCH_MAX ? count / LOW_PART : BATCH_MAX;
    batch = batch > 0 ? batch : 1;
    if (pool->counts[KVIST_SLOT_READY] > 0) {
        (void)kvist_evict_blocks(pool, low - pool->usable_free + batch);
    }
}

void kvist_evict_turn_retired(struct kvist_store *store)
{
    if (store->now_us - store->retired_scan_us < KVIST_RETIRED_SCAN_US) {
        return;
    }
    store->retired_scan_us = store->now_us;
    for (uint32_t index = 0; index < store->pool_high; index++) {
        struct kvist_store_pool *pool = store->pools[index];
        if (pool != NULL && pool->retired_head != KVIST_SLOT_NONE) {
            kvist_evict_scan(pool);
            kvist_slot_sweep_retired(pool);
        }
    }
}
