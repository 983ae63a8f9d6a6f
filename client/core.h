/*
 * core - what the files of libkvist share: client, pools, epochs, views.
 *
 * Role        an *epoch* is what a client has mapped of one arena: the session page and, for each
 *             pool, a *view*: its map, its segments, its grants. A daemon that comes back with its
 *             memory continues the current epoch; one that comes back without starts another, and
 *             the old epoch goes when nothing of it is leased or pinned.
 * Threads     `lock` guards everything unless said otherwise, and is never held over a system call
 *             that can wait, nor over a callback. `pump_mutex` makes one thread at a time the
 *             pumping thread; it is taken before `lock`, never after. Marked "pump": only the
 *             pumping thread changes it, so that the pumping thread reads it without `lock`.
 * Invariants  every lease record of a page is free, never used, or counted in its view's leases;
 *             every ticket of a page is in one enum kvist_ticket_state
 */
#ifndef KVIST_CLIENT_CORE_H
#define KVIST_CLIENT_CORE_H

#include "proto/base/check.h"
#include "proto/shm/layout.h"
#include "proto/wire/message.h"

#include <kvist/client.h>

#include <pthread.h>
#include <sys/types.h>

#define KVIST_CLIENT_MAGIC     0x6b766363U
#define KVIST_POOL_MAGIC       0x6b767063U

#define KVIST_GRACE_US_DEFAULT 60000000U
#define KVIST_BACKOFF_US_MIN   10000U
#define KVIST_BACKOFF_US_MAX   1000000U
#define KVIST_DRAIN_POLL_US    100000U /* how often another process's leases are looked for */
#define KVIST_BATCH_KEYS       128U    /* keys looked up, or blocks posted, under one lock */

enum kvist_link_state {
    KVIST_LINK_DOWN,  /* waits for the next try */
    KVIST_LINK_HELLO, /* connected, Hello sent */
    KVIST_LINK_UP,
};

enum kvist_ticket_state {
    KVIST_TICKET_NONE = 0,
    KVIST_TICKET_HELD,   /* granted, to be taken */
    KVIST_TICKET_TAKEN,  /* ranks may be writing the slot */
    KVIST_TICKET_RETURN, /* not wanted any more; the daemon must be told when it is there */
};

struct kvist_ticket {
    uint64_t reservation; /* of the latest grant under this ticket, NONE or not */
    uint64_t told_on;     /* NONE: number of the connection that its commit or return went out on */
    uint32_t slot;
    uint8_t pool; /* index in kvist_client.pools */
    uint8_t state;
};

/* A segment that this process has mapped; base NULL: none. */
struct kvist_segment_view {
    void *base;
    uint64_t bytes;
    uint32_t serial;
    bool leaving; /* revoked; unmapped when no pin is left */
};

struct kvist_map_view {
    struct kvist_map_header header; /* private copy, checked */
    void *base;
};

/* A pool in one epoch. */
struct kvist_view {
    uint32_t ordinal;
    uint8_t pool_id[KVIST_KEY_BYTES];
    struct kvist_map_view map;
    uint32_t pins;
    uint32_t leases;
    uint32_t mapped_count;
    uint32_t leaving_count;
    uint64_t mapped_bytes;
    uint32_t taken_count; /* tickets that are TAKEN */
    uint32_t used;        /* as in Commit, since the last one */
    uint32_t held_count;
    uint32_t held[KVIST_GRANTS_MAX]; /* tickets that are HELD, a stack */
    struct kvist_segment_view segments[KVIST_SEGMENTS_MAX];
};

struct kvist_epoch {
    struct kvist_epoch *next;
    uint64_t instance;
    dev_t page_device; /* with page_inode: which memfd the page is */
    ino_t page_inode;
    struct kvist_page_header page_header; /* private copy, checked */
    void *page;
    struct kvist_view *views[KVIST_SESSION_POOLS_MAX];
    uint32_t lease_next; /* records below were used */
    uint32_t free_count;
    uint32_t *free_records;       /* [lease_max], a stack */
    struct kvist_ticket *tickets; /* [ticket_max] */
};

enum kvist_pool_state {
    KVIST_POOL_CLOSED,  /* not asked for on this connection */
    KVIST_POOL_ASKED,   /* request_id is on its way */
    KVIST_POOL_OPEN,    /* the current epoch has a view */
    KVIST_POOL_REFUSED, /* `refusal` says why; asked again at retry_at_us when that is not 0 */
};

struct kvist_pool {
    uint32_t magic;
    uint32_t index; /* in kvist_client.pools */
    struct kvist_client *client;
    uint64_t slot_bytes;
    bool sparse;
    bool read_only;
    size_t shape_bytes;
    uint8_t *shape;
    size_t field_count;
    struct kvist_pool_field *fields; /* with names and values in one allocation each */
    enum kvist_pool_state state;
    uint64_t request_id;
    uint64_t retry_at_us;
    struct kvist_error refusal;
};

