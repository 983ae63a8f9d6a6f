#include "tests/unit/client_peer.h"

#include "proto/shm/memfd.h"
#include "tests/support/unit.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* --- Arena --------------------------------------------------------------------------------- */

static void *make_memfd(const char *name, uint64_t bytes, int *fd_out)
{
    void *map = NULL;
    KVIST_TEST_FATAL(kvist_memfd_create(name, bytes, fd_out, NULL) == KVIST_OK);
    KVIST_TEST_FATAL(kvist_memfd_map(*fd_out, bytes, KVIST_MEMFD_WRITE, &map, NULL) == KVIST_OK);
    return map;
}

static struct kvist_map_header *make_map(const struct peer *peer, uint32_t index_capacity, int *fd)
{
    struct kvist_map_header header = {
        .magic = KVIST_MAP_MAGIC,
        .layout_version = KVIST_LAYOUT_VERSION,
        .header_bytes = KVIST_HEADER_BYTES,
        .slot_bytes = PEER_SLOT_BYTES,
        .slots_per_segment = PEER_SLOTS_PER_SEGMENT,
        .segment_max = PEER_SEGMENTS,
        .slot_max = PEER_SLOTS_PER_SEGMENT * PEER_SEGMENTS,
        .index_capacity = index_capacity,
        .index_seed = 77,
    };
    memcpy(header.pool_id, peer->pool_id, KVIST_KEY_BYTES);
    kvist_map_lay_out(&header);
    struct kvist_map_header *map = make_memfd("map", header.map_bytes, fd);
    memcpy(map, &header, sizeof(header));
    return map;
}

static void make_arena(struct peer *peer, uint64_t instance)
{
    struct peer_arena *arena = &peer->arena;
    struct kvist_page_header page = {
        .magic = KVIST_PAGE_MAGIC,
        .layout_version = KVIST_LAYOUT_VERSION,
        .header_bytes = KVIST_HEADER_BYTES,
        .lease_max = PEER_LEASES,
        .ticket_max = PEER_TICKETS,
        .rank_count = peer->rank_count,
        .pool_max = KVIST_SESSION_POOLS_MAX,
        .segment_max = KVIST_SEGMENTS_MAX,
        .touch_count = KVIST_TOUCH_RING_COUNT,
    };
    memcpy(page.session_id, peer->session_id, sizeof(page.session_id));
    kvist_page_lay_out(&page);
    arena->instance = instance;
    arena->page = make_memfd("page", page.page_bytes, &arena->page_fd);
    memcpy(arena->page, &page, sizeof(page));
    arena->map = make_map(peer, PEER_INDEX, &arena->map_fd);
    for (uint32_t index = 0; index < PEER_SEGMENTS; index++) {
        arena->segments[index] = make_memfd(
            "segment", PEER_SLOTS_PER_SEGMENT * PEER_SLOT_BYTES, &arena->segment_fds[index]);
    }
}

static void drop_memfd(void *map, uint64_t bytes, int fd)
{
    kvist_memfd_unmap(&map, bytes);
    (void)close(fd);
}

static void drop_arena(struct peer *peer)
{
    struct peer_arena *arena = &peer->arena;
    drop_memfd(arena->page, arena->page->page_bytes, arena->page_fd);
    drop_memfd(arena->map, arena->map->map_bytes, arena->map_fd);
    for (uint32_t index = 0; index < PEER_SEGMENTS; index++) {
        drop_memfd(arena->segments[index],
                   PEER_SLOTS_PER_SEGMENT * PEER_SLOT_BYTES,
                   arena->segment_fds[index]);
    }
}

void peer_renew(struct peer *peer)
{
    uint64_t instance = peer->arena.instance + 1;
    drop_arena(peer);
    make_arena(peer, instance);
}

/* --- Socket -------------------------------------------------------------------------------- */

void peer_listen(struct peer *peer)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, peer->path, strlen(peer->path) + 1);
    peer->listen_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    KVIST_TEST_FATAL(peer->listen_fd >= 0);
    KVIST_TEST_FATAL(bind(peer->listen_fd, (struct sockaddr *)&address, sizeof(address)) == 0);
    KVIST_TEST_FATAL(listen(peer->listen_fd, 4) == 0);
}

