/* libkvist against a hand-stepped peer: connecting, every way to lose the daemon, garbage. */
#include "proto/base/fault.h"
#include "tests/unit/client_fixture.h"

#include <unistd.h>

/* --- Options and connecting ---------------------------------------------------------------- */

static void wrong_options_are_refused(void)
{
    struct kvist_client_options options = KVIST_CLIENT_OPTIONS_INIT;
    struct kvist_client *client = NULL;
    struct kvist_error err = KVIST_ERROR_INIT;
    options.role = KVIST_ROLE_ENGINE;
    KVIST_TEST_STATUS(kvist_client_create(&options, &client, &err), KVIST_INVALID);
    options.session_id[0] = 1;
    options.rank_count = 2;
    KVIST_TEST_STATUS(kvist_client_create(&options, &client, &err), KVIST_INVALID);
    options.rank_count = KVIST_RANKS_MAX + 1;
    options.role = KVIST_ROLE_WORKER;
    KVIST_TEST_STATUS(kvist_client_create(&options, &client, &err), KVIST_INVALID);
    options.rank_count = 1;
    char path[200];
    memset(path, 'x', sizeof(path));
    path[sizeof(path) - 1] = '\0';
    options.socket_path = path;
    KVIST_TEST_STATUS(kvist_client_create(&options, &client, &err), KVIST_INVALID);
    KVIST_TEST_TRUE(client == NULL);

    struct kvist_pool_options pool_options = KVIST_POOL_OPTIONS_INIT;
    struct kvist_pool *pool = NULL;
    KVIST_TEST_STATUS(kvist_pool_open(fix.client, &pool_options, &pool, &err), KVIST_INVALID);
    pool_options.slot_bytes = 4096;
    KVIST_TEST_STATUS(kvist_pool_open(fix.client, &pool_options, &pool, &err), KVIST_INVALID);
    KVIST_TEST_TRUE(pool == NULL);
}

static void creating_survives_every_failure(void)
{
    kvist_client_destroy(&fix.client);
    for (uint64_t nth = 1;; nth++) {
        struct kvist_client_options options = KVIST_CLIENT_OPTIONS_INIT;
        struct kvist_client *client = NULL;
        options.socket_path = fix.peer.path;
        options.role = KVIST_ROLE_ENGINE;
        options.session_id[0] = 1;
        kvist_fault_arm(NULL, nth, false);
        enum kvist_status status = kvist_client_create(&options, &client, NULL);
        uint64_t passes = kvist_fault_disarm();
        KVIST_TEST_TRUE((status == KVIST_OK) == (client != NULL));
        kvist_client_destroy(&client);
        if (passes < nth) {
            break;
        }
        KVIST_TEST_TRUE(status != KVIST_OK);
    }
}

static void it_connects_when_the_daemon_comes_later(void)
{
    struct kvist_error err = KVIST_ERROR_INIT;
    peer_hang_up(&fix.peer, false);
    KVIST_TEST_STATUS(kvist_client_wait(fix.client, 50000, &err), KVIST_TIMED_OUT);
    KVIST_TEST_TRUE(strstr(err.text, fix.peer.path) != NULL);
    fix.pool = client_open_pool(fix.client);
    KVIST_TEST_TRUE(!client_hits(1));
    peer_listen(&fix.peer);
    UNTIL(kvist_client_connected(fix.client) && fix.peer.opens == 1);
    KVIST_TEST_STATUS(kvist_client_wait(fix.client, 0, &err), KVIST_OK);
    uint8_t id[KVIST_KEY_BYTES];
    UNTIL(kvist_pool_instance(fix.pool) == fix.peer.arena.instance);
    kvist_pool_id(fix.pool, id);
    KVIST_TEST_TRUE(memcmp(id, fix.peer.pool_id, sizeof(id)) == 0);
    KVIST_TEST_EQUAL(kvist_pool_slot_bytes(fix.pool), PEER_SLOT_BYTES);
}