struct kvist_client {
    uint32_t magic;
    /* Constant after create. */
    enum kvist_role role;
    uint8_t session_id[16];
    uint32_t rank;
    uint32_t rank_count;
    bool schedules; /* leases and takes */
    bool maps;      /* segments: it is a rank */
    uint64_t grace_us;
    char name[KVIST_NAME_BYTES_MAX + 1];
    char socket_path[KVIST_SOCKET_PATH_BYTES];
    void (*segment_mapped)(void *ctx, struct kvist_pool *pool, void *base, uint64_t bytes);
    void (*segment_unmapping)(void *ctx, struct kvist_pool *pool, void *base, uint64_t bytes);
    void *ctx;
    int epoll_fd;
    int timer_fd;
    int wake_fd;

    pthread_mutex_t pump_mutex;
    pthread_mutex_t mutex;
    pthread_mutex_t *lock; /* &mutex, also of a const client */
    pthread_cond_t changed;
    pthread_t thread;
    bool has_thread;
    bool stopping;

    /* Link. socket_fd, reader: pump. */
    enum kvist_link_state link;
    int socket_fd;
    struct kvist_frame_reader *reader;
    struct kvist_frame_writer *writer;
    bool wants_write; /* as registered with epoll */
    bool broken;      /* a send failed: the pumping thread closes */
    uint64_t request_id_last;
    uint64_t hello_id;
    uint64_t up_since_us;
    uint64_t down_since_us;
    uint64_t retry_at_us;
    uint64_t backoff_us;
    uint64_t random_state;
    bool refused; /* last_error is a refusal of Hello that retrying does not cure */
    struct kvist_error last_error;

    struct kvist_epoch *current; /* NULL: none, or its grace is over */
    struct kvist_epoch *retired; /* list: no more finds and takes */
    struct kvist_pool *pools[KVIST_SESSION_POOLS_MAX];
    bool has_returns; /* tickets are RETURN that nobody has posted yet */
    uint32_t closing; /* ordinals, bit by bit, that the daemon is to hear are not open here */
    struct kvist_client_stats stats; /* counters; gauges are filled in when asked */
};

/* --- Reading shared memory ----------------------------------------------------------------- */

static inline void *kvist_page_at(const struct kvist_epoch *epoch, uint64_t offset)
{
    return (char *)epoch->page + offset;
}

static inline struct kvist_page_header *kvist_page_shared_header(const struct kvist_epoch *epoch)
{
    return epoch->page;
}

static inline struct kvist_lease_record *kvist_page_lease(const struct kvist_epoch *epoch,
                                                          uint32_t record)
{
    return (struct kvist_lease_record *)kvist_page_at(epoch, epoch->page_header.lease_offset) +
           record;
}

static inline _Atomic uint64_t *
kvist_page_mark(const struct kvist_epoch *epoch, uint32_t rank, uint32_t ticket)
{
    return (_Atomic uint64_t *)kvist_page_at(epoch, epoch->page_header.mark_offset) +
           (uint64_t)rank * epoch->page_header.ticket_max + ticket;
}

static inline _Atomic uint32_t *kvist_page_mapped(const struct kvist_epoch *epoch,
                                                  uint32_t rank,
                                                  uint32_t ordinal,
                                                  uint32_t segment)
{
    const struct kvist_page_header *header = &epoch->page_header;
    return (_Atomic uint32_t *)kvist_page_at(epoch, header->mapped_offset) +
           ((uint64_t)rank * header->pool_max + ordinal) * header->segment_max + segment;
}

static inline const struct kvist_map_header *
kvist_map_shared_header(const struct kvist_map_view *map)
{
    return map->base;
}

static inline const void *kvist_map_at(const struct kvist_map_view *map, uint64_t offset)
{
    return (const char *)map->base + offset;
}

static inline const struct kvist_index_entry *kvist_map_index(const struct kvist_map_view *map)
{
    return kvist_map_at(map, map->header.index_offset);
}

static inline const struct kvist_slot_entry *kvist_map_slot(const struct kvist_map_view *map,
                                                            uint32_t slot)
{
    const struct kvist_slot_entry *table = kvist_map_at(map, map->header.slot_table_offset);
    return &table[slot];
}

static inline const struct kvist_segment_entry *kvist_map_segment(const struct kvist_map_view *map,
                                                                  uint32_t segment)
{
    const struct kvist_segment_entry *table = kvist_map_at(map, map->header.segment_table_offset);
    return &table[segment];
}

/* --- client.c ------------------------------------------------------------------------------ */

/** Allocate zeroed memory; NULL also where the fault point "client.alloc" says so. */
void *kvist_client_alloc(size_t count, size_t bytes);

/** Make the client's fd readable, so that somebody pumps. Any thread. */
void kvist_client_wake(struct kvist_client *client);

/**
 * Take `lock` for a call of the data path: wait awake before asleep. Who holds it is done in
 * microseconds, unless it lost its processor; who sleeps is late by as long as a busy machine takes
 * to run it again.
 */
