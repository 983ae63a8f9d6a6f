#include "tests/support/engine.h"

#include "proto/base/clock.h"
#include "proto/shm/memfd.h"
#include "storage/internal.h"
#include "tests/support/unit.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define QUIET_TURNS 4
#define QUIET_MS    2

static uint64_t clock_offset_us;
static uint64_t stopped_us; /* when the clock was stopped; 0: it goes */

static uint64_t now_us(void)
{
    return (stopped_us != 0 ? stopped_us : kvist_clock_now_us()) + clock_offset_us;
}

void kvist_test_clock(bool goes)
{
    stopped_us = goes ? 0 : kvist_clock_now_us();
}

/* --- Events ---------------------------------------------------------------------------------- */

static uint32_t rank_of(const struct kvist_test_member *member)
{
    uint32_t index = (uint32_t)(member - member->engine->members);
    return member->engine->rank_count == 1 ? 0 : index - 1; /* member 0 is the scheduler */
}

static _Atomic uint32_t *mapped_record(struct kvist_test_engine *engine,
                                       uint32_t rank,
                                       uint32_t ordinal,
                                       uint32_t segment)
{
    _Atomic uint32_t *table =
        (void *)((char *)engine->page + engine->geometry.mapped_offset);
    return &table[((size_t)rank * KVIST_SESSION_POOLS_MAX + ordinal) * KVIST_SEGMENTS_MAX +
                  segment];
}

static void segment_lent(void *ctx,
                         struct kvist_store_process *process,
                         uint32_t ordinal,
                         uint32_t index,
                         uint32_t serial,
                         int fd,
                         uint64_t bytes)
{
    (void)ctx;
    struct kvist_test_member *member = kvist_store_process_ctx(process);
    struct kvist_test_engine *engine = member->engine;
    if (engine->maps_nothing) {
        return;
    }
    struct kvist_test_segment *segment = &engine->pools[ordinal].segments[index];
    if (segment->serial != serial) {
        KVIST_TEST_FATAL(segment->map == NULL);
        KVIST_TEST_FATAL(
            kvist_memfd_map(fd, bytes, KVIST_MEMFD_WRITE, &segment->map, NULL) == KVIST_OK);
        segment->bytes = bytes;
        segment->serial = serial;
        segment->revoked = false;
    }
    atomic_store_explicit(
        mapped_record(engine, rank_of(member), ordinal, index), serial, memory_order_release);
    kvist_store_segment_mapped(process, ordinal, index, serial);
}

static void take_map(struct kvist_test_pool *mine, int fd, uint64_t bytes)
{
    if (mine->map != NULL) {
        kvist_memfd_unmap(&mine->map, mine->header.map_bytes);
    }
    KVIST_TEST_FATAL(kvist_memfd_map(fd, bytes, KVIST_MEMFD_READ, &mine->map, NULL) == KVIST_OK);
    memcpy(&mine->header, mine->map, sizeof(mine->header));
    KVIST_TEST_FATAL(kvist_map_header_check(&mine->header, bytes));
}

static void
map_replaced(void *ctx, struct kvist_store_process *process, uint32_t ordinal, int fd, uint64_t bytes)
{
    (void)ctx;
    struct kvist_test_member *member = kvist_store_process_ctx(process);
    struct kvist_test_pool *mine = &member->engine->pools[ordinal];
    take_map(mine, fd, bytes);
    mine->maps_replaced++;
}

static void granted(void *ctx,
                    struct kvist_store_process *process,
                    uint32_t ordinal,
                    const struct kvist_store_grant *grants,
                    size_t count)
{
    (void)ctx;
    struct kvist_test_member *member = kvist_store_process_ctx(process);
    struct kvist_test_pool *mine = &member->engine->pools[ordinal];
    for (size_t index = 0; index < count; index++) {
        KVIST_TEST_FATAL(mine->grant_count < KVIST_GRANTS_MAX);
        mine->grants[mine->grant_count++] = grants[index];
        mine->granted_total++;
    }
}

