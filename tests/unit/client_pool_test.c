/* libkvist against a hand-stepped peer: leases, fills, segments, threads. */
#include "proto/base/fault.h"
#include "tests/unit/client_fixture.h"

#include <pthread.h>

/* --- Leases -------------------------------------------------------------------------------- */

static void a_block_is_found_and_leased(void)
{
    uint8_t keys[3][KVIST_KEY_BYTES];
    uint8_t probes[3];
    struct kvist_lease leases[3];
    size_t count = 0;
    enum kvist_probe stop;
    client_bring_up();
    for (uint64_t number = 0; number < 3; number++) {
        client_key(number + 1, keys[number]);
    }
    struct kvist_entry_copy on_nvme = {.state = KVIST_ENTRY_NVME, .extent = 1};
    peer_set_entry(&fix.peer, keys[1], &on_nvme);
    KVIST_TEST_STATUS(kvist_pool_probe(fix.pool, keys[0], 3, probes), KVIST_OK);
    KVIST_TEST_EQUAL(probes[0], KVIST_PROBE_READY);
    KVIST_TEST_EQUAL(probes[1], KVIST_PROBE_NVME);
    KVIST_TEST_EQUAL(probes[2], KVIST_PROBE_MISS);
    KVIST_TEST_STATUS(kvist_pool_acquire(fix.pool, keys[0], 3, leases, &count, &stop), KVIST_OK);
    KVIST_TEST_EQUAL(count, 1);
    KVIST_TEST_EQUAL(stop, KVIST_PROBE_NVME);
    KVIST_TEST_EQUAL(leases[0].slot, 1);
    KVIST_TEST_EQUAL(leases[0].generation, 7);
    KVIST_TEST_EQUAL(leases[0].block_bytes, PEER_SLOT_BYTES);
    const struct kvist_lease_record *record = peer_find_lease(&fix.peer, 1);
    KVIST_TEST_FATAL(record != NULL);
    KVIST_TEST_EQUAL(record->generation, 7);

    KVIST_TEST_STATUS(kvist_pool_pin(fix.pool, leases[0].instance), KVIST_OK);
    const uint8_t *bytes = kvist_pool_slot_address(fix.pool, leases[0].instance, 1);
    KVIST_TEST_FATAL(bytes != NULL);
    KVIST_TEST_TRUE(bytes[0] == 0x5a && bytes[PEER_SLOT_BYTES - 1] == 0x5a);
    KVIST_TEST_TRUE(kvist_pool_slot_address(fix.pool, leases[0].instance, 9) == NULL);
    KVIST_TEST_TRUE(kvist_pool_slot_address(fix.pool, leases[0].instance, 999) == NULL);
    kvist_pool_unpin(fix.pool, leases[0].instance);
    KVIST_TEST_STATUS(kvist_pool_pin(fix.pool, 12345), KVIST_STALE);

    struct kvist_client_stats stats;
    kvist_client_stats(fix.client, &stats);
    KVIST_TEST_EQUAL(stats.leases_held, 1);
    KVIST_TEST_EQUAL(stats.hits, 1);
    kvist_pool_release(fix.pool, leases, 1);
    KVIST_TEST_TRUE(peer_find_lease(&fix.peer, 1) == NULL);
    kvist_pool_release(fix.pool, leases, 1); /* twice: nothing happens */
    kvist_client_stats(fix.client, &stats);
    KVIST_TEST_EQUAL(stats.leases_held, 0);
    KVIST_TEST_EQUAL(fix.peer.arena.page->touch_head, 1);
}

