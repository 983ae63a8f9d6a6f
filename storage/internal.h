/*
 * internal - what the files of the store share. Nothing outside storage/ includes it.
 *
 * Role        the objects behind store.h, and the functions by which its files call each other:
 *               arena.c    segments: make, populate, publish, revoke, free
 *               spare.c    memory that is populated before a pool needs it
 *               pool.c     pools: make, find, drop; their maps
 *               slot.c     the transitions of a slot, and what it is counted as
 *               session.c  sessions, processes, attachments; lending
 *               grant.c    how many slots a writer is granted, and granting them
 *               block.c    commit, return, clear, inspect
 *               evict.c    lease scan, eviction, shares between pools
 *               tenant.c   what tenants may have and do have
 *               spill.c    checksums, DRAM -> NVMe
 *               reopen.c   the tier, opened at start or later
 *               save.c     the hot set to NVMe, for operators and at the end
 *               promote.c  NVMe -> DRAM, holds, events of the tier
 *               store.c    open, close, turn, stats
 *               roster.c   what the next store must know; keeping fds
 *               adopt.c    taking over what an earlier store has left
 *               check.c    all invariants
 * Threads     loop; a job's `run` touches its job alone
 * Invariants  a slot's state is in states[], its counters in counts[] and its segment; only slot.c
 *             writes them. What the map says of a slot is a copy for readers, never read back but
 *             for generation, block_bytes and checksum.
 */
#ifndef KVIST_STORAGE_INTERNAL_H
#define KVIST_STORAGE_INTERNAL_H

#include "proto/base/check.h"
#include "storage/map.h"
#include "storage/page.h"
#include "storage/policy/policy.h"
#include "storage/roster.h"
#include "storage/store.h"
#include "storage/workers.h"

#define STORE_MAGIC   0x53544f52U
#define POOL_MAGIC    0x504f4f4cU
#define SESSION_MAGIC 0x53455353U
#define PROCESS_MAGIC 0x50524f43U

#define KVIST_VICTIMS_MAX       4096U                 /* evicted by one lease scan */
#define KVIST_FRESH_MAX         1024U /* commits of a pool that one turn puts in order */
#define KVIST_SUMS_MAX          256U  /* checksums in flight: they pin slots */
#define KVIST_SUMS_OF_THREAD    4U    /* and not more of a thread, beyond */
#define KVIST_SUMS_BYTES        (1U << 20) /* of small blocks: each alone would wake the loop */
#define KVIST_SUM_QUEUE_MAX     16384U
#define KVIST_SUSPECTS_MAX      1024U /* blocks that wait for a checksum because of a session */
/* What a session may have read for its suspicions, and how much of it at once. */
#define KVIST_SUSPECT_BYTES_PER_US 256U
#define KVIST_SUSPECT_BURST_BYTES  KVIST_BLOCK_BYTES_MAX
#define KVIST_SPILLS_MAX        24U /* in flight; the tier's other places are for promotions */
#define KVIST_LOADS_ACTIVE_MAX  32U
#define KVIST_LOADS_MAX         8192U  /* promotions, waiting or in flight */
#define KVIST_HOLDS_MAX         16384U /* promoted blocks that wait for a lease */
#define KVIST_TOUCHES_PER_TURN  4096U  /* of one session */
#define KVIST_GRANT_START       256U   /* slots a session is granted before it has asked for more */
#define KVIST_GRANT_FLOOR       4U
#define KVIST_LOAD_WAIT_US      1000000U /* after which a promotion without a slot is refused */
#define KVIST_RETIRED_SCAN_US   20000U
#define KVIST_SPILL_PATIENCE_US 50000U /* NVMe is waited for so long before blocks are dropped */
#define KVIST_DRAIN_GIVE_UP_US  1000000U
#define KVIST_TAKE_RETRY_US     20000U
#define KVIST_KEEPS_US          200000U
#define KVIST_MAPPED_CHECK_US   10000U
#define KVIST_POPULATE_RETRY_US 1000000U
#define KVIST_AVAILABLE_SPARE_BYTES (256ULL << 20) /* left to others while memory is short */
#define KVIST_SPARES_OF_ARENA   4U          /* a quarter of it is populated before it is asked for */
#define KVIST_SPARE_BYTES_MAX   (4ULL << 30)
#define KVIST_SPARES_MAX        64U

enum kvist_slot_flag {
    KVIST_FLAG_LEASED = 1,  /* seen by the scan that runs now */
    KVIST_FLAG_HELD = 2,    /* promoted, and waiting for its session's lease */
    KVIST_FLAG_SPILLING = 4, /* on its way to NVMe */
    KVIST_FLAG_UNSPILLABLE = 8, /* the tier never takes it: it goes without a copy */
    KVIST_FLAG_SUSPECT = 16, /* a session called it corrupt: its checksum is to be taken again */
};

