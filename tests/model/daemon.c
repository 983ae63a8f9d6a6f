#include "storage/internal.h"
#include "tests/model/world.h"
#include "tests/support/unit.h"

#include <stdlib.h>

/* The daemon's private memory: a store with one pool and one session. */
static struct {
    struct kvist_store *store;
    struct kvist_store_session *session;
    struct kvist_store_pool pool;
    struct kvist_segment segment;
    uint8_t states[KVIST_WORLD_SLOTS];
    struct kvist_slot slots[KVIST_WORLD_SLOTS];
    uint8_t leased_seen[1];
    char bytes[KVIST_WORLD_SLOTS * KVIST_BLOCK_BYTES_MIN];
    struct kvist_job *job; /* that was submitted */
    /* The next map is nobody's but the daemon's own, and no part of what is explored. */
    struct kvist_map_header *next;
} side;

/* --- An order of eviction that nobody asks for ------------------------------------------------ */

static void ignore_insert(struct kvist_policy *policy, uint32_t slot, uint64_t key_tag)
{
    (void)policy;
    (void)slot;
    (void)key_tag;
}

static void ignore_touch(struct kvist_policy *policy, uint32_t slot)
{
    (void)policy;
    (void)slot;
}

static void ignore_remove(struct kvist_policy *policy, uint32_t slot, uint64_t key_tag, bool evicted)
{
    (void)policy;
    (void)slot;
    (void)key_tag;
    (void)evicted;
}

static const struct kvist_policy_ops no_policy = {
    .name = "none",
    .insert = ignore_insert,
    .touch = ignore_touch,
    .renew = ignore_touch,
    .remove = ignore_remove,
};

/* --- Workers that work when they are told to ---------------------------------------------------
 */

/* In place of kvist_workers_submit(), by the linker. */
enum kvist_status __wrap_kvist_workers_submit(struct kvist_workers *workers, struct kvist_job *job);

enum kvist_status __wrap_kvist_workers_submit(struct kvist_workers *workers, struct kvist_job *job)
{
    (void)workers;
    side.job = job;
    return KVIST_OK;
}

/* --- Set-up ------------------------------------------------------------------------------------
 */

void kvist_daemon_open(void)
{
    const struct kvist_world *world = kvist_world_get();
    side.store = calloc(1, sizeof(*side.store));
    side.session = calloc(1, sizeof(*side.session));
    side.store->roster = calloc(1, sizeof(*side.store->roster));
    side.next = calloc(1, world->map->map_bytes);
    KVIST_TEST_FATAL(side.store != NULL && side.session != NULL && side.next != NULL &&
                     side.store->roster != NULL);
    side.store->roster_fd = -1;
    side.store->magic = STORE_MAGIC;
    side.store->options.checksum_threads = 1;
    KVIST_TEST_FATAL(kvist_spill_init(side.store) == KVIST_OK);
    side.store->pools[0] = &side.pool;
    side.store->pool_high = 1;
    side.store->sessions[0] = side.session;
    side.session->magic = SESSION_MAGIC;
    side.session->store = side.store;
    const char *base = (const char *)world->page;
    side.session->page = (struct kvist_page){
        .fd = -1,
        .header = world->page,
        .leases = (const void *)(base + world->page->lease_offset),
        .marks = (const void *)(base + world->page->mark_offset),
        .mapped = (const void *)(base + world->page->mapped_offset),
        .touches = (const void *)(base + world->page->touch_offset),
        .rank_count = world->page->rank_count,
    };
    side.session->attachments[0] =
        (struct kvist_attachment){.pool = &side.pool, .serial = 1, .writes = true};
}

/* Free what the last call had allocated when its thread was left. */
static void free_what_was_left(void)
{
    while (side.store->clears != NULL) {
        struct kvist_clear *clear = side.store->clears;
        side.store->clears = clear->next;
        free(clear);
    }
    free(side.pool.map.next);
    side.pool.map.next = NULL;
}

void kvist_daemon_close(void)
{
    free_what_was_left();
    free(side.next);
    kvist_spill_fini(side.store);
    free(side.session);
    kvist_roster_fini(side.store);
    free(side.store);
}

/* A map that is not unmapped when it is given up: `base` stays NULL. */
static struct kvist_map map_over(struct kvist_map_header *header)
{
    char *base = (char *)header;
    return (struct kvist_map){
        .fd = -1,
        .read_only_fd = -1,
        .bytes = header->map_bytes,
        .header = header,
        .segments = (void *)(base + header->segment_table_offset),
        .slots = (void *)(base + header->slot_table_offset),
        .index = (void *)(base + header->index_offset),
        .capacity = header->index_capacity,
        .segment_max = header->segment_max,
        .slot_max = header->slot_max,
    };
}