static void a_run_of_many_keys_is_leased(void)
{
    enum { KEYS = 6 };
    uint8_t keys[300][KVIST_KEY_BYTES];
    uint8_t probes[300];
    struct kvist_lease leases[300];
    size_t count = 0;
    enum kvist_probe stop;
    client_bring_up();
    peer_send_segment(&fix.peer, 1, 12);
    UNTIL(fix.peer.mapped_count == 2);
    for (uint32_t number = 0; number < 300; number++) {
        client_key(number + 1, keys[number]);
        if (number < KEYS) {
            peer_publish(&fix.peer, keys[number], number, 20 + number);
        }
    }
    KVIST_TEST_STATUS(kvist_pool_acquire(fix.pool, keys[0], 300, leases, &count, &stop), KVIST_OK);
    KVIST_TEST_EQUAL(count, KEYS);
    KVIST_TEST_EQUAL(stop, KVIST_PROBE_MISS);
    KVIST_TEST_STATUS(kvist_pool_probe(fix.pool, keys[0], 300, probes), KVIST_OK);
    KVIST_TEST_EQUAL(probes[KEYS - 1], KVIST_PROBE_READY);
    KVIST_TEST_EQUAL(probes[299], KVIST_PROBE_MISS);
    kvist_pool_touch(fix.pool, keys[0], 300);
    KVIST_TEST_EQUAL(fix.peer.arena.page->touch_head, 2 * KEYS);
    const _Atomic uint64_t *ring = peer_touches(&fix.peer);
    KVIST_TEST_EQUAL(ring[0], kvist_slot_ref(0, KEYS - 1)); /* from the tail */
    KVIST_TEST_EQUAL(ring[KEYS - 1], kvist_slot_ref(0, 0));
    kvist_pool_release(fix.pool, leases, count);
}

static void lease_records_run_out(void)
{
    struct kvist_lease leases[PEER_LEASES + 1];
    uint8_t key[KVIST_KEY_BYTES];
    enum kvist_probe stop;
    size_t count = 0;
    client_bring_up();
    for (uint32_t index = 0; index < PEER_LEASES; index++) {
        KVIST_TEST_EQUAL(client_acquire(1, &leases[index], &stop), 1);
    }
    client_key(1, key);
    KVIST_TEST_STATUS(kvist_pool_acquire(fix.pool, key, 1, &leases[PEER_LEASES], &count, &stop),
                      KVIST_BUSY);
    KVIST_TEST_EQUAL(count, 0);
    KVIST_TEST_EQUAL(fix.peer.arena.page->lease_high, PEER_LEASES);
    kvist_pool_release(fix.pool, leases, PEER_LEASES);
    KVIST_TEST_TRUE(client_hits(1));
}

static void a_moved_map_is_a_miss_until_the_next_one_comes(void)
{
    struct kvist_client_stats stats;
    client_bring_up();
    fix.peer.arena.map->moved = 1;
    KVIST_TEST_TRUE(!client_hits(1));
    KVIST_TEST_TRUE(peer_find_lease(&fix.peer, 1) == NULL);
    kvist_client_stats(fix.client, &stats);
    KVIST_TEST_EQUAL(stats.lease_races, 1);
    fix.peer.arena.map->moved = 0;
    peer_grow(&fix.peer);
    peer_send_map(&fix.peer);
    UNTIL(client_hits(1));
}

static void nonsense_in_the_map_is_a_miss(void)
{
    uint8_t key[KVIST_KEY_BYTES];
    client_bring_up();
    client_key(2, key);
    struct kvist_entry_copy entry = {.state = KVIST_ENTRY_READY, .slot = 1000, .generation = 1};
    peer_set_entry(&fix.peer, key, &entry);
    KVIST_TEST_TRUE(!client_hits(2));
    entry.slot = UINT32_MAX - 1; /* far outside the mapping */
    peer_set_entry(&fix.peer, key, &entry);
    KVIST_TEST_TRUE(!client_hits(2));
    entry.slot = 2; /* block_bytes is 0 there */
    peer_set_entry(&fix.peer, key, &entry);
    KVIST_TEST_TRUE(!client_hits(2));
    entry.slot = PEER_SLOTS_PER_SEGMENT * 2; /* its segment does not exist */
    peer_set_entry(&fix.peer, key, &entry);
    KVIST_TEST_TRUE(!client_hits(2));
    peer_publish(&fix.peer, key, 3, 1);
    peer_slots(&fix.peer)[3].block_bytes = PEER_SLOT_BYTES + 1;
    KVIST_TEST_TRUE(!client_hits(2));
    KVIST_TEST_TRUE(client_hits(1));
}