static void revoked(void *ctx,
                    struct kvist_store_process *process,
                    uint32_t ordinal,
                    uint32_t segment,
                    uint32_t serial)
{
    (void)ctx;
    struct kvist_test_member *member = kvist_store_process_ctx(process);
    struct kvist_test_segment *mine = &member->engine->pools[ordinal].segments[segment];
    if (mine->serial == serial) {
        mine->revoked = true;
    }
}

static void
recalled(void *ctx, struct kvist_store_process *process, uint32_t ordinal, uint32_t count)
{
    (void)ctx;
    struct kvist_test_member *member = kvist_store_process_ctx(process);
    member->engine->pools[ordinal].recalled += count;
    member->engine->pools[ordinal].recall_due = count;
}

static void
promoted(void *ctx, struct kvist_store_process *process, uint32_t ordinal, uint32_t count)
{
    (void)ctx;
    struct kvist_test_member *member = kvist_store_process_ctx(process);
    member->engine->pools[ordinal].promoted += count;
}

/* --- The store ------------------------------------------------------------------------------- */

struct kvist_store_options kvist_test_options(uint64_t arena_bytes)
{
    return (struct kvist_store_options){
        .arena_bytes = arena_bytes,
        .checksum_threads = 1,
        .hold_us = 200000,
        .events =
            {
                .segment_lent = segment_lent,
                .map_replaced = map_replaced,
                .granted = granted,
                .revoked = revoked,
                .recalled = recalled,
                .promoted = promoted,
            },
    };
}

struct kvist_store *kvist_test_store_open(const struct kvist_store_options *options)
{
    struct kvist_store *store = NULL;
    struct kvist_error err = KVIST_ERROR_INIT;
    if (kvist_store_open(options, &store, &err) != KVIST_OK) {
        (void)fprintf(stderr, "store: %s\n", err.text);
    }
    KVIST_TEST_FATAL(store != NULL);
    return store;
}

struct kvist_store_stats kvist_test_stats(struct kvist_store *store)
{
    struct kvist_store_stats stats;
    kvist_store_stats(store, &stats);
    return stats;
}

void kvist_test_settle(struct kvist_store *store)
{
    for (unsigned quiet = 0; quiet < QUIET_TURNS;) {
        struct pollfd polls[4];
        int fds[4];
        size_t count = kvist_store_fds(store, fds);
        for (size_t index = 0; index < count; index++) {
            polls[index] = (struct pollfd){.fd = fds[index], .events = POLLIN};
        }
        bool more = poll(polls, (nfds_t)count, QUIET_MS) > 0;
        more = kvist_store_turn(store, now_us()) || more;
        kvist_store_kept(store, store->keep_count);
        struct kvist_store_stats stats;
        kvist_store_stats(store, &stats);
        more = more || stats.arena_used_bytes != stats.populated_bytes || stats.slots_loading > 0;
        more = more || (stats.tier.loading && stats.tier.degraded[0] == '\0');
        quiet = more ? 0 : quiet + 1;
    }
    const char *broken = kvist_store_check(store);
    if (broken != NULL) {
        (void)fprintf(stderr, "kvist_store_check: %s\n", broken);
    }
    KVIST_TEST_FATAL(broken == NULL);
}

void kvist_test_settle_sums(struct kvist_store *store, uint64_t count)
{
    struct kvist_store_stats stats = {.checksums_total = 0};
    uint64_t until_us = kvist_clock_now_us() + KVIST_TEST_PATIENCE_US;
    while (stats.checksums_total < count && kvist_clock_now_us() < until_us) {
        kvist_test_settle(store);
        kvist_store_stats(store, &stats);
    }
    KVIST_TEST_EQUAL(stats.checksums_total, count);
}