static void a_refusal_is_told(void)
{
    struct kvist_error err = KVIST_ERROR_INIT;
    fix.peer.refuse_hello = KVIST_DENIED;
    UNTIL(fix.peer.hellos == 1);
    client_step_for(20000);
    KVIST_TEST_STATUS(kvist_client_wait(fix.client, 1000000, &err), KVIST_DENIED);
    KVIST_TEST_TRUE(strstr(err.text, "refused by the test") != NULL);
    kvist_client_last_error(fix.client, &err);
    KVIST_TEST_STATUS(err.status, KVIST_DENIED);
    fix.peer.refuse_hello = KVIST_OK;
    UNTIL(kvist_client_connected(fix.client));
}

static void a_refused_pool_is_told_and_asked_again(void)
{
    struct kvist_error err = KVIST_ERROR_INIT;
    fix.peer.refuse_pool = KVIST_INVALID;
    fix.pool = client_open_pool(fix.client);
    UNTIL(fix.peer.opens == 1);
    client_step_for(20000);
    KVIST_TEST_STATUS(kvist_pool_wait(fix.pool, 1000000, &err), KVIST_INVALID);
    kvist_pool_close(&fix.pool);
    fix.peer.refuse_pool = KVIST_NO_SPACE; /* may pass */
    fix.pool = client_open_pool(fix.client);
    UNTIL(fix.peer.opens == 2);
    fix.peer.refuse_pool = KVIST_OK;
    UNTIL(fix.peer.opens == 3 && kvist_pool_instance(fix.pool) != 0);
}

static void the_back_off_is_bounded_and_grows(void)
{
    fix.peer.refuse_pool = KVIST_OK;
    peer_hang_up(&fix.peer, true);
    /* Drop every connection as it comes: 10, 20, 40 … ms, so a handful in 300 ms. */
    for (uint64_t end_us = kvist_clock_now_us() + 300000; kvist_clock_now_us() < end_us;) {
        client_step();
        peer_hang_up(&fix.peer, true);
    }
    KVIST_TEST_TRUE(fix.peer.accepts >= 3 && fix.peer.accepts <= 12);
}

/* --- Losing the daemon --------------------------------------------------------------------- */

static void hits_go_on_while_the_daemon_is_away_then_end(void)
{
    struct kvist_take take;
    size_t count = 0;
    client_bring_up();
    peer_send_grant(&fix.peer, 2, 5, 501);
    UNTIL(kvist_pool_wait(fix.pool, 0, NULL) == KVIST_OK);
    peer_hang_up(&fix.peer, false);
    UNTIL(!kvist_client_connected(fix.client));
    uint64_t lost_us = kvist_clock_now_us();
    KVIST_TEST_TRUE(client_hits(1));
    KVIST_TEST_STATUS(kvist_pool_take(fix.pool, 1, &take, &count), KVIST_OK);
    KVIST_TEST_EQUAL(count, 0);
    UNTIL(!client_hits(1));
    uint64_t lasted_us = kvist_clock_now_us() - lost_us;
    KVIST_TEST_TRUE(lasted_us >= CLIENT_GRACE_US - 50000 && lasted_us < CLIENT_GRACE_US + 500000);
    UNTIL(fix.unmapping_calls == 1);
    struct kvist_client_stats stats;
    kvist_client_stats(fix.client, &stats);
    KVIST_TEST_EQUAL(stats.mapped_bytes, 0);
    KVIST_TEST_EQUAL(kvist_pool_instance(fix.pool), 0);
    /* The same arena comes back: everything is mapped anew. */
    peer_listen(&fix.peer);
    UNTIL(kvist_pool_instance(fix.pool) != 0);
    peer_send_segment(&fix.peer, 0, 11);
    UNTIL(client_hits(1));
}

