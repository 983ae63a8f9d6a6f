/*
 * Fuzz target: what the client library takes from a daemon, in messages and in shared memory.
 *
 * Input: how it begins; then operations: messages with fds that fit or do not, writes into the
 * pool map and the session page, and calls of the library. Nothing crashes it; what it sends stays
 * within the protocol (the peer checks); and an address that it gives out can be read.
 */
#include "client/core.h"
#include "proto/shm/memfd.h"
#include "tests/fuzz/fuzz.h"
#include "tests/unit/client_peer.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#define POOLS         3U
#define MAPS          2U
#define TAKES_MAX     32U
#define LEASES_MAX    16U
#define STEPS_MAX     200U
#define WIDE_SEGMENTS 64U
#define WIDE_INDEX    256U

struct map_copy {
    int fd;
    struct kvist_map_header *map;
    struct kvist_map_header header; /* as it was made */
};

static struct {
    struct peer peer;
    struct map_copy maps[MAPS]; /* the peer's own, and one with more segments */
    struct kvist_page_header page_header;
    struct kvist_client *client;
    struct kvist_pool *pools[POOLS];
    struct kvist_take takes[TAKES_MAX];
    uint32_t take_pools[TAKES_MAX];
    size_t take_count;
    struct kvist_lease leases[LEASES_MAX];
    uint32_t lease_pools[LEASES_MAX];
    size_t lease_count;
    uint32_t mapped_calls;
    uint32_t unmapping_calls;
} rig;

static const uint8_t session_id[16] = {7};
static int null_fd = -1;
static int unsealed_fd = -1;
static int tiny_fd = -1;

/* --- Sending --------------------------------------------------------------------------------- */

static int pick_fd(struct kvist_fuzz_input *input)
{
    const int fds[] = {rig.maps[0].fd,
                       rig.maps[1].fd,
                       rig.peer.arena.page_fd,
                       rig.peer.arena.segment_fds[0],
                       rig.peer.arena.segment_fds[1],
                       rig.peer.arena.segment_fds[2],
                       null_fd,
                       unsealed_fd,
                       tiny_fd};
    return fds[kvist_fuzz_u8(input) % (sizeof(fds) / sizeof(fds[0]))];
}

static uint64_t fd_bytes(int fd)
{
    off_t bytes = lseek(fd, 0, SEEK_END);
    return bytes > 0 ? (uint64_t)bytes : KVIST_HEADER_BYTES;
}

static void send_message(Kvist__Wire__Envelope__BodyCase body, uint64_t id, void *message, int fd)
{
    Kvist__Wire__Envelope envelope;
    kvist__wire__envelope__init(&envelope);
    envelope.id = id;
    envelope.body_case = body;
    envelope.failure = message; /* all bodies lie at one place */
    if (rig.peer.socket_fd < 0 ||
        kvist_message_put(rig.peer.writer, &envelope, &fd, fd >= 0 ? 1 : 0, NULL) != KVIST_OK) {
        return; /* more than a message can say: the target rpc_message is for that */
    }
    enum kvist_status status = kvist_frame_writer_flush(rig.peer.writer, rig.peer.socket_fd, NULL);
    (void)status; /* the client may have hung up */
}

static void send_hello_reply(struct kvist_fuzz_input *input)
{
    char version[] = "fuzz";
    int fd = pick_fd(input);
    Kvist__Wire__HelloReply reply;
    kvist__wire__hello_reply__init(&reply);
    reply.wire_major = kvist_fuzz_u8(input) < 250 ? KVIST_WIRE_MAJOR : 99;
    reply.instance = 1000 + kvist_fuzz_u8(input) % 4;
    reply.version = version;
    reply.page_bytes = kvist_fuzz_u8(input) < 250 ? fd_bytes(fd) : 0;
    send_message(KVIST__WIRE__ENVELOPE__BODY_HELLO_REPLY,
                 rig.client->hello_id + kvist_fuzz_u8(input) / 250,
                 &reply,
                 reply.page_bytes != 0 ? fd : -1);
}