void kvist_test_rest(struct kvist_store *store)
{
    kvist_test_settle(store);
    KVIST_TEST_SETTLE_WHILE(store,
                            store->sums_active > 0 ||
                                store->sum_queue.head != store->sum_queue.tail);
    KVIST_TEST_EQUAL(store->sums_active, 0);
}

void kvist_test_advance(struct kvist_store *store, uint64_t us)
{
    clock_offset_us += us;
    (void)kvist_store_turn(store, now_us());
}

void kvist_test_key(uint64_t number, uint8_t key_out[KVIST_KEY_BYTES])
{
    uint64_t words[4];
    for (uint64_t word = 0; word < 4; word++) {
        uint64_t value = (number + 1) * 0x9e3779b97f4a7c15ULL + word * 0xd1342543de82ef95ULL;
        value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
        words[word] = value ^ (value >> 31);
    }
    memcpy(key_out, words, sizeof(words));
}

struct kvist_store_pool *
kvist_test_pool_open(struct kvist_store *store, uint8_t number, uint64_t slot_bytes)
{
    struct kvist_tier_pool about = {.slot_bytes = slot_bytes, .tenant = "", .description = "test"};
    about.pool_id[0] = number;
    about.pool_id[31] = 0xaa;
    struct kvist_store_pool *pool = NULL;
    KVIST_TEST_FATAL(kvist_store_pool_open(store, &about, &pool, NULL) == KVIST_OK);
    return pool;
}

/* --- The engine ------------------------------------------------------------------------------ */

static void add_member(struct kvist_test_engine *engine, bool schedules, bool maps, uint32_t rank)
{
    struct kvist_test_member *member = &engine->members[engine->member_count++];
    member->engine = engine;
    KVIST_TEST_FATAL(
        kvist_store_process_open(
            engine->session, schedules, maps, rank, member, &member->process, NULL) == KVIST_OK);
    int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    KVIST_TEST_FATAL(pidfd >= 0);
    KVIST_TEST_FATAL(
        kvist_store_process_watch(member->process, (uint32_t)getpid(), pidfd) == KVIST_OK);
    (void)close(pidfd);
}

struct kvist_test_engine *
kvist_test_engine_open(struct kvist_store *store, uint8_t number, uint32_t rank_count)
{
    struct kvist_test_engine *engine = calloc(1, sizeof(*engine));
    KVIST_TEST_FATAL(engine != NULL);
    uint8_t id[16] = {number, 1, 2, 3};
    engine->store = store;
    engine->rank_count = rank_count;
    KVIST_TEST_FATAL(
        kvist_store_session_open(store, id, rank_count, &engine->session, NULL) == KVIST_OK);
    static const struct kvist_store_about about = {.uid = 1000, .tenant = "t", .name = "test"};
    kvist_store_session_describe(engine->session, &about);
    uint64_t bytes = kvist_store_session_page_bytes(engine->session);
    KVIST_TEST_FATAL(kvist_memfd_map(kvist_store_session_page_fd(engine->session),
                                     bytes,
                                     KVIST_MEMFD_WRITE,
                                     &engine->page,
                                     NULL) == KVIST_OK);
    memcpy(&engine->geometry, engine->page, sizeof(engine->geometry));
    KVIST_TEST_FATAL(kvist_page_header_check(&engine->geometry, bytes));
    if (rank_count == 1) {
        add_member(engine, true, true, 0);
    } else {
        add_member(engine, true, false, 0);
        for (uint32_t rank = 0; rank < rank_count; rank++) {
            add_member(engine, false, true, rank);
        }
    }
    return engine;
}

uint32_t kvist_test_engine_attach(struct kvist_test_engine *engine, struct kvist_store_pool *pool)
{
    uint32_t ordinal = 0;
    for (uint32_t index = 0; index < engine->member_count; index++) {
        KVIST_TEST_FATAL(
            kvist_store_attach(
                engine->members[index].process, pool, false, &ordinal, NULL) == KVIST_OK);
    }
    struct kvist_test_pool *mine = &engine->pools[ordinal];
    mine->pool = pool;
    mine->ordinal = ordinal;
    take_map(mine, kvist_store_pool_map_fd(pool), kvist_store_pool_map_bytes(pool));
    if (ordinal >= engine->pool_count) {
        engine->pool_count = ordinal + 1;
    }
    return ordinal;
}

