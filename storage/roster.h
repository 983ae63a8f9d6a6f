/*
 * roster - what a store knows that no pool map and no session page says, in a memfd of its own.
 *
 * Role        lets the next daemon take over sessions, attachments and pools as they were. Written
 *             and read by daemons alone, one at a time.
 * Layout      [header][pools][sessions]; a record's place is that of its object in the store
 * Torn        a daemon that is killed leaves what it had stored, in the order of its program. So a
 *             record has one word that says whether it counts: `serial`, which is written last and
 *             cleared first. Words that change later are meaningful alone. No record is ever torn,
 *             and what breaks a rule of these was not written by kvistd: nothing is adopted then.
 * Ownership   the store's
 * Threads     loop
 * Invariants  serials and reservations are noted here before they are used: none is used twice in
 *             an arena's life, however many daemons it sees
 */
#ifndef KVIST_STORAGE_ROSTER_H
#define KVIST_STORAGE_ROSTER_H

#include "storage/store.h"

#include <stdatomic.h>

#define KVIST_ROSTER_MAGIC       0x7473726573696b76ULL
#define KVIST_ROSTER_VERSION     3U                    /* 3: says who was lent segments */
#define KVIST_PROCESSES_MAX      (KVIST_RANKS_MAX + 1) /* of one session */
#define KVIST_ROSTER_CLEARED_MAX 16U                   /* with more, all of them */
#define KVIST_ADOPTS_MAX         5U /* daemons that died while they adopted: the next one does not */

/* The first letter of the names under which fds are kept; a serial in hex follows. */
enum kvist_kept_kind {
    KVIST_KEPT_MAP = 'm',
    KVIST_KEPT_SEGMENT = 's',
    KVIST_KEPT_PAGE = 'p',
    KVIST_KEPT_PIDFD = 'd',
    KVIST_KEPT_ROSTER = 'r', /* serial 0 */
};

struct kvist_roster_pool {
    _Atomic uint32_t serial; /* 0: no pool */
    _Atomic uint32_t map_serial;
    _Atomic uint32_t next_map_serial; /* takes over once the map says `moved` */
    _Atomic uint32_t cleared; /* since the tier last heard of it: older blocks there do not count */
    struct kvist_tier_pool about; /* its generation stands in the map */
};

struct kvist_roster_attachment {
    _Atomic uint32_t serial; /* 0: the place is free */
    uint32_t pool_serial;
    _Atomic uint32_t writes;
};

struct kvist_roster_process {
    _Atomic uint32_t serial; /* of its pidfd; 0: none */
    uint32_t pid;
    uint32_t rank;
    uint16_t schedules;
    uint16_t maps_segments;
    _Atomic uint32_t loans; /* bit by bit: ordinals that it is attached to */
    _Atomic uint32_t lent;  /* ordinals of which it may map a segment; said before one is lent */
    uint64_t inode;         /* of its pidfd: the process's own from Linux 6.9 on */
};

struct kvist_roster_session {
    _Atomic uint32_t serial; /* of its page; 0: none */
    uint32_t rank_count;
    uint8_t id[16];
    struct kvist_store_about about;
    struct kvist_roster_attachment attachments[KVIST_SESSION_POOLS_MAX];
    struct kvist_roster_process processes[KVIST_PROCESSES_MAX];
};

struct kvist_roster {
    uint64_t magic;
    uint32_t version;
    uint32_t layout_version;
    uint64_t roster_bytes;
    uint64_t instance; /* of the arena; never 0 */
    uint64_t arena_bytes;
    uint64_t reservation_first;
    _Atomic uint64_t reservation_next;
    _Atomic uint32_t serial_next;
    _Atomic uint32_t adopts; /* begun since the last that was done */
    _Atomic uint32_t cleared_count;
    char cleared[KVIST_ROSTER_CLEARED_MAX][KVIST_TENANT_BYTES_MAX + 1]; /* tenants; "": all */
    struct kvist_roster_pool pools[KVIST_POOLS_MAX];
    struct kvist_roster_session sessions[KVIST_SESSIONS_MAX];
};

/** A new roster, kept by the store's keeper; in memory of its own when there is none. */
KVIST_MUST_USE enum kvist_status kvist_roster_create(struct kvist_store *store,
                                                     struct kvist_error *err);

/**
 * Map one that an earlier daemon has left, and check what stands alone in it.
 *
 * @param fd  taken over on OK
 */
KVIST_MUST_USE enum kvist_status
kvist_roster_adopt(struct kvist_store *store, int fd, struct kvist_error *err);

/** Whether a header (all before `pools`) is that of a roster that this version can read. */
bool kvist_roster_fits(const struct kvist_roster *roster);

/** From here on it is a private copy. */
KVIST_MUST_USE enum kvist_status kvist_roster_leave(struct kvist_store *store,
                                                    struct kvist_error *err);
void kvist_roster_fini(struct kvist_store *store);

/** Never 0, never the same again. */
uint32_t kvist_roster_serial(struct kvist_store *store);
uint64_t kvist_roster_reservation(struct kvist_store *store);
/** Whether a reservation was ever given in this arena. */
bool kvist_roster_reserved(const struct kvist_store *store, uint64_t reservation);

/** Cleared if its tenant's rest is: then what the tier tells of it later does not count. */
void kvist_roster_put_pool(const struct kvist_store_pool *pool);
void kvist_roster_drop_pool(const struct kvist_store_pool *pool);
void kvist_roster_set_cleared(const struct kvist_store_pool *pool, bool cleared);
bool kvist_roster_is_cleared(const struct kvist_store_pool *pool);
/** Pools of a tenant ("": of all) that only a tier knows were cleared; until that has been read. */
void kvist_roster_clear_rest(struct kvist_store *store, const char *tenant);
bool kvist_roster_rest_cleared(const struct kvist_store *store, const char *tenant);
bool kvist_roster_has_rest(const struct kvist_store *store);
void kvist_roster_rest_known(struct kvist_store *store);
/** The next map is kept, and will be moved to. */
void kvist_roster_next_map(const struct kvist_store_pool *pool, uint32_t map_serial);
/** It was moved to pool->map. */
void kvist_roster_moved(const struct kvist_store_pool *pool);
void kvist_roster_put_session(const struct kvist_store_session *session);
void kvist_roster_drop_session(const struct kvist_store_session *session);
void kvist_roster_put_attachment(const struct kvist_store_session *session, uint32_t ordinal);
void kvist_roster_drop_attachment(const struct kvist_store_session *session, uint32_t ordinal);
void kvist_roster_put_process(const struct kvist_store_process *process, uint32_t pid, int pidfd);
void kvist_roster_drop_process(const struct kvist_store_process *process);
void kvist_roster_set_loan(const struct kvist_store_process *process,
                           uint32_t ordinal,
                           bool attached);
/** It is about to be lent a segment. */
void kvist_roster_set_lent(const struct kvist_store_process *process, uint32_t ordinal);

/**
 * Have an fd outlive this daemon.
 *
 * @return OK, also without a keeper; NO_SPACE: the keeper has no place for it
 */
KVIST_MUST_USE enum kvist_status
kvist_roster_keep(struct kvist_store *store, enum kvist_kept_kind kind, uint32_t serial, int fd);
void kvist_roster_forget(struct kvist_store *store, enum kvist_kept_kind kind, uint32_t serial);

#endif