/* The private truth about a slot; its state is in states[]. */
struct kvist_slot {
    uint64_t reservation; /* of the grant; stays while READY, so that a repeated commit is known */
    uint32_t next;        /* of the free list of its segment, or of the pool's retired list */
    uint32_t entry;       /* in the index, when READY or LOADING and published there */
    uint32_t epoch;       /* of the pool when it left FREE */
    uint16_t ticket;      /* GRANTED */
    uint16_t session;     /* index of the session: GRANTED to, or HELD for */
    uint8_t pins;         /* worker jobs and tier requests that use its bytes */
    uint8_t flags;        /* enum kvist_slot_flag */
};

enum kvist_segment_life {
    KVIST_LIFE_NONE,
    KVIST_LIFE_POPULATING,
    KVIST_LIFE_LIVE,
    KVIST_LIFE_DRAINING, /* LIVE for readers; being emptied, nothing new goes in */
    KVIST_LIFE_REVOKED,  /* empty; members unmap it */
};

struct kvist_segment {
    struct kvist_job job; /* populating */
    struct kvist_store_pool *pool;
    enum kvist_segment_life life;
    uint32_t index; /* in the pool */
    uint32_t serial;
    int fd;
    void *map;
    uint64_t bytes;
    uint32_t free_head; /* slot, or KVIST_SLOT_NONE */
    uint32_t free_count;
    uint32_t lent_count; /* processes that may map it */
    uint32_t counts[5];  /* its slots by state, while LIVE or DRAINING */
    uint64_t drain_since_us; /* or since when it is revoked */
    enum kvist_status populate_status;
    uint64_t keep_number; /* POPULATING: it goes LIVE when so many fds are safe; 0: not so far */
};

#define KVIST_TENANTS_MAX (KVIST_STORE_TENANTS_MAX + KVIST_POOLS_MAX)

struct kvist_tenant {
    struct kvist_store_tenant_limits limits;
    bool is_configured;
    uint64_t used_bytes;    /* of its pools, as of this turn, and what they took since */
    uint64_t leaving_bytes; /* of these, on their way out, as of this turn */
    uint64_t late_bytes;    /* of these, revoked, and not let go of for long */
    uint64_t refusals_total;
};

struct kvist_store_pool {
    uint32_t magic;
    uint32_t index; /* in store->pools */
    uint32_t serial;
    struct kvist_store *store;
    struct kvist_tier_pool about;
    struct kvist_tenant *tenant;
    struct kvist_map map;
    uint32_t next_map_serial;      /* of the one that it grows into, once kept; else 0 */
    uint64_t next_map_keep_number; /* it may take over when so many fds are safe */
    uint64_t next_map_since_us;
    uint64_t segment_bytes;
    uint32_t slots_per_segment;
    uint32_t segment_max; /* of the map */
    uint32_t slot_max;
    uint32_t segment_room; /* of the tables here: what the next map will have, at least segment_max */
    struct kvist_segment *segments; /* [segment_room] */
    uint8_t *states;                /* [slots of these], enum kvist_slot_state */
    struct kvist_slot *slots;       /* [slots of these] */
    const struct kvist_policy_ops *ops;
    struct kvist_policy *policy;
    uint32_t counts[5];     /* slots of live segments, by enum kvist_slot_state */
    uint32_t usable_free;   /* FREE, and not in a draining segment */
    uint32_t segment_count; /* that exist */
    uint32_t populating_count;
    uint32_t draining_count;
    uint64_t used_bytes;
    uint64_t block_bytes_ready;
    uint64_t nvme_blocks; /* index entries with an extent */
    uint32_t epoch;       /* clears since it was opened */
    uint32_t session_count;
    uint32_t writer_count; /* attachments that want grants */
    uint32_t pin_count;    /* of all its slots */
    uint32_t retired_head;
    uint64_t last_used_us; /* when its last session left */
    uint64_t spare_after_us;   /* when to look for empty segments of other pools again */
    uint64_t take_after_us;    /* when to look for a segment of another pool again */
    uint64_t keeps_until_us;   /* no segment of it could be emptied: others are asked meanwhile */
    uint64_t starved_since_us; /* fewer slots free than critical since then; 0: not so */
    uint64_t populate_after_us;
    uint64_t grow_after_us;
    uint32_t fresh[KVIST_FRESH_MAX]; /* committed since the last turn */
    uint32_t fresh_count;
    bool hungry;       /* short of slots, and no memory is coming yet */
    bool lend_wanted;  /* a process is to be told of a segment */
    bool lend_waits;   /* for that until its pidfd is safe */
    bool map_replaced; /* members are to be told of a new map */
    bool put_wanted;   /* the tier is to remember it */
    uint32_t clears_waiting;
    bool put_pending;
    uint64_t put_generation; /* that the tier is remembering */
    uint64_t put_after_us;
    bool adopted;    /* with a generation that the tier has not been asked about */
    bool tier_knows; /* blocks may be written */
    uint64_t leased_count; /* as of the last full scan */
    uint8_t *leased_seen;  /* [slots of segment_room / 8 + 1], for counting */
};