static uint64_t pick_request(struct kvist_fuzz_input *input)
{
    const struct kvist_pool *pool = rig.pools[kvist_fuzz_u8(input) % POOLS];
    uint64_t shift = kvist_fuzz_u8(input) / 250;
    return (pool != NULL ? pool->request_id : rig.client->request_id_last) + shift;
}

static void send_pool_reply(struct kvist_fuzz_input *input)
{
    int fd = pick_fd(input);
    Kvist__Wire__PoolReply reply;
    kvist__wire__pool_reply__init(&reply);
    reply.pool = kvist_fuzz_u8(input) % (KVIST_SESSION_POOLS_MAX + 1);
    reply.pool_id.data = rig.peer.pool_id;
    reply.pool_id.len = KVIST_KEY_BYTES;
    reply.map_bytes = fd_bytes(fd) + (uint64_t)(kvist_fuzz_u8(input) / 250) * 4096;
    reply.slot_bytes = PEER_SLOT_BYTES;
    reply.slots_per_segment = PEER_SLOTS_PER_SEGMENT + kvist_fuzz_u8(input) / 250;
    send_message(KVIST__WIRE__ENVELOPE__BODY_POOL_REPLY, pick_request(input), &reply, fd);
}

static void send_segment(struct kvist_fuzz_input *input)
{
    int fd = pick_fd(input);
    Kvist__Wire__Segment segment;
    kvist__wire__segment__init(&segment);
    segment.pool = kvist_fuzz_u8(input) % 4;
    segment.segment = (uint32_t)kvist_fuzz_number(input);
    segment.serial = kvist_fuzz_u8(input) % 8;
    segment.bytes = fd_bytes(fd) + (uint64_t)(kvist_fuzz_u8(input) / 250) * 4096;
    send_message(KVIST__WIRE__ENVELOPE__BODY_SEGMENT, 0, &segment, fd);
}

static void send_pool_map(struct kvist_fuzz_input *input)
{
    int fd = pick_fd(input);
    Kvist__Wire__PoolMap map;
    kvist__wire__pool_map__init(&map);
    map.pool = kvist_fuzz_u8(input) % 4;
    map.map_bytes = fd_bytes(fd) + (uint64_t)(kvist_fuzz_u8(input) / 250) * 4096;
    send_message(KVIST__WIRE__ENVELOPE__BODY_POOL_MAP, 0, &map, fd);
}

static void send_grant(struct kvist_fuzz_input *input)
{
    Kvist__Wire__Grant__Slot slots[4];
    Kvist__Wire__Grant__Slot *list[4];
    Kvist__Wire__Grant grant;
    kvist__wire__grant__init(&grant);
    grant.pool = kvist_fuzz_u8(input) % 4;
    grant.n_slots = kvist_fuzz_u8(input) % 5;
    grant.slots = list;
    for (size_t index = 0; index < grant.n_slots; index++) {
        kvist__wire__grant__slot__init(&slots[index]);
        slots[index].slot = (uint32_t)kvist_fuzz_number(input);
        slots[index].ticket = kvist_fuzz_u8(input) % (PEER_TICKETS + 1);
        slots[index].reservation = 1 + kvist_fuzz_u8(input) % 16;
        list[index] = &slots[index];
    }
    send_message(KVIST__WIRE__ENVELOPE__BODY_GRANT, 0, &grant, -1);
}

static void send_revoke(struct kvist_fuzz_input *input)
{
    Kvist__Wire__Revoke revoke;
    kvist__wire__revoke__init(&revoke);
    revoke.pool = kvist_fuzz_u8(input) % 4;
    revoke.segment = (uint32_t)kvist_fuzz_number(input);
    revoke.serial = kvist_fuzz_u8(input) % 8;
    send_message(KVIST__WIRE__ENVELOPE__BODY_REVOKE, 0, &revoke, -1);
}