static void a_lease_keeps_its_mapping_beyond_the_grace(void)
{
    struct kvist_lease lease;
    enum kvist_probe stop;
    client_bring_up();
    KVIST_TEST_EQUAL(client_acquire(1, &lease, &stop), 1);
    peer_hang_up(&fix.peer, false);
    client_step_for(CLIENT_GRACE_US + 100000);
    KVIST_TEST_EQUAL(fix.unmapping_calls, 0);
    KVIST_TEST_TRUE(!client_hits(1));
    KVIST_TEST_STATUS(kvist_pool_pin(fix.pool, lease.instance), KVIST_OK);
    const uint8_t *bytes = kvist_pool_slot_address(fix.pool, lease.instance, 1);
    KVIST_TEST_FATAL(bytes != NULL);
    kvist_pool_release(fix.pool, &lease, 1);
    client_step_for(150000);
    KVIST_TEST_EQUAL(fix.unmapping_calls, 0);
    KVIST_TEST_EQUAL(bytes[0], 0x5a);
    kvist_pool_unpin(fix.pool, lease.instance);
    UNTIL(fix.unmapping_calls == 1);
    KVIST_TEST_STATUS(kvist_pool_pin(fix.pool, lease.instance), KVIST_STALE);
}

static void the_same_arena_is_continued(void)
{
    struct kvist_lease lease;
    enum kvist_probe stop;
    struct kvist_take take;
    size_t count = 0;
    client_bring_up_patient();
    peer_send_grant(&fix.peer, 2, 5, 501);
    UNTIL(kvist_pool_wait(fix.pool, 0, NULL) == KVIST_OK);
    KVIST_TEST_EQUAL(client_acquire(1, &lease, &stop), 1);
    void *before = kvist_pool_slot_address(fix.pool, lease.instance, 1);
    peer_hang_up(&fix.peer, true);
    UNTIL(fix.peer.opens == 2);
    peer_send_segment(&fix.peer, 0, 11); /* lent again */
    peer_send_grant(&fix.peer, 2, 5, 501);
    UNTIL(fix.peer.mapped_count == 2);
    client_step_for(20000);
    KVIST_TEST_EQUAL(fix.mapped_calls, 1);
    KVIST_TEST_TRUE(kvist_pool_slot_address(fix.pool, lease.instance, 1) == before);
    KVIST_TEST_TRUE(peer_find_lease(&fix.peer, 1) != NULL);
    kvist_pool_release(fix.pool, &lease, 1);
    KVIST_TEST_TRUE(peer_find_lease(&fix.peer, 1) == NULL);
    KVIST_TEST_STATUS(kvist_pool_take(fix.pool, 1, &take, &count), KVIST_OK);
    KVIST_TEST_EQUAL(count, 1); /* once, although it was said twice */
    KVIST_TEST_STATUS(kvist_pool_take(fix.pool, 1, &take, &count), KVIST_OK);
    KVIST_TEST_EQUAL(count, 0);
    struct kvist_client_stats stats;
    kvist_client_stats(fix.client, &stats);
    KVIST_TEST_EQUAL(stats.connects, 2);
}

static void another_arena_voids_takes_and_keeps_leases(void)
{
    struct kvist_lease lease;
    enum kvist_probe stop;
    struct kvist_take take;
    uint8_t key[KVIST_KEY_BYTES];
    size_t count = 0;
    client_bring_up();
    client_key(3, key);
    peer_send_grant(&fix.peer, 2, 5, 501);
    UNTIL(kvist_pool_wait(fix.pool, 0, NULL) == KVIST_OK);
    KVIST_TEST_STATUS(kvist_pool_take(fix.pool, 1, &take, &count), KVIST_OK);
    KVIST_TEST_EQUAL(client_acquire(1, &lease, &stop), 1);
    uint64_t old = fix.peer.arena.instance;
    peer_hang_up(&fix.peer, true);
    peer_renew(&fix.peer);
    UNTIL(kvist_pool_instance(fix.pool) == fix.peer.arena.instance);
    KVIST_TEST_TRUE(fix.peer.arena.instance != old);
    KVIST_TEST_TRUE(!client_hits(1));
    KVIST_TEST_STATUS(kvist_pool_pin(fix.pool, old), KVIST_OK); /* leased, so still mapped */
    const uint8_t *bytes = kvist_pool_slot_address(fix.pool, old, 1);
    KVIST_TEST_FATAL(bytes != NULL);
    KVIST_TEST_EQUAL(bytes[0], 0x5a);
    kvist_pool_unpin(fix.pool, old);
    KVIST_TEST_STATUS(kvist_pool_commit(fix.pool, &take, key, 1, NULL, 4096), KVIST_STALE);
    kvist_pool_release(fix.pool, &lease, 1);
    UNTIL(fix.unmapping_calls == 1);
    KVIST_TEST_STATUS(kvist_pool_mark(fix.pool, &take), KVIST_STALE);
    peer_send_segment(&fix.peer, 0, 31);
    client_key(1, key);
    peer_publish(&fix.peer, key, 1, 2);
    UNTIL(client_hits(1));
    KVIST_TEST_EQUAL(fix.peer.commit_count, 0);
    KVIST_TEST_EQUAL(fix.peer.return_count, 0);
}