void peer_start(struct peer *peer, const uint8_t session_id[16], uint32_t rank_count)
{
    char directory[] = "/tmp/kvist-client-XXXXXX";
    memset(peer, 0, sizeof(*peer));
    KVIST_TEST_FATAL(mkdtemp(directory) != NULL);
    (void)snprintf(peer->path, sizeof(peer->path), "%s/sock", directory);
    memcpy(peer->session_id, session_id, sizeof(peer->session_id));
    memset(peer->pool_id, 0xab, sizeof(peer->pool_id));
    peer->rank_count = rank_count;
    peer->socket_fd = -1;
    make_arena(peer, 1000);
    peer_listen(peer);
}

void peer_hang_up(struct peer *peer, bool listens)
{
    kvist_frame_reader_destroy(&peer->reader);
    kvist_frame_writer_destroy(&peer->writer);
    if (peer->socket_fd >= 0) {
        (void)close(peer->socket_fd);
        peer->socket_fd = -1;
    }
    if (!listens && peer->listen_fd >= 0) {
        (void)close(peer->listen_fd);
        (void)unlink(peer->path);
        peer->listen_fd = -1;
    }
}

void peer_stop(struct peer *peer)
{
    peer_hang_up(peer, false);
    drop_arena(peer);
    *strrchr(peer->path, '/') = '\0';
    (void)rmdir(peer->path);
}

static void flush(struct peer *peer)
{
    enum kvist_status status = kvist_frame_writer_flush(peer->writer, peer->socket_fd, NULL);
    (void)status; /* the client may be gone: what the test expects shows elsewhere */
}

void peer_send(struct peer *peer, const Kvist__Wire__Envelope *envelope, int fd)
{
    struct kvist_error err = KVIST_ERROR_INIT;
    KVIST_TEST_FATAL(peer->socket_fd >= 0);
    enum kvist_status status =
        kvist_message_put(peer->writer, envelope, &fd, fd >= 0 ? 1 : 0, &err);
    if (status != KVIST_CLOSED) { /* else the client has hung up, and an earlier flush found out */
        KVIST_TEST_STATUS(status, KVIST_OK);
        flush(peer);
    }
}

void peer_send_raw(struct peer *peer, const void *bytes, size_t length)
{
    KVIST_TEST_FATAL(send(peer->socket_fd, bytes, length, MSG_NOSIGNAL) == (ssize_t)length);
}

/* --- Answers ------------------------------------------------------------------------------- */

static void send_failure(struct peer *peer, uint64_t id, enum kvist_status status)
{
    char text[] = "refused by the test";
    Kvist__Wire__Failure failure;
    kvist__wire__failure__init(&failure);
    failure.status = (uint32_t)status;
    failure.text = text;
    Kvist__Wire__Envelope envelope;
    kvist__wire__envelope__init(&envelope);
    envelope.id = id;
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_FAILURE;
    envelope.failure = &failure;
    peer_send(peer, &envelope, -1);
}

/* Not from the header, which a test may have spoilt. */
static uint64_t bytes_of(int fd)
{
    uint64_t bytes = 0;
    KVIST_TEST_FATAL(kvist_memfd_check(fd, &bytes, NULL) == KVIST_OK);
    return bytes;
}

static void answer_hello(struct peer *peer, const Kvist__Wire__Envelope *request)
{
    peer->hellos++;
    memset(peer->close_counts, 0, sizeof(peer->close_counts));
    if (peer->ignore_hello) {
        return;
    }
    if (peer->refuse_hello != KVIST_OK) {
        send_failure(peer, request->id, peer->refuse_hello);
        return;
    }
    char version[] = "test";
    bool is_tool = request->hello->role == KVIST__WIRE__ROLE__ROLE_TOOL;
    Kvist__Wire__HelloReply reply;
    kvist__wire__hello_reply__init(&reply);
    reply.wire_major = KVIST_WIRE_MAJOR;
    reply.wire_minor = KVIST_WIRE_MINOR;
    reply.instance = peer->arena.instance;
    reply.version = version;
    reply.page_bytes = is_tool ? 0 : bytes_of(peer->arena.page_fd);
    Kvist__Wire__Envelope envelope;
    kvist__wire__envelope__init(&envelope);
    envelope.id = request->id;
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_HELLO_REPLY;
    envelope.hello_reply = &reply;
    peer_send(peer, &envelope, is_tool ? -1 : peer->arena.page_fd);
}

static int read_only(int fd)
{
    int copy = -1;
    KVIST_TEST_FATAL(kvist_memfd_reopen_read_only(fd, &copy, NULL) == KVIST_OK);
    return copy;
}

