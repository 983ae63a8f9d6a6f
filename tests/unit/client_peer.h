/*
 * client_peer - a daemon's side of the wire that a test steps by hand.
 *
 * Role        speaks real frames over a real Unix socket and lends real memfds: one pool of a few
 *             slots. Answers Hello and OpenPool, records what else arrives, sends what it is told.
 *             Decides nothing by itself, so that a test can also make it lie.
 * Threads     one
 */
#ifndef KVIST_TESTS_CLIENT_PEER_H
#define KVIST_TESTS_CLIENT_PEER_H

#include "proto/shm/layout.h"
#include "proto/wire/message.h"

enum {
    PEER_SLOTS_PER_SEGMENT = 4,
    PEER_SEGMENTS = 4,
    PEER_INDEX = 64,
    PEER_SLOT_BYTES = 65536,
    PEER_LEASES = 8,
    PEER_TICKETS = 16,
    PEER_RECORDS = 64,
};

struct peer_arena {
    uint64_t instance;
    int page_fd;
    struct kvist_page_header *page;
    int map_fd;
    struct kvist_map_header *map;
    int segment_fds[PEER_SEGMENTS];
    uint8_t *segments[PEER_SEGMENTS];
};

struct peer_record {
    uint32_t segment_or_slot;
    uint32_t serial_or_ticket;
    uint64_t reservation;
    uint64_t parent_tag;
    uint8_t key[KVIST_KEY_BYTES];
};

struct peer {
    char path[108];
    int listen_fd;
    int socket_fd;
    struct kvist_frame_reader *reader;
    struct kvist_frame_writer *writer;
    uint8_t session_id[16];
    uint32_t rank_count;
    struct peer_arena arena;
    uint8_t pool_id[KVIST_KEY_BYTES];
    enum kvist_status refuse_hello; /* OK: accept */
    enum kvist_status refuse_pool;
    bool ignore_hello;
    uint32_t accepts;
    uint32_t hellos;
    uint32_t opens;
    uint64_t open_id_last;
    uint32_t ordinal; /* that the pool is given when it is opened */
    struct peer_record mapped[PEER_RECORDS];
    uint32_t mapped_count;
    struct peer_record unmapped[PEER_RECORDS];
    uint32_t unmapped_count;
    struct peer_record commits[PEER_RECORDS];
    uint32_t commit_count;
    uint32_t used; /* of the last Commit */
    struct peer_record returns[PEER_RECORDS];
    uint32_t return_count;
    uint32_t prefetch_count;
    uint32_t close_counts[KVIST_SESSION_POOLS_MAX]; /* of each ordinal, since the last hello */
};

/** Make a temporary directory, an arena and a listening socket. */
void peer_start(struct peer *peer, const uint8_t session_id[16], uint32_t rank_count);
/** Close everything and remove the socket. */
void peer_stop(struct peer *peer);
/** Lose the connection, and the socket file too when `listens` is false: the daemon is dead. */
void peer_hang_up(struct peer *peer, bool listens);
/** Listen again after peer_hang_up(…, false). */
void peer_listen(struct peer *peer);
/** Throw the arena away and make another, with another instance. */
void peer_renew(struct peer *peer);
/** Accept, read, answer. */
void peer_turn(struct peer *peer);

/* The pool map. */
void peer_set_segment(struct peer *peer, uint32_t segment, uint32_t serial, uint32_t state);
void peer_publish(struct peer *peer, const uint8_t *key, uint32_t slot, uint64_t generation);
void peer_set_entry(struct peer *peer, const uint8_t *key, const struct kvist_entry_copy *copy);
void peer_retire(struct peer *peer, const uint8_t *key);
/** Make a bigger map with the same entries and mark the old one moved. */
void peer_grow(struct peer *peer);

/* Messages. */
void peer_send(struct peer *peer, const Kvist__Wire__Envelope *envelope, int fd);
void peer_send_raw(struct peer *peer, const void *bytes, size_t length);
void peer_send_segment(struct peer *peer, uint32_t segment, uint32_t serial);
void peer_send_map(struct peer *peer);
void peer_send_grant(struct peer *peer, uint32_t slot, uint32_t ticket, uint64_t reservation);
void peer_send_recall(struct peer *peer, uint32_t count);
void peer_send_revoke(struct peer *peer, uint32_t segment, uint32_t serial);

/** The slot table of the pool map, the touch ring of the page, for tests that spoil or read them.
 */
struct kvist_slot_entry *peer_slots(const struct peer *peer);
struct kvist_index_entry *peer_index(const struct peer *peer);
const _Atomic uint64_t *peer_touches(const struct peer *peer);

/** The lease record that names a slot, or NULL. */
const struct kvist_lease_record *peer_find_lease(const struct peer *peer, uint32_t slot);
uint64_t peer_mark(const struct peer *peer, uint32_t rank, uint32_t ticket);
uint32_t peer_mapped_record(const struct peer *peer, uint32_t rank, uint32_t segment);
void peer_set_mapped_record(struct peer *peer, uint32_t rank, uint32_t segment, uint32_t serial);

#endif
