/*
 * spill - checksums, and blocks on their way to NVMe.
 *
 * Role        takes a checksum after each commit at idle priority. The tier compares a block's
 *             bytes with it before it writes them; what changed since is dropped. A block that has
 *             none yet gets one first, at normal priority. A block stays READY while it is written;
 *             its slot is pinned.
 *             A block that a session calls corrupt has its checksum taken again, and is dropped
 *             when it differs; one that never had its checksum taken cannot be judged, and gets it
 *             then.
 * Limits      KVIST_SUMS_MAX and KVIST_SPILLS_MAX in flight; a full queue skips the checksum, which
 *             is then taken at the spill
 * Errors      after a write that failed the tier is left alone for a while, longer each time until
 *             one succeeds: what must go meanwhile goes without a copy. A block that the tier will
 *             never take is marked
 */
#include "proto/key/checksum.h"
#include "proto/key/key.h"
#include "storage/internal.h"

#include <stdlib.h>

#define WAIT_US_MIN    100000U   /* after a write that failed */
#define WAIT_US_MAX    10000000U /* doubled up to this */

/* --- Jobs ------------------------------------------------------------------------------------ */

static bool open_ring(struct kvist_slot_ring *ring, uint32_t capacity)
{
    ring->names = calloc(capacity, sizeof(ring->names[0]));
    ring->capacity = capacity;
    return ring->names != NULL;
}

static bool ring_is_empty(const struct kvist_slot_ring *ring)
{
    return ring->head == ring->tail;
}

static const struct kvist_slot_name *ring_first(const struct kvist_slot_ring *ring)
{
    return &ring->names[ring->head % ring->capacity];
}

/* @return false: it is full */
static bool push_name(struct kvist_slot_ring *ring, const struct kvist_slot_name *name)
{
    if (ring->tail - ring->head == ring->capacity) {
        return false;
    }
    ring->names[ring->tail++ % ring->capacity] = *name;
    return true;
}

enum kvist_status kvist_spill_init(struct kvist_store *store)
{
    for (uint32_t index = 0; index < KVIST_SUMS_MAX; index++) {
        store->sums[index].store = store;
        store->sums[index].next_free = store->sum_free;
        store->sum_free = &store->sums[index];
    }
    for (uint32_t index = 0; index < KVIST_SPILLS_MAX; index++) {
        store->spills[index].store = store;
        store->spills[index].next_free = store->spill_free;
        store->spill_free = &store->spills[index];
    }
    bool opened = open_ring(&store->sum_queue, KVIST_SUM_QUEUE_MAX);
    opened = open_ring(&store->suspect_queue, KVIST_SUSPECTS_MAX) && opened;
    opened = open_ring(&store->behind_queue, KVIST_SUM_QUEUE_MAX) && opened;
    return opened ? KVIST_OK : KVIST_NO_MEMORY;
}

void kvist_spill_fini(struct kvist_store *store)
{
    free(store->sum_queue.names);
    free(store->suspect_queue.names);
    free(store->behind_queue.names);
}

static void sum_run(struct kvist_job *job)
{
    struct kvist_spill *spill = (struct kvist_spill *)job;
    uint64_t seed = kvist_key_checksum_seed(spill->block.key, spill->block.pool_id);
    spill->sum = kvist_checksum(spill->source, spill->block.block_bytes, seed);
}

/* Describe a READY block and pin its slot. */
static void fill_job(struct kvist_spill *spill, struct kvist_store_pool *pool, uint32_t slot)
{
    struct kvist_entry_copy entry;
    kvist_map_read(&pool->map, pool->slots[slot].entry, &entry);
    spill->pool = pool;
    spill->slot = slot;
    spill->source = kvist_slot_bytes_of(pool, slot);
    spill->block = (struct kvist_tier_block){
        .parent_tag = entry.parent_tag,
        .pool_generation = pool->about.generation,
        .block_bytes = kvist_slot_block_bytes(pool, slot),
    };
    memcpy(spill->block.pool_id, pool->about.pool_id, KVIST_KEY_BYTES);
    memcpy(spill->block.key, entry.key, KVIST_KEY_BYTES);
    kvist_slot_pin(pool, slot);
}

static bool is_ready(const struct kvist_spill *spill)
{
    /* A pinned slot is not reused: READY now means that it was READY all the time. */
    return kvist_slot_state_of(spill->pool, spill->slot) == KVIST_SLOT_READY;
}

static bool known_sum(const struct kvist_store_pool *pool, uint32_t slot, uint64_t *sum_out)
{
    const struct kvist_slot_entry *entry = &pool->map.slots[slot];
    *sum_out = atomic_load_explicit(&entry->checksum, memory_order_relaxed);
    return (atomic_load_explicit(&entry->flags, memory_order_relaxed) & KVIST_SLOT_CHECKSUMMED) !=
           0;
}

