/* client_close: pools that are closed, and what the daemon hears of it. */
#include "tests/unit/client_fixture.h"

#include <stdlib.h>
#include <string.h>

static bool all_are_told(uint32_t but)
{
    for (uint32_t ordinal = 0; ordinal < KVIST_SESSION_POOLS_MAX; ordinal++) {
        if (fix.peer.close_counts[ordinal] != (ordinal != but)) {
            return false;
        }
    }
    return true;
}

static void forget_what_was_told(void)
{
    UNTIL(all_are_told(KVIST_SESSION_POOLS_MAX)); /* of the first hello */
    memset(fix.peer.close_counts, 0, sizeof(fix.peer.close_counts));
}

static void closing_is_told_when_all_is_unmapped(void)
{
    fix.peer.ordinal = 3;
    client_bring_up();
    forget_what_was_told();
    peer_send_segment(&fix.peer, 1, 12);
    UNTIL(fix.peer.mapped_count == 2);
    KVIST_TEST_EQUAL(peer_mapped_record(&fix.peer, 0, 1), 12);
    kvist_pool_close(&fix.pool);
    KVIST_TEST_EQUAL(fix.mapped_calls, 2);
    KVIST_TEST_EQUAL(fix.unmapping_calls, 2);
    KVIST_TEST_EQUAL(peer_mapped_record(&fix.peer, 0, 0), 0);
    KVIST_TEST_EQUAL(peer_mapped_record(&fix.peer, 0, 1), 0);
    UNTIL(fix.peer.close_counts[3] == 1);
    client_step_for(20000);
    KVIST_TEST_EQUAL(fix.peer.close_counts[3], 1);
    KVIST_TEST_EQUAL(fix.peer.close_counts[0], 0);
}

static void a_place_is_used_again(void)
{
    struct kvist_take take;
    size_t count = 0;
    client_bring_up();
    for (uint32_t round = 0; round < 20; round++) {
        peer_send_grant(&fix.peer, 2, 5, 501 + round);
        UNTIL(kvist_pool_wait(fix.pool, 0, NULL) == KVIST_OK);
        KVIST_TEST_STATUS(kvist_pool_take(fix.pool, 1, &take, &count), KVIST_OK);
        KVIST_TEST_EQUAL(count, 1);
        KVIST_TEST_EQUAL(take.reservation, 501 + round);
        uint32_t closes = fix.peer.close_counts[0];
        uint32_t unmaps = fix.peer.unmapped_count;
        uint32_t opens = fix.peer.opens;
        kvist_pool_close(&fix.pool);
        peer_send_segment(&fix.peer, 1, 12 + round); /* was on its way */
        peer_send_grant(&fix.peer, 3, 6, 601 + round);
        fix.pool = client_open_pool(fix.client);
        UNTIL(fix.peer.close_counts[0] == closes + 1 && fix.peer.opens == opens + 1);
        UNTIL(fix.peer.unmapped_count == unmaps + 1 && kvist_pool_instance(fix.pool) != 0);
        uint32_t mapped = fix.peer.mapped_count;
        peer_send_segment(&fix.peer, 0, 11);
        UNTIL(fix.peer.mapped_count == mapped + 1);
        KVIST_TEST_TRUE(client_hits(1));
    }
    KVIST_TEST_EQUAL(fix.peer.accepts, 1);
}

/* Processes of the session have kept the pool, so the daemon has kept its grants. */
static void what_was_taken_goes_back_when_it_is_granted_again(void)
{
    struct kvist_take take;
    size_t count = 0;
    client_bring_up();
    peer_send_grant(&fix.peer, 2, 5, 501);
    UNTIL(kvist_pool_wait(fix.pool, 0, NULL) == KVIST_OK);
    KVIST_TEST_STATUS(kvist_pool_take(fix.pool, 1, &take, &count), KVIST_OK);
    kvist_pool_close(&fix.pool);
    fix.pool = client_open_pool(fix.client);
    UNTIL(kvist_pool_instance(fix.pool) != 0);
    KVIST_TEST_EQUAL(fix.peer.return_count, 0);
    peer_send_grant(&fix.peer, 2, 5, 501);
    UNTIL(fix.peer.return_count == 1);
    KVIST_TEST_EQUAL(fix.peer.returns[0].reservation, 501);
    KVIST_TEST_STATUS(kvist_pool_take(fix.pool, 1, &take, &count), KVIST_OK);
    KVIST_TEST_EQUAL(count, 0);
}