static void a_replaced_page_waits_for_our_leases(void)
{
    struct kvist_lease lease;
    enum kvist_probe stop;
    client_bring_up();
    KVIST_TEST_EQUAL(client_acquire(1, &lease, &stop), 1);
    uint64_t instance = fix.peer.arena.instance;
    peer_hang_up(&fix.peer, true);
    peer_renew(&fix.peer);
    fix.peer.arena.instance = instance; /* the arena of before, but our session is forgotten */
    UNTIL(fix.peer.hellos >= 2);
    client_step_for(50000);
    KVIST_TEST_TRUE(!kvist_client_connected(fix.client));
    KVIST_TEST_TRUE(!client_hits(1));
    kvist_pool_release(fix.pool, &lease, 1);
    UNTIL(kvist_client_connected(fix.client));
    KVIST_TEST_EQUAL(fix.unmapping_calls, 1);
}

static void a_daemon_that_does_not_answer_costs_only_the_grace(void)
{
    client_bring_up();
    fix.peer.ignore_hello = true;
    peer_hang_up(&fix.peer, true);
    UNTIL(fix.peer.hellos == 2);
    KVIST_TEST_TRUE(client_hits(1));
    UNTIL(!client_hits(1));
    UNTIL(fix.unmapping_calls == 1);
}

/* --- Garbage ------------------------------------------------------------------------------- */

static void expect_reconnect(void)
{
    uint32_t accepts = fix.peer.accepts;
    UNTIL(fix.peer.accepts == accepts + 1);
    UNTIL(kvist_client_connected(fix.client));
    UNTIL(kvist_pool_instance(fix.pool) != 0);
}

static void garbage_closes_the_connection(void)
{
    static const uint8_t huge[8] = {0xff, 0xff, 0xff, 0xff};
    static const uint8_t noise[12] = {8, 0, 0, 0, 0xff, 0x12, 0x13, 0xff, 0xff, 0xff, 0xff, 0xff};
    client_bring_up_patient();
    peer_send_raw(&fix.peer, huge, sizeof(huge));
    expect_reconnect();
    peer_send_raw(&fix.peer, noise, sizeof(noise));
    expect_reconnect();
    peer_send_grant(&fix.peer, 999, 0, 1);
    expect_reconnect();
    peer_send_grant(&fix.peer, 1, PEER_TICKETS, 1);
    expect_reconnect();
    struct kvist_error err;
    kvist_client_last_error(fix.client, &err);
    KVIST_TEST_STATUS(err.status, KVIST_PROTOCOL);
    KVIST_TEST_TRUE(client_hits(1)); /* the mappings are as they were */
}