static void write_sum(struct kvist_store_pool *pool, uint32_t slot, uint64_t sum)
{
    struct kvist_slot_entry *entry = &pool->map.slots[slot];
    atomic_store_explicit(&entry->checksum, sum, memory_order_relaxed);
    atomic_store_explicit(&entry->flags, KVIST_SLOT_CHECKSUMMED, memory_order_release);
    pool->store->stats.checksums_total++;
}

static void note_mismatch(const struct kvist_spill *spill)
{
    struct kvist_store_stats *stats = &spill->store->stats;
    stats->checksum_mismatch_total++;
    memcpy(stats->corrupt_pool, spill->block.pool_id, KVIST_KEY_BYTES);
}

/* --- Checksums after commit ------------------------------------------------------------------ */

void kvist_spill_queue_sum(struct kvist_store_pool *pool, uint32_t slot)
{
    struct kvist_store *store = pool->store;
    struct kvist_slot_name name = kvist_slot_name_of(pool, slot);
    (void)push_name(&store->sum_queue, &name);
}

void kvist_spill_queue_behind(struct kvist_store_pool *pool, uint32_t slot)
{
    struct kvist_slot_name name = kvist_slot_name_of(pool, slot);
    (void)push_name(&pool->store->behind_queue, &name);
}

static void sum_done(struct kvist_job *job)
{
    struct kvist_spill *spill = (struct kvist_spill *)job;
    struct kvist_store *store = spill->store;
    struct kvist_store_pool *pool = spill->pool;
    struct kvist_slot *info = &pool->slots[spill->slot];
    uint64_t known = 0;
    info->flags &= spill->suspected ? (uint8_t)~KVIST_FLAG_SUSPECT : UINT8_MAX;
    kvist_slot_unpin(pool, spill->slot);
    if (is_ready(spill) && !known_sum(pool, spill->slot, &known)) {
        write_sum(pool, spill->slot, spill->sum);
        if (store->options.admission == KVIST_ADMIT_ALL && store->tier != NULL) {
            kvist_spill_queue_behind(pool, spill->slot);
        }
    } else if (is_ready(spill) && known != spill->sum) {
        note_mismatch(spill);
        store->stats.suspects_confirmed_total += spill->suspected;
        kvist_spill_drop_block(pool, spill->slot);
    }
    spill->next_free = store->sum_free;
    store->sum_free = spill;
    store->sums_active--;
    store->sums_bytes -= spill->block.block_bytes;
}

/* @return false: the workers take no more now */
static bool start_sum(struct kvist_store *store, const struct kvist_slot_name *name, bool suspected)
{
    struct kvist_store_pool *pool = kvist_slot_resolve(store, name);
    if (pool == NULL) {
        return true;
    }
    struct kvist_spill *spill = store->sum_free;
    spill->job = (struct kvist_job){.run = sum_run, .done = sum_done};
    spill->suspected = suspected;
    fill_job(spill, pool, name->slot);
    if (kvist_workers_submit(store->idle, &spill->job) != KVIST_OK) {
        kvist_slot_unpin(pool, name->slot);
        return false;
    }
    store->sum_free = spill->next_free;
    store->sums_active++;
    store->sums_bytes += spill->block.block_bytes;
    return true;
}

/* Few at a time: at idle priority they may wait for long, and their slots cannot go. Of small blocks
   more, for each time that some are done costs a turn of the loop. */
static bool may_start_sum(const struct kvist_store *store)
{
    return store->sums_active < KVIST_SUMS_OF_THREAD * store->options.checksum_threads ||
           (store->sums_active < KVIST_SUMS_MAX && store->sums_bytes < KVIST_SUMS_BYTES);
}

static void start_sums(struct kvist_store *store)
{
    struct kvist_slot_ring *sums = &store->sum_queue;
    struct kvist_slot_ring *suspects = &store->suspect_queue;
    while (may_start_sum(store) && !(ring_is_empty(sums) && ring_is_empty(suspects))) {
        bool suspects_now =
            !ring_is_empty(suspects) && (store->suspects_next || ring_is_empty(sums));
        struct kvist_slot_ring *ring = suspects_now ? suspects : sums;
        if (!start_sum(store, ring_first(ring), suspects_now)) {
            return;
        }
        ring->head++;
        store->suspects_next = !suspects_now;
    }
}

/* --- Suspects -------------------------------------------------------------------------------- */

/* What a session has to spare grows with time; one block may overdraw it. */
static bool may_suspect(struct kvist_store_session *session, uint64_t now_us)
{
    uint64_t earned = (now_us - session->suspect_us) * KVIST_SUSPECT_BYTES_PER_US;
    uint64_t room = KVIST_SUSPECT_BURST_BYTES - session->suspect_bytes_left;
    session->suspect_bytes_left += earned < room ? earned : room;
    session->suspect_us = now_us;
    return session->suspect_bytes_left > 0;
}