static void answer_open(struct peer *peer, const Kvist__Wire__Envelope *request)
{
    peer->opens++;
    peer->open_id_last = request->id;
    if (peer->refuse_pool != KVIST_OK) {
        send_failure(peer, request->id, peer->refuse_pool);
        return;
    }
    int fd = read_only(peer->arena.map_fd);
    Kvist__Wire__PoolReply reply;
    kvist__wire__pool_reply__init(&reply);
    reply.pool = peer->ordinal;
    reply.pool_id.data = peer->pool_id;
    reply.pool_id.len = KVIST_KEY_BYTES;
    reply.map_bytes = bytes_of(fd);
    reply.slot_bytes = PEER_SLOT_BYTES;
    reply.slots_per_segment = PEER_SLOTS_PER_SEGMENT;
    Kvist__Wire__Envelope envelope;
    kvist__wire__envelope__init(&envelope);
    envelope.id = request->id;
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_POOL_REPLY;
    envelope.pool_reply = &reply;
    peer_send(peer, &envelope, fd);
    (void)close(fd);
}

static void record_commit(struct peer *peer, const Kvist__Wire__Commit *commit)
{
    for (size_t index = 0; index < commit->n_blocks && peer->commit_count < PEER_RECORDS; index++) {
        const Kvist__Wire__Commit__Block *block = commit->blocks[index];
        struct peer_record *record = &peer->commits[peer->commit_count++];
        record->segment_or_slot = block->slot;
        record->serial_or_ticket = block->ticket;
        record->reservation = block->reservation;
        record->parent_tag = block->parent_tag;
        memcpy(record->key, block->key.data, KVIST_KEY_BYTES);
    }
}

static void record_return(struct peer *peer, const Kvist__Wire__Return *message)
{
    for (size_t index = 0; index < message->n_slots && peer->return_count < PEER_RECORDS; index++) {
        struct peer_record *record = &peer->returns[peer->return_count++];
        record->segment_or_slot = message->slots[index]->slot;
        record->serial_or_ticket = message->slots[index]->ticket;
        record->reservation = message->slots[index]->reservation;
    }
}

static void handle(struct peer *peer, const Kvist__Wire__Envelope *envelope)
{
    struct peer_record *record = NULL;
    switch ((int)envelope->body_case) {
    case KVIST__WIRE__ENVELOPE__BODY_HELLO:
        answer_hello(peer, envelope);
        break;
    case KVIST__WIRE__ENVELOPE__BODY_OPEN_POOL:
        answer_open(peer, envelope);
        break;
    case KVIST__WIRE__ENVELOPE__BODY_MAPPED:
        record = &peer->mapped[peer->mapped_count++ % PEER_RECORDS];
        record->segment_or_slot = envelope->mapped->segment;
        record->serial_or_ticket = envelope->mapped->serial;
        break;
    case KVIST__WIRE__ENVELOPE__BODY_UNMAPPED:
        record = &peer->unmapped[peer->unmapped_count++ % PEER_RECORDS];
        record->segment_or_slot = envelope->unmapped->segment;
        record->serial_or_ticket = envelope->unmapped->serial;
        break;
    case KVIST__WIRE__ENVELOPE__BODY_COMMIT:
        record_commit(peer, envelope->commit);
        peer->used = envelope->commit->used;
        break;
    case KVIST__WIRE__ENVELOPE__BODY_RETURN_SLOTS:
        record_return(peer, envelope->return_slots);
        break;
    case KVIST__WIRE__ENVELOPE__BODY_PREFETCH:
        peer->prefetch_count += (uint32_t)envelope->prefetch->n_keys;
        break;
    case KVIST__WIRE__ENVELOPE__BODY_CLOSE_POOL:
        peer->close_counts[envelope->close_pool->pool]++;
        break;
    default:
        break;
    }
}

static void accept_one(struct peer *peer)
{
    int fd = accept4(peer->listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) {
        peer->socket_fd = fd;
        peer->accepts++;
        KVIST_TEST_FATAL(kvist_frame_reader_create(0, &peer->reader) == KVIST_OK);
        KVIST_TEST_FATAL(kvist_frame_writer_create(&peer->writer) == KVIST_OK);
    }
}