/* A session's view of a pool; its place in the session is the pool's ordinal. It ends when no
   process of the session has a loan of it, and leaves the place to another pool. */
struct kvist_attachment {
    struct kvist_store_pool *pool; /* NULL: the place is free */
    uint32_t serial;               /* names it across turns; 0: the place is free */
    bool writes;
    uint32_t granted_count;
    bool filling;          /* up to what it is to hold; else a quarter is to be used up first */
    uint32_t wants;        /* grants that its use calls for, in this window */
    uint32_t wants_before; /* in the window before */
    uint64_t window_us;    /* when this window began */
    uint32_t fresh_count;  /* commits until wants_before is no longer a guess */
    uint32_t turn_commits; /* since its last top-up was looked at */
    uint64_t recall_after_us;
    uint64_t rests_until_us; /* it gave slots back: no more for a while, unless it commits */
    uint32_t segment_hint;
    uint64_t blocked_until_us; /* no segment with free slots was mapped by all ranks */
    uint32_t waiting_count;  /* promotions queued or in flight, and holds */
    uint32_t promoted_count; /* ended, and not told yet */
    uint32_t *mapped;        /* [segment_room] serial that all ranks were seen to have mapped */
};

struct kvist_ticket {
    uint32_t slot; /* KVIST_SLOT_NONE: free */
    uint8_t ordinal;
};

struct kvist_store_session {
    uint32_t magic;
    uint32_t index; /* in store->sessions */
    uint32_t serial;
    struct kvist_store *store;
    uint8_t id[16];
    bool adopted;
    struct kvist_store_about about;
    struct kvist_page page;
    struct kvist_store_process *processes[KVIST_PROCESSES_MAX];
    struct kvist_attachment attachments[KVIST_SESSION_POOLS_MAX];
    uint32_t attachment_count; /* places in use, in any order */
    uint32_t granted_count;
    uint64_t suspect_bytes_left; /* that may be read for it now */
    uint64_t suspect_us;         /* when that was so */
    uint32_t ticket_free_count;
    uint16_t ticket_free[KVIST_GRANTS_MAX];
    struct kvist_ticket tickets[KVIST_GRANTS_MAX];
};

/* What a process was lent of one pool; `lent` NULL: nothing. */
struct kvist_loan {
    bool attached;
    bool regrant;   /* attached anew: outstanding grants are sent again */
    uint32_t *lent; /* [segment_room] serial of a segment that it may map, 0: none */
    uint32_t *told; /* [segment_room] serial that this connection was told of; UINT32_MAX: that
                       it is revoked */
};

struct kvist_store_process {
    uint32_t magic;
    uint32_t index;  /* in the session */
    uint32_t serial; /* of its pidfd; 0: not watched */
    uint64_t keep_number; /* it is lent segments when so many fds are safe, its pidfd among them */
    struct kvist_store_session *session;
    int pidfd; /* its own, of an adopted process; else -1 */
    void *ctx;
    bool schedules;
    bool maps_segments;
    uint32_t rank;
    struct kvist_loan loans[KVIST_SESSION_POOLS_MAX];
};

/* Names a slot across turns: stale when the pool or the block in it is another one. */
struct kvist_slot_name {
    uint32_t pool_index;
    uint32_t pool_serial;
    uint32_t slot;
    uint64_t generation;
};

/* Slots that something is to be done about; what comes while it is full is left out. */
struct kvist_slot_ring {
    struct kvist_slot_name *names; /* [capacity] */
    uint32_t capacity;             /* a power of two */
    uint32_t head;
    uint32_t tail;
};

/* A block that a worker or the tier is reading: a checksum, or a whole spill. */
struct kvist_spill {
    struct kvist_job job;
    struct kvist_store *store;
    struct kvist_spill *next_free;
    struct kvist_store_pool *pool;
    uint32_t slot;
    bool for_save;
    bool suspected; /* a checksum that was taken before, because of a session */
    struct kvist_tier_block block;
    const void *source;
    uint64_t sum;
};

/* A promotion. */
struct kvist_load {
    struct kvist_store *store;
    struct kvist_load *next; /* free list or queue */
    struct kvist_store_pool *pool;
    uint32_t epoch;
    uint32_t slot; /* KVIST_SLOT_NONE while it waits for one */
    uint64_t since_us;
    uint32_t session_index;
    uint32_t ordinal;
    uint32_t attachment_serial;
    uint8_t key[KVIST_KEY_BYTES];
};