static void every_rank_must_have_mapped_the_segment(void)
{
    uint8_t key[KVIST_KEY_BYTES];
    kvist_client_destroy(&fix.client);
    peer_stop(&fix.peer);
    peer_start(&fix.peer, client_session_id, 2);
    fix.client = client_make(KVIST_ROLE_SCHEDULER, 0, 2);
    fix.pool = client_open_pool(fix.client);
    UNTIL(kvist_pool_instance(fix.pool) != 0);
    peer_set_segment(&fix.peer, 0, 11, KVIST_SEGMENT_LIVE);
    client_key(1, key);
    peer_publish(&fix.peer, key, 1, 7);
    KVIST_TEST_TRUE(!client_hits(1));
    peer_set_mapped_record(&fix.peer, 0, 0, 11);
    KVIST_TEST_TRUE(!client_hits(1));
    peer_set_mapped_record(&fix.peer, 1, 0, 10); /* an older segment in that place */
    KVIST_TEST_TRUE(!client_hits(1));
    peer_set_mapped_record(&fix.peer, 1, 0, 11);
    KVIST_TEST_TRUE(client_hits(1));
    peer_set_segment(&fix.peer, 0, 11, KVIST_SEGMENT_REVOKED);
    KVIST_TEST_TRUE(!client_hits(1));
    struct kvist_client_stats stats;
    kvist_client_stats(fix.client, &stats);
    KVIST_TEST_EQUAL(stats.unmapped_misses, 4);
}

/* The daemon's side of the lease protocol at full speed: retire, fence, scan, and reuse the slot
 * when no record names it. A leased slot's bytes never change. */
struct evictor {
    _Atomic bool stop;
    _Atomic uint64_t reuses;
    _Atomic uint64_t kept;
};

static void *evict_and_reuse(void *ctx)
{
    struct evictor *evictor = ctx;
    uint8_t key[KVIST_KEY_BYTES];
    client_key(1, key);
    void *slot_1 = fix.peer.arena.segments[0] + PEER_SLOT_BYTES;
    _Atomic uint64_t *bytes = slot_1;
    struct kvist_entry_copy entry = {.state = KVIST_ENTRY_READY, .slot = 1, .generation = 7};
    uint64_t words[4];
    memcpy(words, key, sizeof(words));
    memcpy(entry.key, key, sizeof(words));
    const struct kvist_map_header *map = fix.peer.arena.map;
    struct kvist_index_entry *place =
        &peer_index(&fix.peer)[kvist_index_home(words, map->index_seed, map->index_capacity)];
    while (!evictor->stop) {
        struct kvist_entry_copy gone = entry;
        gone.state = KVIST_ENTRY_TOMBSTONE;
        kvist_entry_write(place, &gone);
        kvist_lease_fence();
        if (peer_find_lease(&fix.peer, 1) == NULL) {
            entry.generation++;
            for (uint32_t word = 0; word < 64; word++) {
                atomic_store_explicit(&bytes[word], entry.generation, memory_order_relaxed);
            }
            evictor->reuses++;
        } else {
            evictor->kept++;
        }
        kvist_entry_write(place, &entry);
    }
    return NULL;
}

static void a_leased_slot_is_never_reused(void)
{
    struct evictor evictor = {.stop = false};
    pthread_t thread;
    struct kvist_lease lease;
    enum kvist_probe stop;
    uint64_t leased = 0;
    uint64_t wrong = 0;
    client_bring_up();
    KVIST_TEST_STATUS(kvist_pool_pin(fix.pool, fix.peer.arena.instance), KVIST_OK);
    _Atomic uint64_t *bytes = kvist_pool_slot_address(fix.pool, fix.peer.arena.instance, 1);
    KVIST_TEST_FATAL(pthread_create(&thread, NULL, evict_and_reuse, &evictor) == 0);
    uint64_t start_us = kvist_clock_now_us();
    for (uint64_t now_us = start_us;
         now_us < start_us + 500000 ||
         (now_us < start_us + CLIENT_PATIENCE_US && (leased < 1000 || evictor.reuses < 1000));
         now_us = kvist_clock_now_us()) {
        if (client_acquire(1, &lease, &stop) == 0) {
            continue;
        }
        leased++;
        for (uint32_t word = 0; word < 64; word++) {
            uint64_t seen = atomic_load_explicit(&bytes[word], memory_order_relaxed);
            wrong += seen != lease.generation && lease.generation != 7;
        }
        kvist_pool_release(fix.pool, &lease, 1);
    }
    evictor.stop = true;
    (void)pthread_join(thread, NULL);
    kvist_pool_unpin(fix.pool, fix.peer.arena.instance);
    KVIST_TEST_EQUAL(wrong, 0);
    KVIST_TEST_TRUE(leased >= 1000 && evictor.reuses >= 1000);
}