static void unmap_all(struct kvist_test_pool *mine)
{
    for (uint32_t segment = 0; segment < KVIST_SEGMENTS_MAX; segment++) {
        kvist_memfd_unmap(&mine->segments[segment].map, mine->segments[segment].bytes);
    }
    kvist_memfd_unmap(&mine->map, mine->header.map_bytes);
}

void kvist_test_engine_detach(struct kvist_test_engine *engine, uint32_t ordinal)
{
    struct kvist_test_pool *mine = &engine->pools[ordinal];
    for (uint32_t rank = 0; rank < engine->rank_count; rank++) {
        for (uint32_t segment = 0; segment < KVIST_SEGMENTS_MAX; segment++) {
            *mapped_record(engine, rank, ordinal, segment) = 0;
        }
    }
    unmap_all(mine);
    memset(mine, 0, sizeof(*mine));
    for (uint32_t index = 0; index < engine->member_count; index++) {
        kvist_store_detach(engine->members[index].process, ordinal);
    }
}

static bool find_adopted(const struct kvist_test_engine *engine,
                         const struct kvist_store *store,
                         struct kvist_store_adopted *adopted_out)
{
    for (uint32_t place = 0; place < KVIST_SESSIONS_MAX; place++) {
        if (kvist_store_adopted(store, place, adopted_out) &&
            memcmp(adopted_out->id, engine->geometry.session_id, sizeof(adopted_out->id)) == 0) {
            return true;
        }
    }
    return false;
}

static void adopt_member(struct kvist_test_member *member,
                         const struct kvist_store_adopted *adopted)
{
    const struct kvist_test_engine *engine = member->engine;
    bool schedules = member == &engine->members[0];
    bool maps = engine->rank_count == 1 || !schedules;
    member->process = NULL;
    for (size_t index = 0; index < adopted->process_count; index++) {
        if (adopted->processes[index].schedules == schedules &&
            adopted->processes[index].maps_segments == maps &&
            (!maps || adopted->processes[index].rank == rank_of(member))) {
            member->process = adopted->processes[index].process;
        }
    }
    KVIST_TEST_FATAL(member->process != NULL);
    kvist_store_process_set_ctx(member->process, member);
}

bool kvist_test_engine_can_adopt(struct kvist_test_engine *engine, struct kvist_store *store)
{
    struct kvist_store_adopted adopted;
    bool can = find_adopted(engine, store, &adopted) &&
               adopted.process_count == engine->member_count;
    for (uint32_t ordinal = 0; can && ordinal < engine->pool_count; ordinal++) {
        can = adopted.session->attachments[ordinal].pool ==
              kvist_store_pool_lookup(store, engine->pools[ordinal].header.pool_id);
    }
    return can;
}

void kvist_test_engine_adopt(struct kvist_test_engine *engine, struct kvist_store *store)
{
    struct kvist_store_adopted adopted;
    KVIST_TEST_FATAL(find_adopted(engine, store, &adopted));
    engine->store = store;
    engine->session = adopted.session;
    for (uint32_t index = 0; index < engine->member_count; index++) {
        adopt_member(&engine->members[index], &adopted);
    }
    for (uint32_t ordinal = 0; ordinal < engine->pool_count; ordinal++) {
        struct kvist_test_pool *mine = &engine->pools[ordinal];
        if (mine->map != NULL) {
            mine->grant_count = 0; /* said again */
            struct kvist_store_pool *pool = kvist_store_pool_lookup(store, mine->header.pool_id);
            KVIST_TEST_FATAL(kvist_test_engine_attach(engine, pool) == ordinal);
        }
    }
}