struct kvist_hold {
    struct kvist_slot_name name;
    uint64_t until_us;
    uint32_t session_index;
    uint32_t ordinal;
    uint32_t attachment_serial; /* 0: it has ended */
};

/* A clear whose caller waits. */
struct kvist_clear {
    struct kvist_clear *next;
    struct kvist_store_pool *pool;
    uint64_t generation;
    bool durable;
    enum kvist_status status;
    uint64_t blocks;
    uint64_t bytes;
    kvist_store_done_fn *done;
    void *ctx;
};

struct kvist_save {
    bool running;
    bool syncing;
    struct kvist_slot_name *names; /* [name_count] hottest first */
    size_t name_count;
    size_t name_next;
    uint32_t in_flight;
    struct kvist_store_saved saved;
    kvist_store_saved_fn *done;
    void *ctx;
};

/* Trying to open a tier that was away at start. */
struct kvist_reopen {
    struct kvist_job job; /* first: a job is cast back */
    struct kvist_store *store;
    bool busy;
    uint64_t after_us;
    uint64_t wait_us;
    struct kvist_error err; /* why it is away */
    /* results of a try */
    enum kvist_status status;
    struct kvist_tier *tier;
    struct kvist_error tried_err;
};

struct kvist_spare_memory {
    int fd;
    uint32_t serial; /* of the segment that it will be */
    void *map;
};

/* Memfds with their pages, of which segments are made. */
struct kvist_spare {
    struct kvist_job job; /* first: a job is cast back */
    struct kvist_store *store;
    bool busy;           /* one is coming */
    enum kvist_status status;
    uint64_t after_us;
    uint64_t bytes;      /* of each */
    uint32_t count_max;  /* 0: none are kept */
    uint32_t count;
    struct kvist_spare_memory coming;
    struct kvist_spare_memory ready[KVIST_SPARES_MAX]; /* [count] */
};

struct kvist_store {
    uint32_t magic;
    struct kvist_store_options options;
    struct kvist_workers *idle; /* checksums after commit */
    struct kvist_workers *duty; /* checksums before a spill */
    struct kvist_workers *hands; /* populating */
    struct kvist_tier *tier;
    struct kvist_tier_options tier_options; /* a copy; its events are the store's own */
    struct kvist_reopen reopen;
    struct kvist_spare spare;
    bool tier_loaded;
    bool rest_left; /* a pool that was cleared unseen could not be made */
    bool closing;
    _Atomic bool stop; /* workers give up populating */
    uint64_t now_us;
    struct kvist_roster *roster;
    int roster_fd;       /* -1: it is private memory */
    bool left;           /* what is shared is shared no more */
    uint64_t keep_count; /* fds handed to the keeper */
    uint64_t kept_count; /* of those, the first so many are safe */
    struct kvist_adoption adoption;
    uint64_t shrink_after_us;
    uint64_t adopted_bytes; /* of segments; may exceed arena_bytes until they are drained */
    uint64_t used_bytes;
    uint64_t populated_bytes;
    uint32_t segment_count;  /* of all pools */
    uint64_t taken_us;       /* when a pool last had to give a segment up */
    uint64_t draining_bytes; /* of segments that are on their way out, members or not */
    uint64_t leaving_bytes;  /* of these, what can be waited for, as of this turn */
    struct kvist_tenant tenants[KVIST_TENANTS_MAX];
    uint32_t tenant_count;       /* places in use, some of them by none any more */
    uint64_t tenant_floor_bytes; /* kept free for each that is configured, until it has that much */
    struct kvist_store_pool *pools[KVIST_POOLS_MAX];
    uint32_t pool_high;
    struct kvist_store_session *sessions[KVIST_SESSIONS_MAX];
    uint32_t session_count;
    uint32_t session_turn; /* whose grants come first */
    uint32_t process_count;
    uint32_t writer_count; /* of all pools */
    uint64_t retired_scan_us;
    struct kvist_spill sums[KVIST_SUMS_MAX];
    struct kvist_spill *sum_free;
    uint32_t sums_active;
    uint64_t sums_bytes; /* of the blocks */
    struct kvist_spill spills[KVIST_SPILLS_MAX];
    struct kvist_spill *spill_free;
    uint64_t spill_after_us; /* the last write failed: none is begun before */
    uint64_t spill_wait_us;  /* that was waited for; 0: the last write succeeded */
    struct kvist_slot_ring sum_queue;     /* committed, without a checksum */
    struct kvist_slot_ring suspect_queue; /* called corrupt */
    struct kvist_slot_ring behind_queue;  /* write-behind */
    bool suspects_next;                   /* sums and suspects take turns */
    struct kvist_load *loads; /* [KVIST_LOADS_MAX], with a tier */
    struct kvist_load *load_free;
    struct kvist_load *load_first; /* waiting */
    struct kvist_load *load_last;
    uint32_t loads_active;
    struct kvist_hold *holds; /* ring [KVIST_HOLDS_MAX] in order of until_us */
    uint32_t hold_head;
    uint32_t hold_tail;
    struct kvist_clear *clears;
    struct kvist_save save;
    uint32_t victims[KVIST_VICTIMS_MAX];                 /* scratch */
    struct kvist_store_grant grants[KVIST_GRANTS_MAX];   /* scratch */
    uint64_t touches[KVIST_TOUCHES_PER_TURN];            /* scratch */
    struct kvist_store_stats stats;                      /* the counters */
};