void peer_turn(struct peer *peer)
{
    if (peer->socket_fd < 0 && peer->listen_fd >= 0) {
        accept_one(peer);
    }
    bool more = peer->socket_fd >= 0;
    while (more) {
        struct kvist_frame frame;
        if (kvist_frame_reader_fill(peer->reader, peer->socket_fd, &more, NULL) != KVIST_OK) {
            peer_hang_up(peer, true); /* the client closed */
            return;
        }
        while (peer->socket_fd >= 0 &&
               kvist_frame_reader_next(peer->reader, &frame, NULL) == KVIST_OK) {
            Kvist__Wire__Envelope *envelope = NULL;
            struct kvist_error err = KVIST_ERROR_INIT;
            KVIST_TEST_STATUS(
                kvist_message_unpack(frame.bytes, frame.length, true, &envelope, &err), KVIST_OK);
            if (envelope != NULL) {
                handle(peer, envelope);
            }
            kvist_message_free(&envelope);
        }
        more = more && peer->socket_fd >= 0;
    }
}

/* --- Pool map ------------------------------------------------------------------------------ */

static void *at(void *base, uint64_t offset)
{
    return (char *)base + offset;
}

static struct kvist_index_entry *index_of(struct kvist_map_header *map)
{
    return at(map, map->index_offset);
}

void peer_set_segment(struct peer *peer, uint32_t segment, uint32_t serial, uint32_t state)
{
    struct kvist_map_header *map = peer->arena.map;
    struct kvist_segment_entry *table = at(map, map->segment_table_offset);
    struct kvist_segment_entry *entry = &table[segment];
    entry->bytes = PEER_SLOTS_PER_SEGMENT * PEER_SLOT_BYTES;
    entry->state = state;
    entry->serial = serial;
}

static uint32_t find_place(struct kvist_map_header *map, const uint64_t key[4])
{
    uint32_t position = kvist_index_home(key, map->index_seed, map->index_capacity);
    struct kvist_entry_copy there;
    while (kvist_entry_read(&index_of(map)[position], &there) && there.state != KVIST_ENTRY_EMPTY &&
           memcmp(there.key, key, KVIST_KEY_BYTES) != 0) {
        position = (position + 1) & (map->index_capacity - 1);
    }
    return position;
}

void peer_set_entry(struct peer *peer, const uint8_t *key, const struct kvist_entry_copy *copy)
{
    struct kvist_entry_copy entry = *copy;
    memcpy(entry.key, key, KVIST_KEY_BYTES);
    kvist_entry_write(&index_of(peer->arena.map)[find_place(peer->arena.map, entry.key)], &entry);
}

void peer_publish(struct peer *peer, const uint8_t *key, uint32_t slot, uint64_t generation)
{
    struct kvist_map_header *map = peer->arena.map;
    struct kvist_slot_entry *table = at(map, map->slot_table_offset);
    struct kvist_slot_entry *entry = &table[slot];
    entry->state = KVIST_SLOT_READY;
    entry->generation = generation;
    entry->block_bytes = PEER_SLOT_BYTES;
    struct kvist_entry_copy copy = {
        .state = KVIST_ENTRY_READY,
        .slot = slot,
        .generation = generation,
    };
    peer_set_entry(peer, key, &copy);
}

void peer_retire(struct peer *peer, const uint8_t *key)
{
    struct kvist_entry_copy copy = {.state = KVIST_ENTRY_TOMBSTONE};
    peer_set_entry(peer, key, &copy);
}

void peer_grow(struct peer *peer)
{
    struct kvist_map_header *old = peer->arena.map;
    int old_fd = peer->arena.map_fd;
    struct kvist_map_header *map = make_map(peer, PEER_INDEX * 2, &peer->arena.map_fd);
    memcpy((char *)map + map->segment_table_offset,
           (char *)old + old->segment_table_offset,
           old->index_offset - old->segment_table_offset);
    for (uint32_t position = 0; position < old->index_capacity; position++) {
        struct kvist_entry_copy copy;
        if (kvist_entry_read(&index_of(old)[position], &copy) && copy.state >= KVIST_ENTRY_READY) {
            kvist_entry_write(&index_of(map)[find_place(map, copy.key)], &copy);
        }
    }
    old->moved = 1;
    peer->arena.map = map;
    drop_memfd(old, old->map_bytes, old_fd);
}

/* --- Messages ------------------------------------------------------------------------------ */