void kvist_test_engine_abandon(struct kvist_test_engine **engine)
{
    if (*engine != NULL) {
        for (uint32_t index = 0; index < (*engine)->pool_count; index++) {
            unmap_all(&(*engine)->pools[index]);
        }
        kvist_memfd_unmap(&(*engine)->page, (*engine)->geometry.page_bytes);
        free(*engine);
        *engine = NULL;
    }
}

void kvist_test_engine_close(struct kvist_test_engine **engine)
{
    struct kvist_test_engine *old = *engine;
    for (uint32_t index = 0; index < old->member_count; index++) {
        kvist_store_process_close(&old->members[index].process);
    }
    kvist_store_session_close(&old->session);
    for (uint32_t index = 0; index < old->pool_count; index++) {
        unmap_all(&old->pools[index]);
    }
    kvist_memfd_unmap(&old->page, old->geometry.page_bytes);
    free(old);
    *engine = NULL;
}

void kvist_test_engine_unmap_revoked(struct kvist_test_engine *engine)
{
    for (uint32_t ordinal = 0; ordinal < engine->pool_count; ordinal++) {
        for (uint32_t index = 0; index < KVIST_SEGMENTS_MAX; index++) {
            struct kvist_test_segment *segment = &engine->pools[ordinal].segments[index];
            if (!segment->revoked) {
                continue;
            }
            uint32_t serial = segment->serial;
            kvist_memfd_unmap(&segment->map, segment->bytes);
            *segment = (struct kvist_test_segment){.map = NULL};
            for (uint32_t rank = 0; rank < engine->rank_count; rank++) {
                *mapped_record(engine, rank, ordinal, index) = 0;
            }
            for (uint32_t member = 0; member < engine->member_count; member++) {
                kvist_store_segment_unmapped(
                    engine->members[member].process, ordinal, index, serial);
            }
        }
    }
}

void kvist_test_engine_give_back(struct kvist_test_engine *engine)
{
    for (uint32_t ordinal = 0; ordinal < engine->pool_count; ordinal++) {
        struct kvist_test_pool *mine = &engine->pools[ordinal];
        for (; mine->recall_due > 0 && mine->grant_count > 0; mine->recall_due--) {
            const struct kvist_store_grant *grant = &mine->grants[--mine->grant_count];
            KVIST_TEST_STATUS(kvist_store_return(engine->session,
                                                 ordinal,
                                                 grant->slot,
                                                 grant->ticket,
                                                 grant->reservation),
                              KVIST_OK);
        }
        mine->recall_due = 0;
    }
}

bool kvist_test_engine_take(struct kvist_test_engine *engine,
                            uint32_t ordinal,
                            struct kvist_store_grant *grant_out)
{
    struct kvist_test_pool *mine = &engine->pools[ordinal];
    if (mine->grant_count == 0) {
        mine->used = mine->used > mine->taken ? mine->used : mine->taken + 1;
        return false;
    }
    *grant_out = mine->grants[--mine->grant_count];
    mine->taken++;
    mine->used = mine->used > mine->taken ? mine->used : mine->taken;
    return true;
}

void *kvist_test_engine_slot(struct kvist_test_engine *engine, uint32_t ordinal, uint32_t slot)
{
    struct kvist_test_pool *mine = &engine->pools[ordinal];
    KVIST_TEST_FATAL(slot < mine->header.slot_max);
    struct kvist_test_segment *segment =
        &mine->segments[slot / mine->header.slots_per_segment];
    KVIST_TEST_FATAL(segment->map != NULL);
    return (char *)segment->map +
           (uint64_t)(slot % mine->header.slots_per_segment) * mine->header.slot_bytes;
}

/* ThreadSanitizer tells addresses apart, not memory: the store and the engine have the index and the
   leases mapped at two places each, so it cannot see what orders these accesses. */
#define SHARED_BYTES __attribute__((no_sanitize("thread")))