/* --- adopt.c --------------------------------------------------------------------------------- */

/* Take over what options.kept holds, or let it go; then there is a roster. */
KVIST_MUST_USE enum kvist_status kvist_adopt(struct kvist_store *store, struct kvist_error *err);
/* Have the policy know all READY slots of a pool, which it does not yet. */
KVIST_MUST_USE enum kvist_status kvist_adopt_order(struct kvist_store_pool *pool);
/* The tier has told of an adopted pool. */
void kvist_adopt_settle(struct kvist_store_pool *pool, const struct kvist_tier_pool *about);

/* --- store.c --------------------------------------------------------------------------------- */

/* What is shared becomes a private copy. */
void kvist_store_make_private(struct kvist_store *store);

/* --- slot.c ---------------------------------------------------------------------------------- */

static inline enum kvist_slot_state kvist_slot_state_of(const struct kvist_store_pool *pool,
                                                        uint32_t slot)
{
    return (enum kvist_slot_state)pool->states[slot];
}

static inline struct kvist_segment *kvist_slot_segment(const struct kvist_store_pool *pool,
                                                       uint32_t slot)
{
    return &pool->segments[slot / pool->slots_per_segment];
}

static inline void *kvist_slot_bytes_of(const struct kvist_store_pool *pool, uint32_t slot)
{
    return (char *)kvist_slot_segment(pool, slot)->map +
           (uint64_t)(slot % pool->slots_per_segment) * pool->about.slot_bytes;
}

static inline uint64_t kvist_slot_generation(const struct kvist_store_pool *pool, uint32_t slot)
{
    return atomic_load_explicit(&pool->map.slots[slot].generation, memory_order_relaxed);
}

static inline uint64_t kvist_slot_block_bytes(const struct kvist_store_pool *pool, uint32_t slot)
{
    uint64_t bytes =
        atomic_load_explicit(&pool->map.slots[slot].block_bytes, memory_order_relaxed);
    return bytes < pool->about.slot_bytes ? bytes : pool->about.slot_bytes;
}

/* A worker or the tier uses a slot's bytes, and no longer does. */
static inline void kvist_slot_pin(struct kvist_store_pool *pool, uint32_t slot)
{
    pool->slots[slot].pins++;
    pool->pin_count++;
}

static inline void kvist_slot_unpin(struct kvist_store_pool *pool, uint32_t slot)
{
    KVIST_CHECK(pool->slots[slot].pins > 0);
    pool->slots[slot].pins--;
    pool->pin_count--;
}

/* Count a slot of a segment that is being adopted; info->entry and its grant are set. READY: the
   policy is told later. */
void kvist_slot_adopt(struct kvist_store_pool *pool, uint32_t slot, enum kvist_slot_state state);
/* A live segment's slots become FREE; or cease to be, when all of them are. */
void kvist_slot_add_segment(struct kvist_store_pool *pool, struct kvist_segment *segment);
void kvist_slot_remove_segment(struct kvist_store_pool *pool, struct kvist_segment *segment);
/* What is FREE in it no longer counts as usable, or does again. */
void kvist_slot_set_draining(struct kvist_store_pool *pool,
                             struct kvist_segment *segment,
                             bool draining);
/* FREE -> GRANTED or LOADING, from that segment. KVIST_SLOT_NONE when it has none. */
uint32_t kvist_slot_take(struct kvist_store_pool *pool,
                         struct kvist_segment *segment,
                         enum kvist_slot_state state);
/* Say what is in a slot, before an index entry names it. */
void kvist_slot_prepare(struct kvist_store_pool *pool, uint32_t slot, uint64_t block_bytes);
/* GRANTED or LOADING -> READY; then the index entry, to be written at that position, names it. */
void kvist_slot_publish(struct kvist_store_pool *pool,
                        uint32_t slot,
                        uint32_t position,
                        const struct kvist_entry_copy *entry);
