#include "tests/unit/client_fixture.h"

#include <poll.h>

struct client_fixture fix;
const uint8_t client_session_id[16] = {1, 2, 3};

void client_step(void)
{
    peer_turn(&fix.peer);
    kvist_client_pump(fix.client);
    peer_turn(&fix.peer);
    struct pollfd ready = {.fd = kvist_client_fd(fix.client), .events = POLLIN};
    (void)poll(&ready, 1, 1);
}

void client_step_for(uint64_t duration_us)
{
    for (uint64_t end_us = kvist_clock_now_us() + duration_us; kvist_clock_now_us() < end_us;) {
        client_step();
    }
}

static void on_mapped(void *ctx, struct kvist_pool *pool, void *base, uint64_t bytes)
{
    (void)ctx;
    KVIST_TEST_TRUE(pool == fix.pool && base != NULL);
    KVIST_TEST_EQUAL(bytes, PEER_SLOTS_PER_SEGMENT * PEER_SLOT_BYTES);
    fix.mapped_calls++;
}

static void on_unmapping(void *ctx, struct kvist_pool *pool, void *base, uint64_t bytes)
{
    (void)ctx;
    KVIST_TEST_TRUE(pool == fix.pool);
    volatile uint8_t *byte = base; /* still mapped */
    (void)byte[bytes - 1];
    fix.unmapping_calls++;
}

void client_key(uint64_t number, uint8_t key_out[KVIST_KEY_BYTES])
{
    memset(key_out, 0, KVIST_KEY_BYTES);
    memcpy(key_out, &number, sizeof(number));
    key_out[31] = 1;
}

struct kvist_client *client_make(enum kvist_role role, uint32_t rank, uint32_t rank_count)
{
    struct kvist_client_options options = KVIST_CLIENT_OPTIONS_INIT;
    struct kvist_client *client = NULL;
    options.socket_path = fix.peer.path;
    options.role = role;
    memcpy(options.session_id, client_session_id, sizeof(client_session_id));
    options.rank = rank;
    options.rank_count = rank_count;
    options.name = "test";
    options.detach_grace_us = fix.grace_us;
    options.segment_mapped = on_mapped;
    options.segment_unmapping = on_unmapping;
    KVIST_TEST_FATAL(kvist_client_create(&options, &client, NULL) == KVIST_OK);
    return client;
}

struct kvist_pool *client_open_pool(struct kvist_client *client)
{
    const struct kvist_pool_field fields[] = {{"model", "tiny", 4}, {"dtype", "bf16", 4}};
    struct kvist_pool_options options = KVIST_POOL_OPTIONS_INIT;
    struct kvist_pool *pool = NULL;
    options.fields = fields;
    options.field_count = 2;
    options.slot_bytes = PEER_SLOT_BYTES - 1; /* rounded up */
    KVIST_TEST_FATAL(kvist_pool_open(client, &options, &pool, NULL) == KVIST_OK);
    return pool;
}

void client_setup(void)
{
    memset(&fix, 0, sizeof(fix));
    fix.grace_us = CLIENT_GRACE_US;
    peer_start(&fix.peer, client_session_id, 1);
    fix.client = client_make(KVIST_ROLE_ENGINE, 0, 1);
}

void client_teardown(void)
{
    kvist_client_destroy(&fix.client);
    peer_stop(&fix.peer);
    KVIST_TEST_EQUAL(fix.mapped_calls, fix.unmapping_calls);
}

void client_bring_up(void)
{
    uint8_t key[KVIST_KEY_BYTES];
    fix.pool = client_open_pool(fix.client);
    UNTIL(fix.peer.opens == 1);
    uint32_t mapped_before = fix.peer.mapped_count;
    peer_send_segment(&fix.peer, 0, 11);
    UNTIL(fix.peer.mapped_count == mapped_before + 1);
    client_key(1, key);
    memset(fix.peer.arena.segments[0] + PEER_SLOT_BYTES, 0x5a, PEER_SLOT_BYTES);
    peer_publish(&fix.peer, key, 1, 7);
}

void client_bring_up_patient(void)
{
    kvist_client_destroy(&fix.client);
    fix.grace_us = CLIENT_PATIENCE_US;
    fix.client = client_make(KVIST_ROLE_ENGINE, 0, 1);
    client_bring_up();
}

size_t client_acquire(uint64_t number, struct kvist_lease *lease, enum kvist_probe *stop)
{
    uint8_t key[KVIST_KEY_BYTES];
    size_t count = 99;
    client_key(number, key);
    KVIST_TEST_STATUS(kvist_pool_acquire(fix.pool, key, 1, lease, &count, stop), KVIST_OK);
    return count;
}

bool client_hits(uint64_t number)
{
    struct kvist_lease lease;
    enum kvist_probe stop;
    size_t count = client_acquire(number, &lease, &stop);
    kvist_pool_release(fix.pool, &lease, count);
    return count == 1;
}