SHARED_BYTES void kvist_test_fill(void *slot, uint64_t number, uint64_t bytes)
{
    uint64_t *words = slot;
    for (uint64_t word = 0; word < bytes / sizeof(*words); word++) {
        words[word] = (number << 20) + word;
    }
}

SHARED_BYTES bool kvist_test_holds(const void *slot, uint64_t number, uint64_t bytes)
{
    const uint64_t *words = slot;
    for (uint64_t word = 0; word < bytes / sizeof(*words); word++) {
        if (words[word] != (number << 20) + word) {
            return false;
        }
    }
    return true;
}

void kvist_test_engine_mark(struct kvist_test_engine *engine,
                            uint32_t rank,
                            const struct kvist_store_grant *grant)
{
    _Atomic uint64_t *marks = (void *)((char *)engine->page + engine->geometry.mark_offset);
    atomic_store_explicit(&marks[(size_t)rank * engine->geometry.ticket_max + grant->ticket],
                          grant->reservation,
                          memory_order_release);
}

enum kvist_status kvist_test_engine_commit(struct kvist_test_engine *engine,
                                           uint32_t ordinal,
                                           const struct kvist_store_grant *grant,
                                           uint64_t number,
                                           uint64_t bytes)
{
    struct kvist_store_commit commit = {
        .slot = grant->slot,
        .ticket = grant->ticket,
        .reservation = grant->reservation,
        .block_bytes = bytes,
    };
    kvist_test_key(number, commit.key);
    struct kvist_test_pool *mine = &engine->pools[ordinal];
    kvist_store_used(engine->session, ordinal, mine->used);
    mine->taken -= mine->taken > 0;
    mine->used = mine->taken;
    return kvist_store_commit(engine->session, ordinal, &commit);
}

enum kvist_status kvist_test_engine_put(struct kvist_test_engine *engine,
                                        uint32_t ordinal,
                                        uint64_t number,
                                        uint64_t bytes)
{
    struct kvist_store_grant grant;
    if (!kvist_test_engine_take(engine, ordinal, &grant)) {
        return KVIST_BUSY;
    }
    kvist_test_fill(kvist_test_engine_slot(engine, ordinal, grant.slot), number, bytes);
    for (uint32_t rank = 0; rank < engine->rank_count; rank++) {
        kvist_test_engine_mark(engine, rank, &grant);
    }
    return kvist_test_engine_commit(engine, ordinal, &grant, number, bytes);
}

/* --- Reading --------------------------------------------------------------------------------- */

static uint32_t find(const struct kvist_test_pool *mine,
                     uint64_t number,
                     struct kvist_entry_copy *copy_out)
{
    uint8_t key[KVIST_KEY_BYTES];
    kvist_test_key(number, key);
    const struct kvist_index_entry *index =
        (const void *)((const char *)mine->map + mine->header.index_offset);
    return kvist_index_find(
        index, mine->header.index_capacity, mine->header.index_seed, key, copy_out);
}

enum kvist_entry_state
kvist_test_engine_probe(struct kvist_test_engine *engine, uint32_t ordinal, uint64_t number)
{
    struct kvist_entry_copy copy;
    bool found = find(&engine->pools[ordinal], number, &copy) != KVIST_ENTRY_NONE;
    return found ? copy.state : KVIST_ENTRY_EMPTY;
}

uint8_t *
kvist_test_engine_bytes(struct kvist_test_engine *engine, uint32_t ordinal, uint64_t number)
{
    struct kvist_entry_copy copy;
    bool found = find(&engine->pools[ordinal], number, &copy) != KVIST_ENTRY_NONE;
    return found && copy.state == KVIST_ENTRY_READY
               ? kvist_test_engine_slot(engine, ordinal, copy.slot)
               : NULL;
}