static void send_promoted(struct kvist_fuzz_input *input)
{
    Kvist__Wire__Promoted promoted;
    kvist__wire__promoted__init(&promoted);
    promoted.pool = kvist_fuzz_u8(input) % 4;
    promoted.blocks = kvist_fuzz_u8(input);
    send_message(KVIST__WIRE__ENVELOPE__BODY_PROMOTED, 0, &promoted, -1);
}

static void send_failure(struct kvist_fuzz_input *input)
{
    char text[] = "a failure %s %n";
    Kvist__Wire__Failure failure;
    kvist__wire__failure__init(&failure);
    failure.status = kvist_fuzz_u8(input) % 32;
    failure.text = text;
    send_message(KVIST__WIRE__ENVELOPE__BODY_FAILURE,
                 kvist_fuzz_u8(input) < 128 ? pick_request(input) : 0,
                 &failure,
                 -1);
}

static void send_raw(struct kvist_fuzz_input *input)
{
    size_t length = kvist_fuzz_u8(input);
    length = length < input->left ? length : input->left;
    if (rig.peer.socket_fd >= 0 && length > 0) {
        ssize_t sent = send(rig.peer.socket_fd, input->at, length, MSG_NOSIGNAL | MSG_DONTWAIT);
        (void)sent;
    }
    input->at += length;
    input->left -= length;
}

/* --- Shared memory --------------------------------------------------------------------------- */

static void write_word(struct kvist_fuzz_input *input, void *memory, uint64_t bytes)
{
    uint64_t at = kvist_fuzz_u16(input) * 4ULL % (bytes - 8);
    uint64_t value = kvist_fuzz_number(input);
    memcpy((char *)memory + at, &value, (kvist_fuzz_u8(input) & 1U) != 0 ? 8 : 4);
}

static void spoil_map(struct kvist_fuzz_input *input)
{
    struct map_copy *copy = &rig.maps[kvist_fuzz_u8(input) % MAPS];
    write_word(input, copy->map, copy->header.map_bytes);
}

static void spoil_page(struct kvist_fuzz_input *input)
{
    write_word(input, rig.peer.arena.page, rig.page_header.page_bytes);
}

/* Write a header of shared memory as it was made. */
static void mend(void)
{
    for (unsigned index = 0; index < MAPS; index++) {
        memcpy(rig.maps[index].map, &rig.maps[index].header, KVIST_HEADER_BYTES);
    }
    memcpy(rig.peer.arena.page, &rig.page_header, KVIST_HEADER_BYTES);
}

static void make_key(uint8_t number, uint8_t key_out[KVIST_KEY_BYTES])
{
    memset(key_out, 0, KVIST_KEY_BYTES);
    key_out[0] = number % 8;
}

/* What a daemon does: a live segment, a block in it. */
static void publish(struct kvist_fuzz_input *input)
{
    const struct map_copy *copy = &rig.maps[kvist_fuzz_u8(input) % MAPS];
    uint32_t slot = (uint32_t)kvist_fuzz_number(input);
    uint32_t segment = slot / PEER_SLOTS_PER_SEGMENT % PEER_SEGMENTS;
    char *base = (char *)copy->map;
    struct kvist_segment_entry *segments = (void *)(base + copy->header.segment_table_offset);
    struct kvist_slot_entry *slots = (void *)(base + copy->header.slot_table_offset);
    struct kvist_index_entry *index = (void *)(base + copy->header.index_offset);
    struct kvist_entry_copy entry = {.state = KVIST_ENTRY_READY, .slot = slot, .generation = 7};
    uint8_t key[KVIST_KEY_BYTES];
    make_key(kvist_fuzz_u8(input), key);
    memcpy(entry.key, key, sizeof(key));
    segments[segment].state = KVIST_SEGMENT_LIVE;
    segments[segment].serial = kvist_fuzz_u8(input) % 8;
    slots[slot % copy->header.slot_max].block_bytes = PEER_SLOT_BYTES;
    kvist_entry_write(
        &index[kvist_index_home(entry.key, copy->header.index_seed, copy->header.index_capacity)],
        &entry);
}

/* --- Calls ----------------------------------------------------------------------------------- */

