/*
 * client_fixture - libkvist and a hand-stepped peer, connected.
 *
 * Role        what the tests of libkvist share: one client, one pool, one peer, and their stepping
 * Threads     one, unless a test says otherwise
 */
#ifndef KVIST_TESTS_CLIENT_FIXTURE_H
#define KVIST_TESTS_CLIENT_FIXTURE_H

#include "proto/base/clock.h"
#include "tests/support/unit.h"
#include "tests/unit/client_peer.h"

#include <kvist/client.h>

#define CLIENT_GRACE_US    300000U
#define CLIENT_PATIENCE_US 5000000U

struct client_fixture {
    struct peer peer;
    struct kvist_client *client;
    struct kvist_pool *pool;
    uint64_t grace_us; /* of clients that are made from now on */
    uint32_t mapped_calls;
    uint32_t unmapping_calls;
};

extern struct client_fixture fix;
extern const uint8_t client_session_id[16];

/* Step both sides until the condition holds. */
#define UNTIL(condition)                                                                           \
    do {                                                                                           \
        uint64_t deadline_us = kvist_clock_now_us() + CLIENT_PATIENCE_US;                          \
        bool until = (condition); /* once at a time: it may change something */                   \
        while (!until && kvist_clock_now_us() < deadline_us) {                                     \
            client_step();                                                                         \
            until = (condition);                                                                   \
        }                                                                                          \
        KVIST_TEST_FATAL(until);                                                                   \
    } while (0)

void client_setup(void);
void client_teardown(void);
void client_step(void);
void client_step_for(uint64_t duration_us);

void client_key(uint64_t number, uint8_t key_out[KVIST_KEY_BYTES]);
struct kvist_client *client_make(enum kvist_role role, uint32_t rank, uint32_t rank_count);
struct kvist_pool *client_open_pool(struct kvist_client *client);
/** Connected, pool open, segment 0 mapped under serial 11, key 1 in slot 1, generation 7. */
void client_bring_up(void);
/** The same, with a client whose mappings stay however long this machine takes. */
void client_bring_up_patient(void);
/** Acquire one key. @return leases made */
size_t client_acquire(uint64_t number, struct kvist_lease *lease, enum kvist_probe *stop);
/** Acquire and release one key. */
bool client_hits(uint64_t number);

#endif