enum kvist_status kvist_test_engine_suspect(struct kvist_test_engine *engine,
                                            uint32_t ordinal,
                                            uint64_t first,
                                            size_t count)
{
    uint8_t keys[KVIST_SUSPECT_KEYS_MAX + 1][KVIST_KEY_BYTES];
    KVIST_TEST_FATAL(count <= sizeof(keys) / sizeof(keys[0]));
    for (size_t index = 0; index < count; index++) {
        kvist_test_key(first + index, keys[index]);
    }
    return kvist_store_suspect(
        engine->members[0].process, ordinal, (const uint8_t(*)[KVIST_KEY_BYTES])keys, count);
}

uint32_t
kvist_test_engine_slot_of(struct kvist_test_engine *engine, uint32_t ordinal, uint64_t number)
{
    struct kvist_entry_copy copy;
    bool ready = find(&engine->pools[ordinal], number, &copy) != KVIST_ENTRY_NONE &&
                 copy.state == KVIST_ENTRY_READY;
    return ready ? copy.slot : KVIST_SLOT_NONE;
}

static struct kvist_lease_record *lease_record(struct kvist_test_engine *engine, uint32_t record)
{
    struct kvist_lease_record *records =
        (void *)((char *)engine->page + engine->geometry.lease_offset);
    return &records[record];
}

static void raise_lease_high(struct kvist_test_engine *engine, uint32_t wanted)
{
    struct kvist_page_header *header = engine->page;
    uint32_t high = atomic_load(&header->lease_high);
    while (high < wanted && !atomic_compare_exchange_weak(&header->lease_high, &high, wanted)) {
    }
}

const void *kvist_test_engine_lease(struct kvist_test_engine *engine,
                                    uint32_t ordinal,
                                    uint64_t number,
                                    uint32_t record)
{
    struct kvist_test_pool *mine = &engine->pools[ordinal];
    struct kvist_entry_copy copy;
    uint32_t position = find(mine, number, &copy);
    if (position == KVIST_ENTRY_NONE || copy.state != KVIST_ENTRY_READY ||
        copy.slot >= mine->header.slot_max ||
        mine->segments[copy.slot / mine->header.slots_per_segment].map == NULL) {
        return NULL;
    }
    struct kvist_lease_record *mine_record = lease_record(engine, record);
    raise_lease_high(engine, record + 1);
    atomic_store_explicit(&mine_record->generation, copy.generation, memory_order_relaxed);
    atomic_store_explicit(
        &mine_record->ref, kvist_slot_ref(ordinal, copy.slot), memory_order_relaxed);
    kvist_lease_fence();
    const struct kvist_index_entry *index =
        (const void *)((const char *)mine->map + mine->header.index_offset);
    const struct kvist_map_header *header = mine->map;
    struct kvist_entry_copy again;
    if (!kvist_entry_read(&index[position], &again) || again.state != KVIST_ENTRY_READY ||
        again.slot != copy.slot || again.generation != copy.generation ||
        memcmp(again.key, copy.key, sizeof(again.key)) != 0 ||
        atomic_load_explicit(&header->moved, memory_order_relaxed) != 0) {
        kvist_test_engine_release(engine, record);
        return NULL;
    }
    return kvist_test_engine_slot(engine, ordinal, copy.slot);
}

void kvist_test_engine_release(struct kvist_test_engine *engine, uint32_t record)
{
    atomic_store_explicit(&lease_record(engine, record)->ref, 0, memory_order_release);
}

void kvist_test_engine_touch(struct kvist_test_engine *engine, uint64_t ref)
{
    struct kvist_page_header *header = engine->page;
    _Atomic uint64_t *ring = (void *)((char *)engine->page + engine->geometry.touch_offset);
    uint64_t head = atomic_load_explicit(&header->touch_head, memory_order_relaxed);
    atomic_store_explicit(
        &ring[head % KVIST_TOUCH_RING_COUNT], ref, memory_order_relaxed);
    atomic_store_explicit(&header->touch_head, head + 1, memory_order_release);
}