/* READY -> RETIRED; and back. The policy still knows it. */
void kvist_slot_retire(struct kvist_store_pool *pool, uint32_t slot);
void kvist_slot_restore(struct kvist_store_pool *pool, uint32_t slot);
/* The policy forgets a RETIRED slot. Of all that are retired together, before one is settled: that
   empties tombstones, and with them the keys of others, which ghosts are named by. */
void kvist_slot_forget(struct kvist_store_pool *pool, uint32_t slot, bool evicted);
/* RETIRED and forgotten -> FREE; its index entry is settled. */
void kvist_slot_settle(struct kvist_store_pool *pool, uint32_t slot);
/* READY -> RETIRED, onto the retired list; its index entry was dropped by the caller. */
void kvist_slot_discard(struct kvist_store_pool *pool, uint32_t slot, uint64_t key_tag);
/* Walk the retired list: what is neither pinned nor flagged leased becomes FREE. */
void kvist_slot_sweep_retired(struct kvist_store_pool *pool);
/* GRANTED or LOADING -> FREE. */
void kvist_slot_drop(struct kvist_store_pool *pool, uint32_t slot);
struct kvist_slot_name kvist_slot_name_of(const struct kvist_store_pool *pool, uint32_t slot);
/* The pool, when the name still names a READY block; else NULL. */
struct kvist_store_pool *kvist_slot_resolve(const struct kvist_store *store,
                                            const struct kvist_slot_name *name);

/* --- arena.c --------------------------------------------------------------------------------- */

/* Whether one segment more can be kept. Pools of a time when the arena was smaller have smaller ones,
   and more of them. */
static inline bool kvist_arena_can_keep(const struct kvist_store *store)
{
    uint32_t max = store->options.keeper.segments_max;
    return max == 0 || store->segment_count < max;
}

/* Make a segment for the pool and populate it on a worker. */
KVIST_MUST_USE enum kvist_status kvist_arena_grow(struct kvist_store_pool *pool);
/* An empty draining segment: tell its members to unmap it; free it when none has it. */
void kvist_arena_revoke(struct kvist_store_pool *pool, struct kvist_segment *segment);
/* A REVOKED segment that nobody has mapped. */
void kvist_arena_end_revoked(struct kvist_store_pool *pool, struct kvist_segment *segment);
/* One member fewer. */
void kvist_arena_unlend(struct kvist_store_pool *pool, struct kvist_segment *segment);
/* Some fds more are safe: segments that waited for it become LIVE. */
void kvist_arena_kept(struct kvist_store_pool *pool);
/* Take over segment `index` of an adopted pool: LIVE or REVOKED, as its map says. Maps it, and
   touches none of it. fd: taken over on OK. Its slots are counted by kvist_slot_adopt(). */
KVIST_MUST_USE enum kvist_status
kvist_arena_adopt(struct kvist_store_pool *pool, uint32_t index, uint32_t serial, int fd);
/* At close: every segment of the pool, whoever has it mapped. */
void kvist_arena_free_all(struct kvist_store_pool *pool);
/* Beside what was let go at start and may still be mapped, there is memory for so much more. */
bool kvist_arena_has_memory(struct kvist_store *store, uint64_t bytes);

/* --- spare.c --------------------------------------------------------------------------------- */

void kvist_spare_init(struct kvist_store *store);
void kvist_spare_fini(struct kvist_store *store);
/* Populate one more, when there is room and nothing else to populate. */
void kvist_spare_turn(struct kvist_store *store);
/* Memory of that size, sealed and mapped, with most of its pages or all. The caller owns it. */
bool kvist_spare_take(struct kvist_store *store,
                      uint64_t bytes,
                      struct kvist_spare_memory *memory_out);
/* Segments have taken some of the arena: give back what no longer fits in beside them. */
void kvist_spare_trim(struct kvist_store *store);
uint64_t kvist_spare_bytes(const struct kvist_store *store);

/* --- pool.c ---------------------------------------------------------------------------------- */

KVIST_MUST_USE enum kvist_status kvist_pool_create(struct kvist_store *store,
                                                   const struct kvist_tier_pool *about,
                                                   struct kvist_store_pool **pool_out,
                                                   struct kvist_error *err);
/* A pool around a map that an earlier store has left, without segments; takes the map over on OK.
 */
KVIST_MUST_USE enum kvist_status kvist_pool_adopt(struct kvist_store *store,
                                                  const struct kvist_tier_pool *about,
                                                  uint32_t index,
                                                  uint32_t serial,
                                                  const struct kvist_map *map);