static void acquire(struct kvist_fuzz_input *input)
{
    uint8_t keys[4][KVIST_KEY_BYTES];
    uint8_t probes[4];
    uint32_t index = kvist_fuzz_u8(input) % POOLS;
    struct kvist_pool *pool = rig.pools[index];
    size_t count = 0;
    enum kvist_probe stop = KVIST_PROBE_MISS;
    for (unsigned key = 0; key < 4; key++) {
        make_key(kvist_fuzz_u8(input), keys[key]);
    }
    if (pool == NULL) {
        return;
    }
    KVIST_FUZZ_REQUIRE(kvist_pool_probe(pool, keys[0], 4, probes) == KVIST_OK);
    kvist_pool_touch(pool, keys[0], 4);
    size_t room = LEASES_MAX - rig.lease_count;
    struct kvist_lease *leases = &rig.leases[rig.lease_count];
    enum kvist_status status =
        kvist_pool_acquire(pool, keys[0], room < 4 ? room : 4, leases, &count, &stop);
    KVIST_FUZZ_REQUIRE(status == KVIST_OK || status == KVIST_BUSY);
    for (size_t lease = 0; lease < count; lease++) {
        KVIST_FUZZ_REQUIRE(leases[lease].block_bytes >= 1 &&
                           leases[lease].block_bytes <= kvist_pool_slot_bytes(pool));
        rig.lease_pools[rig.lease_count++] = index;
    }
}

static void release(struct kvist_fuzz_input *input)
{
    if (rig.lease_count == 0) {
        return;
    }
    size_t at = kvist_fuzz_u8(input) % rig.lease_count;
    struct kvist_pool *pool = rig.pools[rig.lease_pools[at]];
    if (pool != NULL) {
        kvist_pool_release(pool, &rig.leases[at], 1);
    }
    rig.lease_count--;
    rig.leases[at] = rig.leases[rig.lease_count];
    rig.lease_pools[at] = rig.lease_pools[rig.lease_count];
}

static void take(struct kvist_fuzz_input *input)
{
    uint32_t index = kvist_fuzz_u8(input) % POOLS;
    size_t count = 0;
    if (rig.pools[index] == NULL) {
        return;
    }
    KVIST_FUZZ_REQUIRE(kvist_pool_take(rig.pools[index],
                                       TAKES_MAX - rig.take_count,
                                       &rig.takes[rig.take_count],
                                       &count) == KVIST_OK);
    for (; count > 0; count--) {
        rig.take_pools[rig.take_count++] = index;
    }
}

static void end_take(struct kvist_fuzz_input *input)
{
    uint8_t key[KVIST_KEY_BYTES];
    if (rig.take_count == 0) {
        return;
    }
    size_t at = kvist_fuzz_u8(input) % rig.take_count;
    uint8_t how = kvist_fuzz_u8(input);
    struct kvist_pool *pool = rig.pools[rig.take_pools[at]];
    const struct kvist_take *mine = &rig.takes[at];
    enum kvist_status status = KVIST_OK;
    make_key(how, key);
    if (pool != NULL && how < 64) {
        status = kvist_pool_mark(pool, mine);
        return;
    }
    if (pool != NULL && how < 160) {
        status = kvist_pool_commit(pool, mine, key, 1, NULL, 4096);
    } else if (pool != NULL) {
        kvist_pool_untake(pool, mine, 1);
    }
    (void)status; /* the daemon may be away */
    rig.take_count--;
    rig.takes[at] = rig.takes[rig.take_count];
    rig.take_pools[at] = rig.take_pools[rig.take_count];
}