void kvist_client_lock_soon(const struct kvist_client *client);

/** Pump until done(ctx) or the deadline; waits for the client's thread where there is one. */
enum kvist_status kvist_client_wait_for(struct kvist_client *client,
                                        bool (*done_locked)(const void *ctx),
                                        const void *ctx,
                                        uint64_t timeout_us);

/* --- link.c: the socket -------------------------------------------------------------------- */

/** Connect and send Hello; on failure the next try is scheduled. Pump. */
void kvist_link_connect(struct kvist_client *client);

/** Close, remember why, schedule the next try. Pump. */
void kvist_link_drop(struct kvist_client *client, const struct kvist_error *why);

/** Receive and handle a bounded number of messages, send what is queued. Pump. */
void kvist_link_turn(struct kvist_client *client);

/** Send a message, or queue it where the socket is full. OK, UNAVAILABLE, BUSY. Any thread. */
enum kvist_status kvist_link_post_locked(struct kvist_client *client,
                                         const Kvist__Wire__Envelope *envelope);

/** Ask for a pool to be opened, when the link is up. */
void kvist_link_open_pool_locked(struct kvist_client *client, struct kvist_pool *pool);

/**
 * Tell the daemon which ordinals this process has closed. What cannot be sent now is sent by a
 * later pump; not while a pool is asked for, which may be given one of these ordinals.
 */
void kvist_link_close_pools_locked(struct kvist_client *client);

/** Tell that a segment is unmapped; lost when the daemon is away, who asks again. */
void kvist_link_post_unmapped_locked(struct kvist_client *client,
                                     uint32_t ordinal,
                                     uint32_t segment,
                                     uint32_t serial);

/* --- receive.c
 * ------------------------------------------------------------------------------------ */

/**
 * Handle a message of the daemon's. Pump, without `lock`.
 *
 * @param fd  the message's, or -1; closed in here
 * @return OK, or why to drop the link
 */
KVIST_MUST_USE enum kvist_status kvist_receive(struct kvist_client *client,
                                               const Kvist__Wire__Envelope *envelope,
                                               int fd,
                                               struct kvist_error *err);

/* --- epoch.c
 * -------------------------------------------------------------------------------------- */

/** Map a session page that the daemon has sent and check it. fd: borrowed. Pump. */
KVIST_MUST_USE enum kvist_status kvist_epoch_create(const struct kvist_client *client,
                                                    uint64_t instance,
                                                    int page_fd,
                                                    struct kvist_epoch **epoch_out,
                                                    struct kvist_error *err);

/** Move the current epoch to the retired ones: this rank's mapped records are cleared. */
void kvist_epoch_retire_locked(struct kvist_client *client);

/** The epoch of an instance, current or retired; NULL when it is gone. */
struct kvist_epoch *kvist_epoch_find_locked(const struct kvist_client *client, uint64_t instance);

/** Unmap what is due: revoked segments, retired epochs. Pump. @return whether some still waits */
bool kvist_epoch_sweep(struct kvist_client *client);

/** Unmap and free an epoch that is in no list. Pump, without `lock`. */
void kvist_epoch_destroy(struct kvist_client *client, struct kvist_epoch **epoch);

/** The view of a pool in the current epoch, NULL when there is none. */
struct kvist_view *kvist_view_current_locked(const struct kvist_pool *pool);

/** Unmap and free a view that is in no epoch any more. Pump, without `lock`. */
void kvist_view_destroy(struct kvist_client *client,
                        struct kvist_pool *pool,
                        struct kvist_view **view);

/** Map and check a pool map that the daemon has sent. fd: borrowed. Pump. */
KVIST_MUST_USE enum kvist_status kvist_map_view_open(int fd,
                                                     uint64_t bytes,
                                                     struct kvist_map_view *map_out,
                                                     struct kvist_error *err);
void kvist_map_view_close(struct kvist_map_view *map);

/** Clear this rank's mapped records of a view. */
void kvist_view_clear_mapped_locked(const struct kvist_client *client,
                                    const struct kvist_epoch *epoch,
                                    const struct kvist_view *view);

/* --- fill.c
 * --------------------------------------------------------------------------------------- */

/** Take in granted slots. PROTOCOL for what cannot be. */
KVIST_MUST_USE enum kvist_status kvist_grant_receive_locked(struct kvist_client *client,
                                                            struct kvist_pool *pool,
                                                            struct kvist_view *view,
                                                            const Kvist__Wire__Grant *grant,
                                                            struct kvist_error *err);

/** Tell the daemon which slots are not wanted any more, where it was away before. */
void kvist_grant_return_due_locked(struct kvist_client *client, struct kvist_pool *pool);

/** Give up to so many held grants of a pool back. */
void kvist_grant_give_back_locked(struct kvist_client *client,
                                  struct kvist_pool *pool,
                                  uint32_t count);

/** Give all held grants of a pool back, and forget the others: it closes. */
void kvist_grant_close_locked(struct kvist_client *client, struct kvist_pool *pool);

#endif