static void what_closed_while_the_daemon_was_away_is_told(void)
{
    fix.peer.ordinal = 2;
    client_bring_up_patient();
    forget_what_was_told();
    peer_hang_up(&fix.peer, true);
    UNTIL(fix.peer.hellos == 2 && fix.peer.opens == 2 && all_are_told(2)); /* still open */
    client_step_for(20000);
    KVIST_TEST_TRUE(all_are_told(2));
    peer_hang_up(&fix.peer, false);
    UNTIL(!kvist_client_connected(fix.client));
    kvist_pool_close(&fix.pool);
    peer_listen(&fix.peer);
    UNTIL(fix.peer.hellos == 3 && all_are_told(KVIST_SESSION_POOLS_MAX));
    KVIST_TEST_EQUAL(fix.peer.opens, 2);
}

static void what_closed_before_it_was_open_is_told(void)
{
    UNTIL(kvist_client_connected(fix.client));
    forget_what_was_told();
    fix.pool = client_open_pool(fix.client);
    kvist_pool_close(&fix.pool);
    UNTIL(fix.peer.opens == 1 && fix.peer.close_counts[0] == 1);
    KVIST_TEST_EQUAL(fix.peer.accepts, 1);
}

/* The daemon gives both the same ordinal: a late close would take it from the second one. */
static void a_pool_that_is_opened_again_stays_open(void)
{
    UNTIL(kvist_client_connected(fix.client));
    forget_what_was_told();
    struct kvist_pool *first = client_open_pool(fix.client);
    kvist_pool_close(&first);
    fix.pool = client_open_pool(fix.client);
    UNTIL(fix.peer.opens == 2 && kvist_pool_instance(fix.pool) != 0);
    first = fix.pool;
    fix.pool = client_open_pool(fix.client);
    kvist_pool_close(&first);
    UNTIL(fix.peer.opens == 3 && kvist_pool_instance(fix.pool) != 0);
    client_step_for(20000);
    KVIST_TEST_EQUAL(fix.peer.close_counts[0], 0);
    kvist_pool_close(&fix.pool);
    UNTIL(fix.peer.close_counts[0] == 1);
}

static void a_close_waits_for_a_socket_that_is_full(void)
{
    uint8_t keys[512][KVIST_KEY_BYTES];
    client_bring_up();
    forget_what_was_told();
    memset(keys, 7, sizeof(keys));
    enum kvist_status status = KVIST_OK;
    while (status == KVIST_OK) {
        status = kvist_pool_prefetch(fix.pool, keys[0], 512);
    }
    KVIST_TEST_STATUS(status, KVIST_BUSY);
    while (kvist_pool_prefetch(fix.pool, keys[0], 1) == KVIST_OK) {
    }
    kvist_pool_close(&fix.pool);
    UNTIL(fix.peer.close_counts[0] == 1);
    KVIST_TEST_EQUAL(fix.peer.accepts, 1);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"closing is told when all is unmapped", closing_is_told_when_all_is_unmapped},
        {"a place is used again", a_place_is_used_again},
        {"what was taken goes back", what_was_taken_goes_back_when_it_is_granted_again},
        {"what closed while the daemon was away is told",
         what_closed_while_the_daemon_was_away_is_told},
        {"what closed before it was open is told", what_closed_before_it_was_open_is_told},
        {"a pool that is opened again stays open", a_pool_that_is_opened_again_stays_open},
        {"a close waits for a socket that is full", a_close_waits_for_a_socket_that_is_full},
    };
    return kvist_unit_main(
        "client_close", cases, sizeof(cases) / sizeof(cases[0]), client_setup, client_teardown);
}