static void read_slot(struct kvist_fuzz_input *input)
{
    struct kvist_pool *pool = rig.pools[kvist_fuzz_u8(input) % POOLS];
    uint32_t slot = (uint32_t)kvist_fuzz_number(input);
    uint8_t key[KVIST_KEY_BYTES];
    make_key(kvist_fuzz_u8(input), key);
    if (pool == NULL) {
        return;
    }
    uint64_t instance = kvist_pool_instance(pool);
    if (kvist_pool_pin(pool, instance) != KVIST_OK) {
        return;
    }
    const volatile uint8_t *bytes = kvist_pool_slot_address(pool, instance, slot);
    if (bytes != NULL) {
        uint64_t slot_bytes = kvist_pool_slot_bytes(pool);
        (void)(bytes[0] + bytes[slot_bytes - 1]);
        enum kvist_status status =
            kvist_pool_verify(pool, key, instance, slot, (const void *)(uintptr_t)bytes, 4096);
        KVIST_FUZZ_REQUIRE(status == KVIST_OK || status == KVIST_CORRUPT ||
                           status == KVIST_NOT_FOUND);
    }
    kvist_pool_unpin(pool, instance);
}

static void prefetch(struct kvist_fuzz_input *input)
{
    struct kvist_pool *pool = rig.pools[kvist_fuzz_u8(input) % POOLS];
    uint8_t key[KVIST_KEY_BYTES];
    make_key(kvist_fuzz_u8(input), key);
    if (pool != NULL) {
        enum kvist_status status = kvist_pool_prefetch(pool, key, 1);
        (void)status;
    }
}

static void toggle_pool(struct kvist_fuzz_input *input)
{
    uint8_t index = kvist_fuzz_u8(input) % POOLS;
    const char value[] = {'p', (char)index};
    const struct kvist_pool_field fields[] = {{"model", value, sizeof(value)}};
    struct kvist_pool_options options = KVIST_POOL_OPTIONS_INIT;
    if (rig.pools[index] != NULL) {
        kvist_pool_close(&rig.pools[index]);
        return;
    }
    options.fields = fields;
    options.field_count = 1;
    options.slot_bytes = PEER_SLOT_BYTES;
    enum kvist_status status = kvist_pool_open(rig.client, &options, &rig.pools[index], NULL);
    KVIST_FUZZ_REQUIRE(status == KVIST_OK || status == KVIST_BUSY);
}

static void pump(struct kvist_fuzz_input *input)
{
    (void)input;
    rig.client->retry_at_us = 0; /* no waiting */
    kvist_client_pump(rig.client);
    peer_turn(&rig.peer);
    kvist_client_pump(rig.client);
}

static void hang_up(struct kvist_fuzz_input *input)
{
    peer_hang_up(&rig.peer, true);
    pump(input);
}

/* Which of its two maps, and under which ordinal, the peer answers with by itself. */
static void choose(struct kvist_fuzz_input *input)
{
    const struct map_copy *copy = &rig.maps[kvist_fuzz_u8(input) % MAPS];
    rig.peer.arena.map_fd = copy->fd;
    rig.peer.arena.map = copy->map;
    rig.peer.ordinal = kvist_fuzz_u8(input) % 4;
    uint8_t how = kvist_fuzz_u8(input);
    rig.peer.ignore_hello = (how & 1U) != 0;
    rig.peer.refuse_pool = (how & 2U) != 0 ? KVIST_BUSY : KVIST_OK;
}

/* --- What holds inside ----------------------------------------------------------------------- */

static void
check_view(const struct kvist_epoch *epoch, const struct kvist_view *view, uint32_t pool)
{
    uint32_t mapped = 0;
    KVIST_FUZZ_REQUIRE(view->held_count <= epoch->page_header.ticket_max);
    for (uint32_t index = 0; index < view->held_count; index++) {
        const struct kvist_ticket *ticket = &epoch->tickets[view->held[index]];
        KVIST_FUZZ_REQUIRE(ticket->state == KVIST_TICKET_HELD && ticket->pool == pool);
        KVIST_FUZZ_REQUIRE(ticket->slot < view->map.header.slot_max);
    }
    for (uint32_t index = 0; index < KVIST_SEGMENTS_MAX; index++) {
        mapped += view->segments[index].base != NULL;
    }
    KVIST_FUZZ_REQUIRE(mapped == view->mapped_count);
    KVIST_FUZZ_REQUIRE(view->ordinal < KVIST_SESSION_POOLS_MAX);
}