static void
suspect_slot(struct kvist_store_session *session, struct kvist_store_pool *pool, uint32_t slot)
{
    struct kvist_store *store = session->store;
    struct kvist_slot_name name = kvist_slot_name_of(pool, slot);
    if ((pool->slots[slot].flags & KVIST_FLAG_SUSPECT) != 0) {
        return; /* its turn will come */
    }
    if (!may_suspect(session, store->now_us) || !push_name(&store->suspect_queue, &name)) {
        store->stats.suspects_ignored_total++;
        return;
    }
    uint64_t block_bytes = kvist_slot_block_bytes(pool, slot);
    uint64_t left = session->suspect_bytes_left;
    session->suspect_bytes_left -= block_bytes < left ? block_bytes : left;
    pool->slots[slot].flags |= KVIST_FLAG_SUSPECT;
}

enum kvist_status kvist_store_suspect(struct kvist_store_process *process,
                                      uint32_t ordinal,
                                      const uint8_t (*keys)[KVIST_KEY_BYTES],
                                      size_t key_count)
{
    KVIST_CHECK(process->magic == PROCESS_MAGIC);
    struct kvist_store_session *session = process->session;
    struct kvist_store_pool *pool = kvist_session_pool(session, ordinal);
    if (pool == NULL || !process->loans[ordinal].attached || key_count > KVIST_SUSPECT_KEYS_MAX) {
        return KVIST_INVALID;
    }
    session->store->stats.suspects_total += key_count;
    for (size_t index = 0; index < key_count; index++) {
        struct kvist_entry_copy entry;
        if (kvist_map_find(&pool->map, keys[index], &entry) != KVIST_ENTRY_NONE &&
            entry.state == KVIST_ENTRY_READY) {
            suspect_slot(session, pool, entry.slot);
        }
    }
    return KVIST_OK;
}

/* --- To NVMe --------------------------------------------------------------------------------- */

bool kvist_spill_has_copy(const struct kvist_store_pool *pool, uint32_t slot)
{
    struct kvist_entry_copy entry;
    kvist_map_read(&pool->map, pool->slots[slot].entry, &entry);
    return entry.extent != 0;
}

bool kvist_spill_waits(const struct kvist_store *store)
{
    return store->now_us < store->spill_after_us;
}

bool kvist_spill_wanted(const struct kvist_store_pool *pool, uint32_t slot)
{
    return (pool->tier_knows || kvist_pool_is_settling(pool)) && !kvist_spill_waits(pool->store) &&
           (pool->slots[slot].flags & KVIST_FLAG_UNSPILLABLE) == 0 &&
           !kvist_spill_has_copy(pool, slot);
}

void kvist_spill_wait(struct kvist_store *store)
{
    if (kvist_spill_waits(store)) {
        return; /* one of several that were in flight */
    }
    uint64_t wait_us = store->spill_wait_us == 0 ? WAIT_US_MIN : 2 * store->spill_wait_us;
    store->spill_wait_us = wait_us < WAIT_US_MAX ? wait_us : WAIT_US_MAX;
    store->spill_after_us = store->now_us + store->spill_wait_us;
}

void kvist_spill_drop_block(struct kvist_store_pool *pool, uint32_t slot)
{
    struct kvist_entry_copy entry;
    uint32_t position = pool->slots[slot].entry;
    kvist_map_read(&pool->map, position, &entry);
    if (entry.extent != 0) {
        /* The copy on NVMe has a checksum of its own. */
        entry.state = KVIST_ENTRY_NVME;
        kvist_map_write(&pool->map, position, &entry);
    } else {
        kvist_map_remove(&pool->map, position);
    }
    kvist_slot_discard(pool, slot, entry.key[0]);
}

static void finish(struct kvist_spill *spill)
{
    struct kvist_store *store = spill->store;
    struct kvist_slot *info = &spill->pool->slots[spill->slot];
    kvist_slot_unpin(spill->pool, spill->slot);
    info->flags &= (uint8_t)~KVIST_FLAG_SPILLING;
    store->save.in_flight -= spill->for_save;
    spill->next_free = store->spill_free;
    store->spill_free = spill;
}

/* The tier did not take it now: it is tried again, by who wants it written. */
static void fail(struct kvist_spill *spill, enum kvist_status status)
{
    struct kvist_store *store = spill->store;
    struct kvist_slot_name name = kvist_slot_name_of(spill->pool, spill->slot);
    store->stats.spill_failures_total++;
    kvist_spill_wait(store);
    if (!is_ready(spill)) {
        return;
    }
    if (spill->for_save) {
        kvist_save_again(store, &name, status);
    } else if (store->options.admission == KVIST_ADMIT_ALL) {
        kvist_spill_queue_behind(spill->pool, spill->slot);
    }
}