static void begin_pool(void)
{
    side.segment = (struct kvist_segment){
        .pool = &side.pool,
        .life = KVIST_LIFE_LIVE,
        .serial = KVIST_WORLD_SERIAL,
        .fd = -1,
        .map = side.bytes,
        .bytes = sizeof(side.bytes),
        .free_head = KVIST_SLOT_NONE,
        .lent_count = 1,
    };
    side.pool = (struct kvist_store_pool){
        .magic = POOL_MAGIC,
        .store = side.store,
        .about = {.slot_bytes = KVIST_BLOCK_BYTES_MIN, .generation = 1},
        .map = map_over(kvist_world_get()->map),
        .segment_bytes = side.segment.bytes,
        .slots_per_segment = KVIST_WORLD_SLOTS,
        .segment_max = 1,
        .slot_max = KVIST_WORLD_SLOTS,
        .segments = &side.segment,
        .states = side.states,
        .slots = side.slots,
        .ops = &no_policy,
        .segment_count = 1,
        .retired_head = KVIST_SLOT_NONE,
        .leased_seen = side.leased_seen,
    };
}

void kvist_daemon_begin(void)
{
    free_what_was_left();
    begin_pool();
    for (uint32_t slot = 0; slot < KVIST_WORLD_SLOTS; slot++) {
        uint8_t key[KVIST_KEY_BYTES];
        struct kvist_entry_copy entry;
        kvist_world_key(slot == 0 ? 1 : 3, key);
        side.states[slot] = KVIST_SLOT_READY;
        side.slots[slot] = (struct kvist_slot){.next = KVIST_SLOT_NONE};
        side.slots[slot].entry = kvist_map_find(&side.pool.map, key, &entry);
        side.pool.map.live++;
    }
    side.pool.counts[KVIST_SLOT_READY] = KVIST_WORLD_SLOTS;
    side.segment.counts[KVIST_SLOT_READY] = KVIST_WORLD_SLOTS;
    side.store->roster->reservation_next = KVIST_WORLD_GRANT + 1;
    side.store->sum_queue.head = side.store->sum_queue.tail;
    side.store->sums_active = 0;
    side.store->sum_free = &side.store->sums[0];
    side.job = NULL;
    side.session->page.touch_tail = 0;
    side.session->ticket_free_count = 0;
    side.session->tickets[KVIST_WORLD_TICKET].slot = KVIST_SLOT_NONE;
}

/* --- What it does ------------------------------------------------------------------------------
 */

bool kvist_daemon_evict(uint32_t slot)
{
    return kvist_evict_slots(&side.pool, &slot, 1, false) == 1;
}

bool kvist_daemon_clear(uint32_t slot)
{
    KVIST_TEST_FATAL(kvist_store_clear(side.store, &side.pool, NULL, NULL) == KVIST_OK);
    return side.states[slot] == KVIST_SLOT_FREE;
}

void kvist_daemon_grant(uint32_t slot)
{
    KVIST_TEST_FATAL(kvist_slot_take(&side.pool, &side.segment, KVIST_SLOT_GRANTED) == slot);
    side.slots[slot].reservation = KVIST_WORLD_GRANT;
    side.slots[slot].ticket = KVIST_WORLD_TICKET;
    side.session->tickets[KVIST_WORLD_TICKET] = (struct kvist_ticket){.slot = slot};
}

void kvist_daemon_publish(uint32_t slot, uint32_t block)
{
    struct kvist_entry_copy entry = {
        .state = KVIST_ENTRY_READY,
        .slot = slot,
        .generation = kvist_slot_generation(&side.pool, slot),
    };
    uint8_t key[KVIST_KEY_BYTES];
    kvist_world_key(block, key);
    memcpy(entry.key, key, sizeof(entry.key));
    kvist_slot_prepare(&side.pool, slot, block);
    uint32_t position = kvist_map_place(&side.pool.map, entry.key);
    kvist_slot_publish(&side.pool, slot, position, &entry);
}

bool kvist_daemon_commit(uint32_t slot, uint32_t block)
{
    struct kvist_store_commit commit = {
        .slot = slot,
        .ticket = KVIST_WORLD_TICKET,
        .reservation = KVIST_WORLD_GRANT,
        .block_bytes = block,
    };
    kvist_world_key(block, commit.key);
    return kvist_store_commit(side.session, 0, &commit) == KVIST_OK;
}

void kvist_daemon_grow(void)
{
    const struct kvist_map_header *map = side.pool.map.header;
    memset(side.next, 0, map->map_bytes);
    memcpy(side.next, map, sizeof(*map));
    side.pool.map.next = calloc(1, sizeof(*side.pool.map.next));
    KVIST_TEST_FATAL(side.pool.map.next != NULL);
    *side.pool.map.next = map_over(side.next);
    kvist_pool_grow_map(&side.pool);
    KVIST_TEST_FATAL(side.pool.map.header == side.next);
}

void kvist_daemon_revoke(void)
{
    kvist_slot_set_draining(&side.pool, &side.segment, true);
    kvist_arena_revoke(&side.pool, &side.segment);
}

void kvist_daemon_sum(uint32_t slot)
{
    kvist_spill_queue_sum(&side.pool, slot);
    kvist_spill_turn(side.store);
    side.job->run(side.job);
    side.job->done(side.job);
}

uint64_t kvist_daemon_touch(void)
{
    uint64_t ref = 0;
    return kvist_page_take_touches(&side.session->page, &ref, 1) == 1 ? ref : UINT64_MAX;
}