static void wrong_descriptors_close_the_connection(void)
{
    client_bring_up_patient();
    Kvist__Wire__Segment message;
    kvist__wire__segment__init(&message);
    message.segment = 1;
    message.serial = 12;
    message.bytes = PEER_SLOTS_PER_SEGMENT * PEER_SLOT_BYTES;
    Kvist__Wire__Envelope envelope;
    kvist__wire__envelope__init(&envelope);
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_SEGMENT;
    envelope.segment = &message;
    int pipe_fds[2];
    KVIST_TEST_FATAL(pipe(pipe_fds) == 0);
    peer_send(&fix.peer, &envelope, pipe_fds[0]); /* no memfd */
    expect_reconnect();
    peer_send(&fix.peer, &envelope, fix.peer.arena.map_fd); /* of another size */
    expect_reconnect();
    message.segment = PEER_SEGMENTS; /* beyond the map */
    peer_send(&fix.peer, &envelope, fix.peer.arena.segment_fds[1]);
    expect_reconnect();
    message.segment = 0; /* mapped under another serial */
    peer_send(&fix.peer, &envelope, fix.peer.arena.segment_fds[1]);
    expect_reconnect();
    (void)close(pipe_fds[0]);
    (void)close(pipe_fds[1]);
    KVIST_TEST_TRUE(client_hits(1));
}

static void broken_maps_and_pages_are_refused(void)
{
    struct kvist_error err;
    fix.peer.arena.page->lease_offset += 8;
    fix.pool = client_open_pool(fix.client);
    UNTIL((kvist_client_last_error(fix.client, &err), err.status == KVIST_CORRUPT));
    fix.peer.arena.page->lease_offset -= 8;
    fix.peer.arena.page->session_id[0] ^= 1;
    uint32_t hellos = fix.peer.hellos;
    UNTIL(fix.peer.hellos > hellos + 1);
    KVIST_TEST_TRUE(!kvist_client_connected(fix.client));
    fix.peer.arena.page->session_id[0] ^= 1;
    fix.peer.arena.map->index_capacity = 63;
    UNTIL(fix.peer.opens >= 2);
    KVIST_TEST_EQUAL(kvist_pool_instance(fix.pool), 0);
    fix.peer.arena.map->index_capacity = PEER_INDEX;
    fix.peer.arena.map->pool_id[0] ^= 1;
    uint32_t opens = fix.peer.opens;
    UNTIL(fix.peer.opens > opens + 1);
    KVIST_TEST_EQUAL(kvist_pool_instance(fix.pool), 0);
    fix.peer.arena.map->pool_id[0] ^= 1;
    UNTIL(kvist_pool_instance(fix.pool) != 0);
}

static void descriptors_do_not_leak(void)
{
    client_bring_up();
    client_step_for(10000);
    int before = dup(0);
    for (uint32_t round = 0; round < 5; round++) {
        peer_send_map(&fix.peer);
        peer_send_segment(&fix.peer, 0, 11);
        peer_send_grant(&fix.peer, 999, 0, 1);
        expect_reconnect();
    }
    int after = dup(0);
    KVIST_TEST_EQUAL(after, before + 1); /* the lowest free ones */
    (void)close(before);
    (void)close(after);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"wrong options are refused", wrong_options_are_refused},
        {"creating survives every failure", creating_survives_every_failure},
        {"it connects when the daemon comes later", it_connects_when_the_daemon_comes_later},
        {"a refusal is told", a_refusal_is_told},
        {"a refused pool is told and asked again", a_refused_pool_is_told_and_asked_again},
        {"the back-off is bounded and grows", the_back_off_is_bounded_and_grows},
        {"hits go on while the daemon is away", hits_go_on_while_the_daemon_is_away_then_end},
        {"a lease outlives the grace", a_lease_keeps_its_mapping_beyond_the_grace},
        {"the same arena is continued", the_same_arena_is_continued},
        {"another arena voids takes, keeps leases", another_arena_voids_takes_and_keeps_leases},
        {"a replaced page waits for our leases", a_replaced_page_waits_for_our_leases},
        {"a silent daemon costs only the grace",
         a_daemon_that_does_not_answer_costs_only_the_grace},
        {"garbage closes the connection", garbage_closes_the_connection},
        {"wrong descriptors close the connection", wrong_descriptors_close_the_connection},
        {"broken maps and pages are refused", broken_maps_and_pages_are_refused},
        {"descriptors do not leak", descriptors_do_not_leak},
    };
    return kvist_unit_main(
        "client_link", cases, sizeof(cases) / sizeof(cases[0]), client_setup, client_teardown);
}