/* --- Fills --------------------------------------------------------------------------------- */

static void slots_are_taken_marked_and_committed(void)
{
    struct kvist_take takes[4];
    uint8_t keys[2][KVIST_KEY_BYTES];
    size_t count = 0;
    client_bring_up();
    KVIST_TEST_STATUS(kvist_pool_take(fix.pool, 4, takes, &count), KVIST_OK);
    KVIST_TEST_EQUAL(count, 0);
    peer_send_grant(&fix.peer, 2, 5, 501);
    peer_send_grant(&fix.peer, 3, 6, 502);
    struct kvist_client_stats stats;
    UNTIL((kvist_client_stats(fix.client, &stats), stats.grants_held == 2));
    KVIST_TEST_STATUS(kvist_pool_wait(fix.pool, 0, NULL), KVIST_OK);
    KVIST_TEST_STATUS(kvist_pool_take(fix.pool, 4, takes, &count), KVIST_OK);
    KVIST_TEST_EQUAL(count, 2);
    uint32_t at = takes[0].slot == 2 ? 0 : 1;
    KVIST_TEST_EQUAL(takes[at].ticket, 5);
    KVIST_TEST_EQUAL(takes[at].reservation, 501);
    KVIST_TEST_STATUS(kvist_pool_mark(fix.pool, &takes[0]), KVIST_OK);
    KVIST_TEST_STATUS(kvist_pool_mark(fix.pool, &takes[1]), KVIST_OK);
    KVIST_TEST_EQUAL(peer_mark(&fix.peer, 0, 5), 501);
    client_key(41, keys[0]);
    client_key(42, keys[1]);
    KVIST_TEST_STATUS(kvist_pool_commit(fix.pool, takes, keys[0], 2, NULL, PEER_SLOT_BYTES + 1),
                      KVIST_INVALID);
    KVIST_TEST_STATUS(kvist_pool_commit(fix.pool, takes, keys[0], 2, NULL, PEER_SLOT_BYTES),
                      KVIST_OK);
    UNTIL(fix.peer.commit_count == 2);
    KVIST_TEST_TRUE(memcmp(fix.peer.commits[1].key, keys[1], KVIST_KEY_BYTES) == 0);
    KVIST_TEST_EQUAL(fix.peer.commits[0].parent_tag, 0);
    KVIST_TEST_EQUAL(fix.peer.commits[1].parent_tag, 41);
    /* Once is enough. */
    KVIST_TEST_STATUS(kvist_pool_commit(fix.pool, takes, keys[0], 2, NULL, PEER_SLOT_BYTES),
                      KVIST_OK);
    kvist_pool_untake(fix.pool, takes, 2);
    client_step_for(20000);
    KVIST_TEST_EQUAL(fix.peer.commit_count, 2);
    KVIST_TEST_EQUAL(fix.peer.return_count, 0);
}

static void what_is_not_wanted_is_returned(void)
{
    struct kvist_take take;
    size_t count = 0;
    client_bring_up();
    peer_send_grant(&fix.peer, 2, 5, 501);
    peer_send_grant(&fix.peer, 3, 6, 502);
    UNTIL(kvist_pool_wait(fix.pool, 0, NULL) == KVIST_OK);
    client_step_for(5000);
    KVIST_TEST_STATUS(kvist_pool_take(fix.pool, 1, &take, &count), KVIST_OK);
    kvist_pool_untake(fix.pool, &take, 1);
    UNTIL(fix.peer.return_count == 1);
    KVIST_TEST_EQUAL(fix.peer.returns[0].reservation, take.reservation);
    kvist_pool_close(&fix.pool); /* gives the other one back, and unmaps */
    UNTIL(fix.peer.return_count == 2 && fix.unmapping_calls == 1);
    KVIST_TEST_EQUAL(peer_mapped_record(&fix.peer, 0, 0), 0);
}