void peer_send_segment(struct peer *peer, uint32_t segment, uint32_t serial)
{
    Kvist__Wire__Segment message;
    kvist__wire__segment__init(&message);
    message.pool = peer->ordinal;
    message.segment = segment;
    message.serial = serial;
    message.bytes = PEER_SLOTS_PER_SEGMENT * PEER_SLOT_BYTES;
    Kvist__Wire__Envelope envelope;
    kvist__wire__envelope__init(&envelope);
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_SEGMENT;
    envelope.segment = &message;
    peer_set_segment(peer, segment, serial, KVIST_SEGMENT_LIVE);
    peer_send(peer, &envelope, peer->arena.segment_fds[segment]);
}

void peer_send_map(struct peer *peer)
{
    Kvist__Wire__PoolMap message;
    kvist__wire__pool_map__init(&message);
    message.pool = peer->ordinal;
    message.map_bytes = peer->arena.map->map_bytes;
    Kvist__Wire__Envelope envelope;
    kvist__wire__envelope__init(&envelope);
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_POOL_MAP;
    envelope.pool_map = &message;
    int fd = read_only(peer->arena.map_fd);
    peer_send(peer, &envelope, fd);
    (void)close(fd);
}

void peer_send_grant(struct peer *peer, uint32_t slot, uint32_t ticket, uint64_t reservation)
{
    Kvist__Wire__Grant__Slot one;
    kvist__wire__grant__slot__init(&one);
    Kvist__Wire__Grant__Slot *list[1] = {&one};
    one.slot = slot;
    one.ticket = ticket;
    one.reservation = reservation;
    Kvist__Wire__Grant message;
    kvist__wire__grant__init(&message);
    message.pool = peer->ordinal;
    message.n_slots = 1;
    message.slots = list;
    Kvist__Wire__Envelope envelope;
    kvist__wire__envelope__init(&envelope);
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_GRANT;
    envelope.grant = &message;
    peer_send(peer, &envelope, -1);
}

void peer_send_recall(struct peer *peer, uint32_t count)
{
    Kvist__Wire__Recall message;
    kvist__wire__recall__init(&message);
    message.pool = peer->ordinal;
    message.count = count;
    Kvist__Wire__Envelope envelope;
    kvist__wire__envelope__init(&envelope);
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_RECALL;
    envelope.recall = &message;
    peer_send(peer, &envelope, -1);
}

void peer_send_revoke(struct peer *peer, uint32_t segment, uint32_t serial)
{
    Kvist__Wire__Revoke message;
    kvist__wire__revoke__init(&message);
    message.pool = peer->ordinal;
    message.segment = segment;
    message.serial = serial;
    Kvist__Wire__Envelope envelope;
    kvist__wire__envelope__init(&envelope);
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_REVOKE;
    envelope.revoke = &message;
    peer_send(peer, &envelope, -1);
}

/* --- Session page -------------------------------------------------------------------------- */

const struct kvist_lease_record *peer_find_lease(const struct peer *peer, uint32_t slot)
{
    struct kvist_page_header *page = peer->arena.page;
    const struct kvist_lease_record *records = at(page, page->lease_offset);
    for (uint32_t record = 0; record < page->lease_high; record++) {
        if (records[record].ref == kvist_slot_ref(peer->ordinal, slot)) {
            return &records[record];
        }
    }
    return NULL;
}

uint64_t peer_mark(const struct peer *peer, uint32_t rank, uint32_t ticket)
{
    struct kvist_page_header *page = peer->arena.page;
    const _Atomic uint64_t *marks = at(page, page->mark_offset);
    return marks[(uint64_t)rank * page->ticket_max + ticket];
}

static _Atomic uint32_t *mapped_record(const struct peer *peer, uint32_t rank, uint32_t segment)
{
    struct kvist_page_header *page = peer->arena.page;
    _Atomic uint32_t *records = at(page, page->mapped_offset);
    return &records[((uint64_t)rank * page->pool_max + peer->ordinal) * page->segment_max +
                    segment];
}

uint32_t peer_mapped_record(const struct peer *peer, uint32_t rank, uint32_t segment)
{
    return *mapped_record(peer, rank, segment);
}

void peer_set_mapped_record(struct peer *peer, uint32_t rank, uint32_t segment, uint32_t serial)
{
    *mapped_record(peer, rank, segment) = serial;
}

struct kvist_slot_entry *peer_slots(const struct peer *peer)
{
    return at(peer->arena.map, peer->arena.map->slot_table_offset);
}

struct kvist_index_entry *peer_index(const struct peer *peer)
{
    return index_of(peer->arena.map);
}

const _Atomic uint64_t *peer_touches(const struct peer *peer)
{
    return at(peer->arena.page, peer->arena.page->touch_offset);
}