void kvist_pool_destroy(struct kvist_store_pool **pool);
/* Whether one more can be made without another one being dropped. */
bool kvist_pool_fits(const struct kvist_store *store);
/* Of pools whose slots are not too large for it. */
uint64_t kvist_pool_segment_bytes_least(uint64_t arena_bytes);
/* Of a new pool. */
uint64_t kvist_pool_segment_bytes(const struct kvist_store *store, uint64_t slot_bytes);
/* A step towards a larger map, when it is time; members are told in this or the next turn. */
void kvist_pool_grow_map(struct kvist_store_pool *pool);
/* Whether a larger map is to be safe soon, and is not yet. */
bool kvist_pool_growth_waits(const struct kvist_store_pool *pool);
/* What is in DRAM stays valid in the new generation. */
void kvist_pool_set_generation(struct kvist_store_pool *pool, uint64_t generation);
/* Whether the tier will be able to take its blocks soon, and cannot yet. */
bool kvist_pool_is_settling(const struct kvist_store_pool *pool);
/* Hand the tier what it is to remember, when it can take it. */
void kvist_pool_put(struct kvist_store_pool *pool);

/* --- session.c ------------------------------------------------------------------------------- */

/* A session that is in no list yet, without its page. */
struct kvist_store_session *
kvist_session_make(struct kvist_store *store, const uint8_t id[16], uint32_t serial);
/* Room for what a process is lent of a pool; nothing is lent yet. On failure nothing has changed. */
KVIST_MUST_USE enum kvist_status kvist_session_make_loan(struct kvist_loan *loan,
                                                         const struct kvist_store_pool *pool);
/* End an attachment that no process has a loan of. */
void kvist_session_settle(struct kvist_store_session *session, uint32_t ordinal);
/* Take a FREE slot that every rank of the session has mapped. KVIST_SLOT_NONE: there is none. */
uint32_t kvist_session_take_slot(struct kvist_store_session *session,
                                 uint32_t ordinal,
                                 enum kvist_slot_state state);
/* The process that gets the grants, while it is connected. */
struct kvist_store_process *kvist_session_scheduler(const struct kvist_store_session *session);
void kvist_session_drain_touches(struct kvist_store_session *session);
void kvist_session_tell_promoted(struct kvist_store_session *session);
/* Lend, revoke, announce maps: to all members of the pool. */
void kvist_session_lend(struct kvist_store_pool *pool);
/* NULL when it has ended since. */
struct kvist_attachment *kvist_session_attachment(const struct kvist_store *store,
                                                  uint32_t session_index,
                                                  uint32_t ordinal,
                                                  uint32_t serial);

/* The pool of an ordinal that a peer named; NULL when the session has none there. */
static inline struct kvist_store_pool *
kvist_session_pool(const struct kvist_store_session *session, uint64_t ordinal)
{
    return ordinal < KVIST_SESSION_POOLS_MAX ? session->attachments[ordinal].pool : NULL;
}

/* --- grant.c --------------------------------------------------------------------------------- */

/* An attachment begins: what it will use is not known. */
void kvist_grant_begin(struct kvist_attachment *attachment, uint64_t now_us);
/* The grant under a ticket has ended; the slot's state is the caller's to change. */
void kvist_grant_end(struct kvist_store_session *session, uint32_t ticket);
/* It gave slots back: they are not replaced at once. */
void kvist_grant_rest(struct kvist_store_session *session, uint32_t ordinal);
void kvist_grant_committed(struct kvist_attachment *attachment);
/* Ask the pool's writers for grants that they do not use. @return whether some may come soon */
bool kvist_grant_recall(struct kvist_store_pool *pool);
void kvist_grant_top_up(struct kvist_store_session *session);

/* --- block.c --------------------------------------------------------------------------------- */

/* Drop every block of the pool from the index. */
void kvist_block_unpublish_all(struct kvist_store_pool *pool);
void kvist_block_order_fresh(struct kvist_store_pool *pool);
/* The tier has answered for the pool: what its clears wait for. */
void kvist_block_pool_durable(struct kvist_store_pool *pool, enum kvist_status status);
void kvist_block_turn_clears(struct kvist_store *store);

/* --- evict.c --------------------------------------------------------------------------------- */

/* Free slots a pool tries to have, and those below which it drops what it has not spilled. */
uint32_t kvist_evict_low(const struct kvist_store_pool *pool);
uint32_t kvist_evict_critical(const struct kvist_store_pool *pool);
/* Evict up to `want` blocks by the policy's choice. @return how many are gone now */
uint32_t kvist_evict_blocks(struct kvist_store_pool *pool, uint32_t want);
/* Slots that exist in the pool's live segments. */
uint32_t kvist_evict_slot_count(const struct kvist_store_pool *pool);
/* Whether the pool may have one more segment at nobody's cost: of free memory that no smaller pool
   waits for. */
bool kvist_evict_has_room(const struct kvist_store_pool *pool);
/* Unpublish these READY slots unless they are leased. @return how many are gone */
uint32_t kvist_evict_slots(struct kvist_store_pool *pool,
                           const uint32_t *slots,
                           uint32_t count,
                           bool by_policy);