static void what_is_recalled_is_returned_unless_it_is_taken(void)
{
    struct kvist_take takes[4];
    struct kvist_client_stats stats;
    size_t count = 0;
    client_bring_up();
    for (uint32_t slot = 0; slot < 4; slot++) {
        peer_send_grant(&fix.peer, slot, 10 + slot, 501 + slot);
    }
    UNTIL((kvist_client_stats(fix.client, &stats), stats.grants_held == 4));
    KVIST_TEST_STATUS(kvist_pool_take(fix.pool, 1, takes, &count), KVIST_OK);
    peer_send_recall(&fix.peer, 2);
    UNTIL(fix.peer.return_count == 2);
    peer_send_recall(&fix.peer, KVIST_GRANTS_MAX);
    UNTIL(fix.peer.return_count == 3);
    for (uint32_t index = 0; index < 3; index++) {
        KVIST_TEST_TRUE(fix.peer.returns[index].reservation != takes[0].reservation);
    }
    peer_send_recall(&fix.peer, 1);
    client_step_for(20000);
    KVIST_TEST_EQUAL(fix.peer.return_count, 3);
    KVIST_TEST_STATUS(kvist_pool_take(fix.pool, 1, takes + 1, &count), KVIST_OK);
    KVIST_TEST_EQUAL(count, 0);
    kvist_client_stats(fix.client, &stats);
    KVIST_TEST_EQUAL(stats.grants_held, 0);
    /* What was taken is as good as before. */
    uint8_t key[KVIST_KEY_BYTES];
    client_key(9, key);
    KVIST_TEST_STATUS(kvist_pool_commit(fix.pool, takes, key, 1, NULL, 4096), KVIST_OK);
    UNTIL(fix.peer.commit_count == 1);
    KVIST_TEST_EQUAL(fix.peer.commits[0].reservation, takes[0].reservation);
}

static void a_commit_says_how_many_slots_were_used(void)
{
    struct kvist_take takes[8];
    struct kvist_client_stats stats;
    uint8_t keys[8][KVIST_KEY_BYTES];
    size_t count = 0;
    client_bring_up();
    for (uint32_t slot = 0; slot < 6; slot++) {
        client_key(slot + 1, keys[slot]);
        peer_send_grant(&fix.peer, slot, slot, 501 + slot);
    }
    UNTIL((kvist_client_stats(fix.client, &stats), stats.grants_held == 6));
    KVIST_TEST_STATUS(kvist_pool_take(fix.pool, 2, takes, &count), KVIST_OK);
    KVIST_TEST_STATUS(kvist_pool_take(fix.pool, 1, takes + 2, &count), KVIST_OK);
    KVIST_TEST_STATUS(kvist_pool_commit(fix.pool, takes, keys[0], 3, NULL, 4096), KVIST_OK);
    UNTIL(fix.peer.commit_count == 3);
    KVIST_TEST_EQUAL(fix.peer.used, 3);
    KVIST_TEST_STATUS(kvist_pool_take(fix.pool, 8, takes, &count), KVIST_OK);
    KVIST_TEST_EQUAL(count, 3);
    KVIST_TEST_STATUS(kvist_pool_commit(fix.pool, takes, keys[3], 1, NULL, 4096), KVIST_OK);
    UNTIL(fix.peer.commit_count == 4);
    KVIST_TEST_EQUAL(fix.peer.used, 8);
    KVIST_TEST_STATUS(kvist_pool_commit(fix.pool, takes + 1, keys[4], 2, NULL, 4096), KVIST_OK);
    UNTIL(fix.peer.commit_count == 6);
    KVIST_TEST_EQUAL(fix.peer.used, 2); /* of those, none was taken since */
}