static void note_copy(struct kvist_spill *spill, uint32_t extent)
{
    struct kvist_store_pool *pool = spill->pool;
    struct kvist_store *store = spill->store;
    struct kvist_entry_copy entry;
    uint32_t position = pool->slots[spill->slot].entry;
    kvist_map_read(&pool->map, position, &entry);
    pool->nvme_blocks += entry.extent == 0;
    kvist_map_note_extent(&pool->map, position, extent);
    store->stats.spills_total++;
    store->stats.spill_bytes_total += spill->block.block_bytes;
    store->spill_wait_us = 0;
    if (spill->for_save) {
        store->save.saved.blocks++;
        store->save.saved.bytes += spill->block.block_bytes;
    }
}

static void written(void *ctx, enum kvist_status status, const struct kvist_tier_block *block)
{
    struct kvist_spill *spill = ctx;
    struct kvist_store_pool *pool = spill->pool;
    bool ready = is_ready(spill);
    if (status == KVIST_OK && ready) {
        note_copy(spill, block->extent);
    } else if (status == KVIST_CORRUPT) {
        note_mismatch(spill);
    } else if (status != KVIST_OK && status != KVIST_STALE) {
        fail(spill, status);
    }
    finish(spill);
    if (status == KVIST_CORRUPT && ready) {
        kvist_spill_drop_block(pool, spill->slot);
    }
}

/* The tier compares the bytes with the checksum once more before it writes them. */
static enum kvist_status hand_over(struct kvist_spill *spill)
{
    enum kvist_status status =
        kvist_tier_write(spill->store->tier, &spill->block, spill->source, written, spill);
    if (status == KVIST_INVALID || status == KVIST_NO_SPACE) {
        spill->store->stats.spill_failures_total++;
        spill->pool->slots[spill->slot].flags |= KVIST_FLAG_UNSPILLABLE;
    }
    return status;
}

static void spill_summed(struct kvist_job *job)
{
    struct kvist_spill *spill = (struct kvist_spill *)job;
    struct kvist_store *store = spill->store;
    struct kvist_store_pool *pool = spill->pool;
    struct kvist_slot_name name = kvist_slot_name_of(pool, spill->slot);
    uint64_t known = 0;
    if (store->closing || !is_ready(spill)) {
        finish(spill);
        return;
    }
    if (!known_sum(pool, spill->slot, &known)) {
        write_sum(pool, spill->slot, spill->sum);
        known = spill->sum;
    }
    spill->block.checksum = known;
    enum kvist_status status = pool->tier_knows ? hand_over(spill) : KVIST_BUSY;
    if (status == KVIST_OK) {
        return;
    }
    if (spill->for_save) {
        kvist_save_again(store, &name, status);
    } else {
        store->stats.spill_skipped_total += status == KVIST_BUSY;
    }
    finish(spill);
}

enum kvist_status kvist_spill_start(struct kvist_store_pool *pool, uint32_t slot, bool for_save)
{
    struct kvist_store *store = pool->store;
    struct kvist_spill *spill = store->spill_free;
    if (store->closing || (!pool->tier_knows && !kvist_pool_is_settling(pool))) {
        return KVIST_UNSUPPORTED;
    }
    if (spill == NULL || !pool->tier_knows) {
        return KVIST_BUSY;
    }
    store->spill_free = spill->next_free;
    spill->job = (struct kvist_job){.run = sum_run, .done = spill_summed};
    spill->for_save = for_save;
    fill_job(spill, pool, slot);
    pool->slots[slot].flags |= KVIST_FLAG_SPILLING;
    store->save.in_flight += for_save;
    enum kvist_status status = known_sum(pool, slot, &spill->block.checksum)
                                   ? hand_over(spill)
                                   : kvist_workers_submit(store->duty, &spill->job);
    if (status != KVIST_OK) {
        finish(spill);
    }
    return status;
}

/* Write-behind: after each commit, when every block is admitted. */
static void start_behind(struct kvist_store *store)
{
    while (!kvist_spill_waits(store) && store->spill_free != NULL && !ring_is_empty(&store->behind_queue)) {
        const struct kvist_slot_name *name = ring_first(&store->behind_queue);
        struct kvist_store_pool *pool = kvist_slot_resolve(store, name);
        if (pool != NULL && pool->slots[name->slot].pins == 0 &&
            kvist_spill_wanted(pool, name->slot) &&
            kvist_spill_start(pool, name->slot, false) == KVIST_BUSY) {
            return;
        }
        store->behind_queue.head++;
    }
}

void kvist_spill_turn(struct kvist_store *store)
{
    start_sums(store);
    if (store->tier != NULL) {
        start_behind(store);
    }
}