static void check_client(void)
{
    for (const struct kvist_epoch *epoch = rig.client->current; epoch != NULL; epoch = NULL) {
        KVIST_FUZZ_REQUIRE(epoch->free_count <= epoch->lease_next &&
                           epoch->lease_next <= epoch->page_header.lease_max);
        for (uint32_t index = 0; index < KVIST_SESSION_POOLS_MAX; index++) {
            if (epoch->views[index] != NULL) {
                KVIST_FUZZ_REQUIRE(rig.client->pools[index] != NULL);
                check_view(epoch, epoch->views[index], index);
            }
        }
    }
}

/* --- The whole ------------------------------------------------------------------------------- */

static void on_mapped(void *ctx, struct kvist_pool *pool, void *base, uint64_t bytes)
{
    (void)ctx;
    KVIST_FUZZ_REQUIRE(pool != NULL && base != NULL && bytes > 0);
    rig.mapped_calls++;
}

static void on_unmapping(void *ctx, struct kvist_pool *pool, void *base, uint64_t bytes)
{
    (void)ctx;
    const volatile uint8_t *byte = base; /* still mapped */
    KVIST_FUZZ_REQUIRE(pool != NULL);
    (void)byte[bytes - 1];
    rig.unmapping_calls++;
}

static void make_wide_map(void)
{
    struct kvist_map_header header = rig.maps[0].header;
    void *map = NULL;
    header.segment_max = WIDE_SEGMENTS;
    header.slot_max = WIDE_SEGMENTS * header.slots_per_segment;
    header.index_capacity = WIDE_INDEX;
    kvist_map_lay_out(&header);
    KVIST_FUZZ_REQUIRE(kvist_memfd_create("wide", header.map_bytes, &rig.maps[1].fd, NULL) ==
                       KVIST_OK);
    KVIST_FUZZ_REQUIRE(
        kvist_memfd_map(rig.maps[1].fd, header.map_bytes, KVIST_MEMFD_WRITE, &map, NULL) ==
        KVIST_OK);
    memcpy(map, &header, sizeof(header));
    rig.maps[1].map = map;
    rig.maps[1].header = header;
}

static void begin(void)
{
    struct kvist_client_options options = KVIST_CLIENT_OPTIONS_INIT;
    memset(&rig, 0, sizeof(rig));
    peer_start(&rig.peer, session_id, 1);
    rig.maps[0] = (struct map_copy){rig.peer.arena.map_fd, rig.peer.arena.map, *rig.peer.arena.map};
    memcpy(&rig.page_header, rig.peer.arena.page, sizeof(rig.page_header));
    make_wide_map();
    options.socket_path = rig.peer.path;
    options.role = KVIST_ROLE_ENGINE;
    memcpy(options.session_id, session_id, sizeof(session_id));
    options.rank_count = 1;
    options.segment_mapped = on_mapped;
    options.segment_unmapping = on_unmapping;
    KVIST_FUZZ_REQUIRE(kvist_client_create(&options, &rig.client, NULL) == KVIST_OK);
}