static void a_lost_commit_is_returned_and_never_taken_again(void)
{
    struct kvist_take take;
    uint8_t key[KVIST_KEY_BYTES];
    size_t count = 0;
    client_bring_up_patient();
    client_key(9, key);
    peer_send_grant(&fix.peer, 2, 5, 501);
    UNTIL(kvist_pool_wait(fix.pool, 0, NULL) == KVIST_OK);
    KVIST_TEST_STATUS(kvist_pool_take(fix.pool, 1, &take, &count), KVIST_OK);
    KVIST_TEST_STATUS(kvist_pool_mark(fix.pool, &take), KVIST_OK);
    peer_hang_up(&fix.peer, true);
    UNTIL(!kvist_client_connected(fix.client));
    KVIST_TEST_STATUS(kvist_pool_commit(fix.pool, &take, key, 1, NULL, 4096), KVIST_UNAVAILABLE);
    UNTIL(fix.peer.return_count == 1);
    KVIST_TEST_EQUAL(fix.peer.returns[0].reservation, 501);
    /* The daemon grants it again before it has seen the return: nothing more to say. */
    peer_send_grant(&fix.peer, 2, 5, 501);
    client_step_for(20000);
    KVIST_TEST_EQUAL(fix.peer.return_count, 1);
    /* The return was lost too: it is said again. */
    peer_hang_up(&fix.peer, true);
    UNTIL(fix.peer.opens == 3);
    peer_send_grant(&fix.peer, 2, 5, 501);
    UNTIL(fix.peer.return_count == 2);
    KVIST_TEST_STATUS(kvist_pool_take(fix.pool, 1, &take, &count), KVIST_OK);
    KVIST_TEST_EQUAL(count, 0);
}

/* Of another slot it would be held for a pool whose map may not have that slot. */
static void a_grant_is_not_changed_while_it_is_held(void)
{
    struct kvist_take take;
    size_t count = 0;
    client_bring_up_patient();
    peer_send_grant(&fix.peer, 2, 5, 501);
    UNTIL(kvist_pool_wait(fix.pool, 0, NULL) == KVIST_OK);
    client_step_for(5000);
    peer_send_grant(&fix.peer, 3, 5, 501);
    UNTIL(fix.peer.opens == 2); /* over a new connection */
    UNTIL(kvist_pool_wait(fix.pool, 0, NULL) == KVIST_OK);
    KVIST_TEST_STATUS(kvist_pool_take(fix.pool, 1, &take, &count), KVIST_OK);
    KVIST_TEST_EQUAL(count, 1);
    KVIST_TEST_EQUAL(take.slot, 2);
    peer_send_grant(&fix.peer, 3, 5, 501);
    UNTIL(fix.peer.opens == 3);
}

static void grants_from_before_a_clear_go_back(void)
{
    struct kvist_take take;
    size_t count = 0;
    client_bring_up();
    peer_send_grant(&fix.peer, 2, 5, 501);
    peer_send_grant(&fix.peer, 3, 6, 502);
    struct kvist_client_stats stats;
    UNTIL((kvist_client_stats(fix.client, &stats), stats.grants_held == 2));
    fix.peer.arena.map->generation = 4;
    peer_slots(&fix.peer)[3].pool_generation = 4; /* granted since */
    KVIST_TEST_STATUS(kvist_pool_take(fix.pool, 2, &take, &count), KVIST_OK);
    KVIST_TEST_EQUAL(count, 1);
    KVIST_TEST_EQUAL(take.slot, 3);
    UNTIL(fix.peer.return_count == 1);
    KVIST_TEST_EQUAL(fix.peer.returns[0].reservation, 501);
}

static void posts_wait_for_a_socket_that_is_full(void)
{
    uint8_t keys[512][KVIST_KEY_BYTES];
    client_bring_up();
    for (uint32_t number = 0; number < 512; number++) {
        client_key(number, keys[number]);
    }
    uint32_t posted = 0;
    uint32_t rounds = 0;
    enum kvist_status status = KVIST_OK;
    for (; rounds < 1000 && status == KVIST_OK; rounds++) {
        status = kvist_pool_prefetch(fix.pool, keys[0], 512);
        posted += status == KVIST_OK ? 512 : 0;
    }
    KVIST_TEST_STATUS(status, KVIST_BUSY); /* bounded, and it did not block */
    UNTIL(fix.peer.prefetch_count >= posted);
    KVIST_TEST_TRUE(kvist_client_connected(fix.client));
    KVIST_TEST_STATUS(kvist_pool_prefetch(fix.pool, keys[0], 1), KVIST_OK);
}

/* --- Segments ------------------------------------------------------------------------------ */