/* Flag LEASED every RETIRED slot of the pool that a session's lease names. Fences first. */
void kvist_evict_scan(struct kvist_store_pool *pool);
/* Count leased slots of every pool, and those of one session when it is not NULL. */
uint64_t kvist_evict_count_leases(struct kvist_store *store, struct kvist_store_session *session);
/* More was adopted than the arena may have, or a quota was lowered: a segment at a time is given
   back. Whether the pool has a part in that. */
void kvist_evict_shrink(struct kvist_store *store);
bool kvist_evict_is_over(const struct kvist_store_pool *pool);
void kvist_evict_turn(struct kvist_store_pool *pool);
void kvist_evict_turn_retired(struct kvist_store *store);

/* --- tenant.c -------------------------------------------------------------------------------- */

/* The tenant of a name, made when it is new. */
struct kvist_tenant *kvist_tenant_find(struct kvist_store *store, const char *name);
/* Sum up what tenants have. */
void kvist_tenant_turn(struct kvist_store *store);
/* A segment goes, before the next turn sums up. */
void kvist_tenant_gives_back(const struct kvist_segment *segment);
/* Bytes that the tenant may still take; coming: when all that is on its way out has gone. */
uint64_t kvist_tenant_room(const struct kvist_store *store,
                           const struct kvist_tenant *tenant,
                           bool coming);
/* Whether its quota lets it have so much more, when what is on its way out has gone. */
bool kvist_tenant_fits(const struct kvist_tenant *tenant, uint64_t bytes);
bool kvist_tenant_is_over_quota(const struct kvist_tenant *tenant);
/* Whose memory goes first: who has most by weight, and lets go of what is revoked. */
bool kvist_tenant_gives_first(const struct kvist_tenant *tenant, const struct kvist_tenant *other);
/* Whether the donor's tenant has its floor without a segment of it. */
bool kvist_tenant_can_spare(const struct kvist_store_pool *donor);
/* Whether the donor's tenant has no less than the pool's when a segment has changed sides. */
bool kvist_tenant_outweighs(const struct kvist_store_pool *donor,
                            const struct kvist_store_pool *pool);

/* --- spill.c --------------------------------------------------------------------------------- */

KVIST_MUST_USE enum kvist_status kvist_spill_init(struct kvist_store *store);
void kvist_spill_fini(struct kvist_store *store);
/* A block was published: have its checksum taken. */
void kvist_spill_queue_sum(struct kvist_store_pool *pool, uint32_t slot);
/* Have a READY block written behind. */
void kvist_spill_queue_behind(struct kvist_store_pool *pool, uint32_t slot);
/* Whether the block must be on NVMe before it may go. */
bool kvist_spill_wanted(const struct kvist_store_pool *pool, uint32_t slot);
/* Write a READY block to NVMe; it stays READY. BUSY: no room now; UNSUPPORTED: no tier. */
KVIST_MUST_USE enum kvist_status
kvist_spill_start(struct kvist_store_pool *pool, uint32_t slot, bool for_save);
void kvist_spill_turn(struct kvist_store *store);
/* Whether the block is on NVMe too. */
bool kvist_spill_has_copy(const struct kvist_store_pool *pool, uint32_t slot);
/* A write failed: none is begun for a while, which is longer each time. Whether it is so now. */
void kvist_spill_wait(struct kvist_store *store);
bool kvist_spill_waits(const struct kvist_store *store);
/* Drop a READY block whose bytes are not what was committed. */
void kvist_spill_drop_block(struct kvist_store_pool *pool, uint32_t slot);

/* --- reopen.c -------------------------------------------------------------------------------- */

/* Open the tier, if one is wanted; one whose disk is in trouble is away for now. */
KVIST_MUST_USE enum kvist_status kvist_reopen_init(struct kvist_store *store,
                                                   struct kvist_error *err);
void kvist_reopen_turn(struct kvist_store *store);
/* What stats say of a tier that is away. */
void kvist_reopen_stats(const struct kvist_store *store, struct kvist_tier_stats *stats_out);

/* --- save.c ---------------------------------------------------------------------------------- */

void kvist_save_turn(struct kvist_store *store);
/* A block of the save was not written: its turn comes again. */
void kvist_save_again(struct kvist_store *store,
                      const struct kvist_slot_name *name,
                      enum kvist_status why);

/* --- promote.c ------------------------------------------------------------------------------- */

extern const struct kvist_tier_events kvist_promote_events;

void kvist_promote_turn(struct kvist_store *store);
/* Forget the holds of an attachment that ends. */
void kvist_promote_forget_holds(struct kvist_store *store, uint32_t attachment_serial);
/* Forget the promotions that wait for a slot of a pool that goes. */
void kvist_promote_forget_loads(struct kvist_store *store, const struct kvist_store_pool *pool);

#endif