static void end(void)
{
    kvist_client_destroy(&rig.client);
    KVIST_FUZZ_REQUIRE(rig.mapped_calls == rig.unmapping_calls);
    mend();
    rig.peer.arena.map_fd = rig.maps[0].fd;
    rig.peer.arena.map = rig.maps[0].map;
    void *wide = rig.maps[1].map;
    kvist_memfd_unmap(&wide, rig.maps[1].header.map_bytes);
    (void)close(rig.maps[1].fd);
    peer_stop(&rig.peer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const operations[])(struct kvist_fuzz_input *) = {send_hello_reply,
                                                                    send_pool_reply,
                                                                    send_segment,
                                                                    send_pool_map,
                                                                    send_grant,
                                                                    send_revoke,
                                                                    send_promoted,
                                                                    send_failure,
                                                                    send_raw,
                                                                    spoil_map,
                                                                    spoil_page,
                                                                    publish,
                                                                    publish,
                                                                    acquire,
                                                                    acquire,
                                                                    release,
                                                                    take,
                                                                    end_take,
                                                                    read_slot,
                                                                    prefetch,
                                                                    toggle_pool,
                                                                    hang_up,
                                                                    choose,
                                                                    pump,
                                                                    pump,
                                                                    pump,
                                                                    pump};
    struct kvist_fuzz_input input = {data, size};
    if (null_fd < 0) {
        null_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
        unsealed_fd = memfd_create("unsealed", MFD_CLOEXEC);
        KVIST_FUZZ_REQUIRE(null_fd >= 0 && unsealed_fd >= 0 && ftruncate(unsealed_fd, 65536) == 0);
        KVIST_FUZZ_REQUIRE(kvist_memfd_create("tiny", 4096, &tiny_fd, NULL) == KVIST_OK);
    }
    int first_free = dup(null_fd);
    (void)close(first_free);
    begin();
    for (unsigned step = 0; step < STEPS_MAX && input.left > 0; step++) {
        operations[kvist_fuzz_u8(&input) % (sizeof(operations) / sizeof(operations[0]))](&input);
        check_client();
    }
    end();
    int free_now = dup(null_fd);
    KVIST_FUZZ_REQUIRE(free_now == first_free); /* no fd is left open */
    (void)close(free_now);
    return 0;
}

void kvist_fuzz_seeds(kvist_fuzz_emit_fn *emit, void *ctx)
{
    enum {
        HELLO,
        POOL,
        SEGMENT,
        MAP,
        GRANT,
        REVOKE,
        PROMOTED,
        FAILURE,
        RAW,
        SPOIL_MAP,
        SPOIL_PAGE,
        PUBLISH,
        PUBLISH_2,
        ACQUIRE,
        ACQUIRE_2,
        RELEASE,
        TAKE,
        END_TAKE,
        READ,
        PREFETCH,
        TOGGLE,
        HANG_UP,
        CHOOSE,
        PUMP
    };
    /* Up, with a pool, a segment, a block; read it, fill another, be revoked, lose the daemon. */
    static const uint8_t life[] = {
        PUMP,     PUMP,     TOGGLE, 0,        PUMP,    PUMP, SEGMENT,  3,    0,       0,
        5,        0,        PUMP,   PUBLISH,  0,       1,    1,        5,    ACQUIRE, 0,
        1,        1,        2,      3,        READ,    0,    1,        1,    GRANT,   0,
        2,        2,        0,      1,        3,       1,    2,        PUMP, TAKE,    0,
        END_TAKE, 0,        0,      END_TAKE, 0,       100,  END_TAKE, 0,    200,     RELEASE,
        0,        PREFETCH, 0,      1,        REVOKE,  0,    0,        5,    PUMP,    PUMP,
        HANG_UP,  PUMP,     PUMP,   PUMP,     FAILURE, 5,    0,        0,    PUMP};
    static const uint8_t two[] = {
        PUMP,  PUMP, TOGGLE, 0, PUMP, PUMP, CHOOSE, 1, 1,      0,   TOGGLE, 1,      PUMP, PUMP,
        GRANT, 0,    1,      3, 1,    1,    GRANT,  1, 1,      200, 2,      2,      PUMP, TAKE,
        1,     MAP,  1,      0, 0,    PUMP, TAKE,   0, TOGGLE, 0,   PUMP,   TOGGLE, 1,    PUMP};
    /* The daemon's part by hand. */
    static const uint8_t hand[] = {
        CHOOSE, 0, 0, 3, PUMP, HELLO, 2, 0, 0, 0, 0, PUMP, TOGGLE, 0,        PUMP, POOL, 0,   2,
        0,      0, 0, 0, PUMP, RAW,   5, 1, 0, 0, 0, 0,    PUMP,   PROMOTED, 0,    1,    PUMP};
    emit(ctx, life, sizeof(life));
    emit(ctx, two, sizeof(two));
    emit(ctx, hand, sizeof(hand));
}