static void a_revoked_segment_waits_for_its_pins(void)
{
    client_bring_up();
    uint64_t instance = fix.peer.arena.instance;
    KVIST_TEST_STATUS(kvist_pool_pin(fix.pool, instance), KVIST_OK);
    volatile uint8_t *bytes = kvist_pool_slot_address(fix.pool, instance, 1);
    KVIST_TEST_FATAL(bytes != NULL);
    peer_send_revoke(&fix.peer, 0, 11);
    UNTIL(peer_mapped_record(&fix.peer, 0, 0) == 0);
    client_step_for(20000);
    KVIST_TEST_EQUAL(bytes[0], 0x5a);
    KVIST_TEST_EQUAL(fix.unmapping_calls, 0);
    KVIST_TEST_TRUE(kvist_pool_slot_address(fix.pool, instance, 1) == NULL);
    KVIST_TEST_TRUE(!client_hits(1));
    kvist_pool_unpin(fix.pool, instance);
    UNTIL(fix.peer.unmapped_count == 1);
    KVIST_TEST_EQUAL(fix.unmapping_calls, 1);
    KVIST_TEST_EQUAL(fix.peer.unmapped[0].serial_or_ticket, 11);
    peer_send_revoke(&fix.peer, 0, 11); /* said again: answered again */
    UNTIL(fix.peer.unmapped_count == 2);
    peer_send_segment(&fix.peer, 0, 12); /* another one in its place */
    UNTIL(fix.peer.mapped_count == 2);
    KVIST_TEST_EQUAL(peer_mapped_record(&fix.peer, 0, 0), 12);
}

static void a_segment_that_cannot_be_mapped_is_a_miss(void)
{
    struct kvist_error err = KVIST_ERROR_INIT;
    fix.pool = client_open_pool(fix.client);
    UNTIL(kvist_pool_instance(fix.pool) != 0);
    peer_send_segment(&fix.peer, 0, 11);
    kvist_fault_arm("memfd.map", 1, false);
    UNTIL((kvist_client_last_error(fix.client, &err), err.status == KVIST_NO_MEMORY));
    (void)kvist_fault_disarm();
    KVIST_TEST_TRUE(kvist_client_connected(fix.client));
    KVIST_TEST_EQUAL(peer_mapped_record(&fix.peer, 0, 0), 0);
    KVIST_TEST_EQUAL(fix.peer.mapped_count, 0);
}

/* --- Threads ------------------------------------------------------------------------------- */

struct caller {
    _Atomic bool stop;
    uint64_t found;
};

static void *call_all_the_time(void *ctx)
{
    struct caller *caller = ctx;
    uint8_t key[KVIST_KEY_BYTES];
    client_key(1, key);
    while (!caller->stop) {
        struct kvist_lease lease;
        struct kvist_take take;
        struct kvist_client_stats stats;
        enum kvist_probe stop;
        size_t count = 0;
        enum kvist_status status = kvist_pool_acquire(fix.pool, key, 1, &lease, &count, &stop);
        if (status == KVIST_OK && count == 1) {
            if (kvist_pool_pin(fix.pool, lease.instance) == KVIST_OK) {
                const uint8_t *bytes =
                    kvist_pool_slot_address(fix.pool, lease.instance, lease.slot);
                caller->found += bytes != NULL && bytes[0] == 0x5a;
                kvist_pool_unpin(fix.pool, lease.instance);
            }
            kvist_pool_release(fix.pool, &lease, 1);
        }
        if (kvist_pool_take(fix.pool, 1, &take, &count) == KVIST_OK && count == 1) {
            status = kvist_pool_mark(fix.pool, &take);
            status = kvist_pool_commit(fix.pool, &take, key, 1, NULL, 4096);
        }
        status = kvist_pool_prefetch(fix.pool, key, 1);
        kvist_client_stats(fix.client, &stats);
    }
    return NULL;
}

static void callers_and_the_pump_thread_share_a_client(void)
{
    struct caller callers[2] = {{.stop = false}, {.stop = false}};
    pthread_t threads[2];
    client_bring_up();
    KVIST_TEST_STATUS(kvist_client_thread_start(fix.client, NULL), KVIST_OK);
    KVIST_TEST_STATUS(kvist_client_thread_start(fix.client, NULL), KVIST_EXISTS);
    for (uint32_t index = 0; index < 2; index++) {
        KVIST_TEST_FATAL(
            pthread_create(&threads[index], NULL, call_all_the_time, &callers[index]) == 0);
    }
    for (uint32_t round = 0; round < 20; round++) {
        uint32_t opens = fix.peer.opens;
        if (round % 7 == 6) {
            peer_hang_up(&fix.peer, true);
            while (fix.peer.opens == opens) {
                peer_turn(&fix.peer);
            }
        }
        peer_send_segment(&fix.peer, 1, 12 + round);
        peer_send_grant(&fix.peer, 2, round % PEER_TICKETS, 500 + round);
        for (uint64_t end_us = kvist_clock_now_us() + 10000; kvist_clock_now_us() < end_us;) {
            peer_turn(&fix.peer);
        }
        if (fix.peer.socket_fd >= 0) {
            peer_send_revoke(&fix.peer, 1, 12 + round);
            uint32_t answers = fix.peer.unmapped_count;
            while (fix.peer.unmapped_count == answers && fix.peer.socket_fd >= 0) {
                peer_turn(&fix.peer);
            }
        }
    }
    for (uint32_t index = 0; index < 2; index++) {
        callers[index].stop = true;
        (void)pthread_join(threads[index], NULL);
        KVIST_TEST_TRUE(callers[index].found > 0);
    }
}

static void waiting_works_with_the_thread(void)
{
    struct kvist_error err = KVIST_ERROR_INIT;
    KVIST_TEST_STATUS(kvist_client_thread_start(fix.client, NULL), KVIST_OK);
    fix.pool = client_open_pool(fix.client);
    KVIST_TEST_STATUS(kvist_pool_wait(fix.pool, 20000, &err), KVIST_TIMED_OUT);
    for (uint64_t end_us = kvist_clock_now_us() + CLIENT_PATIENCE_US;
         fix.peer.opens == 0 && kvist_clock_now_us() < end_us;) {
        peer_turn(&fix.peer);
    }
    KVIST_TEST_STATUS(kvist_client_wait(fix.client, CLIENT_PATIENCE_US, &err), KVIST_OK);
    peer_send_segment(&fix.peer, 0, 11);
    peer_send_grant(&fix.peer, 2, 5, 501);
    KVIST_TEST_STATUS(kvist_pool_wait(fix.pool, CLIENT_PATIENCE_US, &err), KVIST_OK);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"a block is found and leased", a_block_is_found_and_leased},
        {"a run of many keys is leased", a_run_of_many_keys_is_leased},
        {"lease records run out", lease_records_run_out},
        {"a moved map is a miss until the next one",
         a_moved_map_is_a_miss_until_the_next_one_comes},
        {"nonsense in the map is a miss", nonsense_in_the_map_is_a_miss},
        {"every rank must have mapped the segment", every_rank_must_have_mapped_the_segment},
        {"a leased slot is never reused", a_leased_slot_is_never_reused},
        {"slots are taken, marked and committed", slots_are_taken_marked_and_committed},
        {"what is not wanted is returned", what_is_not_wanted_is_returned},
        {"what is recalled is returned", what_is_recalled_is_returned_unless_it_is_taken},
        {"a commit says what was used", a_commit_says_how_many_slots_were_used},
        {"a lost commit is returned, never taken", a_lost_commit_is_returned_and_never_taken_again},
        {"a grant is not changed while it is held", a_grant_is_not_changed_while_it_is_held},
        {"grants from before a clear go back", grants_from_before_a_clear_go_back},
        {"posts wait for a socket that is full", posts_wait_for_a_socket_that_is_full},
        {"a revoked segment waits for its pins", a_revoked_segment_waits_for_its_pins},
        {"a segment that cannot be mapped", a_segment_that_cannot_be_mapped_is_a_miss},
        {"callers and the pump thread share", callers_and_the_pump_thread_share_a_client},
        {"waiting works with the thread", waiting_works_with_the_thread},
    };
    return kvist_unit_main(
        "client_pool", cases, sizeof(cases) / sizeof(cases[0]), client_setup, client_teardown);
}
