/*
 * layout - the shared memory of kvistd and its engines, and the protocol by which they share it.
 *
 * Role        structures of the pool map and the session page, byte for byte, and the few reads and
 *             writes that both sides must do alike. Allocates nothing, calls nothing.
 *
 * Pool map    one memfd a pool: [header 4096][segment table][slot table][index].
 *             Written by the daemon's loop thread alone; engines map it read-only.
 *             It never changes size: growth is a new memfd, and the old header says `moved`.
 * Page        one memfd a session: [header 4096][leases][marks][mapped][touches].
 *             Written by the session's processes; the daemon maps it read-only. The daemon keeps
 *             the geometry that it created the page with and believes nothing else in the header.
 * Segment     one memfd, nothing but slots: slot i of a segment lies at i * slot_bytes. What the
 *             segment is stands in its pool's map, which the pool's writers cannot write.
 *
 * Who writes what
 *   index entry      daemon; seqlock (below)
 *   slot entry       daemon; single words, each meaningful alone; stable while the slot is leased
 *   segment entry    daemon; single words
 *   lease record     the session's scheduler process; `generation` before `ref`
 *   fill mark        the rank that it belongs to
 *   mapped record    the rank that it belongs to
 *   touch ring       the scheduler process; lossy
 *
 * Protocol (C11 memory model; holds on x86-64 and arm64 alike)
 *   Index entry, a seqlock of atomic words.
 *     writer: sequence odd (relaxed); release fence; fields (relaxed); sequence even (release).
 *     reader: sequence (acquire), odd: busy; fields (relaxed); acquire fence; sequence (relaxed),
 *             changed: busy. A busy read is tried again a few times, then it is a miss. If a reader
 *             saw a field of a newer write, the two fences make the newer odd sequence visible to
 *             its second load, so a torn entry is never believed. A writer that died within a write
 *             leaves the entry odd: a miss, until the next daemon adopts the map and drops it.
 *             So a READY entry is written only to hide it, or to publish it again. `extent` is the
 *             daemon's own note, a word that is meaningful alone: it changes without the sequence.
 *   Lease against eviction: store buffering (Dekker) resolved by two sequentially consistent
 *     fences, one on either side.
 *     engine: write the lease record; FENCE; read the entry again and the map's `moved` flag.
 *             Unchanged: leased. Else: clear the record; a miss.
 *     daemon: write the entry (not READY any more, or `moved`); FENCE; scan the lease records.
 *             A record names the slot: it is not reused, and may be published again.
 *     Either the engine's fence comes first, and the scan sees the record, or the daemon's comes
 *     first, and the engine sees the changed entry. Removing either fence breaks this.
 *     `lease_high` is raised before the record is written and read before the records are: the
 *     fences order it, too. Pages have a third such place: a process that leaves an arena clears its
 *     mapped records, FENCE, scans the lease records, and unmaps when there are none.
 *   Release: the record is cleared with release order after the last byte was read (for a device:
 *     after its copy has ended); the scan reads with acquire order. So reads of a slot happen
 *     before its reuse.
 *     A record may name another slot before a scan has read its 0: `ref` is always written with
 *     release order, so whoever reads the later one knows of the end of the earlier lease.
 *   Fill: bytes, then the mark with release order; the daemon reads marks with acquire order and
 *     then publishes with release order; so whoever finds a block sees all of its bytes.
 *   Mapped: set with release order after the segment is mapped and its page table populated;
 *     cleared before it is unmapped, which happens only after Revoke, when nothing in the segment
 *     is published, leased or granted.
 *   Proof: tests/model runs the functions of storage/ and client/ that do all this in every execution
 *     that C11 allows, and checks of each order above that something breaks without it.
 *
 * Limits      all counts and offsets are checked against limits.h by the side that maps the memory
 * Source      hazard pointers (M. Michael, 2004); seqlocks in C11 (H. Boehm, 2012)
 */
#ifndef KVIST_SHM_LAYOUT_H
#define KVIST_SHM_LAYOUT_H

#include <kvist/limits.h>
#include <kvist/version.h>

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KVIST_MAP_MAGIC    0x70616d747369766bULL /* "kvistmap" */
#define KVIST_PAGE_MAGIC   0x6567617074736976ULL /* "vistpage" */
#define KVIST_HEADER_BYTES 4096U
#define KVIST_SLOT_NONE    UINT32_MAX
#define KVIST_ENTRY_NONE   UINT32_MAX

/* --- Pool map ------------------------------------------------------------------------------- */

struct kvist_map_header {
    uint64_t magic;
    uint32_t layout_version;
    uint32_t header_bytes;
    uint8_t pool_id[KVIST_KEY_BYTES];
    uint64_t map_bytes;
    uint64_t slot_bytes;
    uint32_t slots_per_segment;
    uint32_t segment_max;    /* entries of the segment table, at most KVIST_SEGMENTS_MAX */
    uint32_t slot_max;       /* entries of the slot table: slots_per_segment * segment_max */
    uint32_t index_capacity; /* entries of the index, a power of two */
    uint64_t index_seed;
    uint64_t segment_table_offset;
    uint64_t slot_table_offset;
    uint64_t index_offset;
    _Atomic uint32_t moved; /* 1: this map is no longer written; the next one is on its way */
    uint32_t padding;
    _Atomic uint64_t generation; /* of the pool; Clear bumps it */
    uint8_t reserved[KVIST_HEADER_BYTES - 128];
};
_Static_assert(sizeof(struct kvist_map_header) == KVIST_HEADER_BYTES, "map header is one page");
_Static_assert(offsetof(struct kvist_map_header, moved) == 112, "map header is packed");

enum kvist_segment_state {
    KVIST_SEGMENT_NONE = 0,
    KVIST_SEGMENT_LIVE = 1,    /* populated; its slots may be granted and published */
    KVIST_SEGMENT_REVOKED = 2, /* nothing in it is published; members unmap it */
};

struct kvist_segment_entry {
    _Atomic uint32_t serial; /* unique in a daemon's arena, never 0 while the segment lives */
    _Atomic uint32_t state;  /* enum kvist_segment_state */
    _Atomic uint64_t bytes;
    uint64_t reserved[2];
};
_Static_assert(sizeof(struct kvist_segment_entry) == 32, "segment entry");

enum kvist_slot_state {
    KVIST_SLOT_FREE = 0,
    KVIST_SLOT_GRANTED = 1, /* a session may be writing it */
    KVIST_SLOT_READY = 2,   /* published */
    KVIST_SLOT_RETIRED = 3, /* no longer published; waits for its leases to go */
    KVIST_SLOT_LOADING = 4, /* the daemon is filling it from NVMe */
};

#define KVIST_SLOT_CHECKSUMMED 1U /* flag: `checksum` is valid */

struct kvist_slot_entry {
    _Atomic uint32_t state;       /* enum kvist_slot_state */
    _Atomic uint32_t flags;       /* KVIST_SLOT_CHECKSUMMED; set with release after `checksum` */
    _Atomic uint64_t generation;  /* goes up each time the slot leaves FREE */
    _Atomic uint64_t block_bytes; /* of the block in the slot, at most slot_bytes */
    _Atomic uint64_t checksum;    /* XXH3-64 of the block, see kvist_key_checksum_seed() */
    _Atomic uint64_t reservation; /* of the grant; 0 when not granted */
    _Atomic uint64_t pool_generation; /* of the pool when the slot left FREE */
    _Atomic uint32_t entry;           /* where it is published in the index, or KVIST_ENTRY_NONE */
    _Atomic uint32_t session;         /* ordinal of the session that holds the grant */
    _Atomic uint32_t ticket;          /* GRANTED: of that session; the daemon's own note */
    uint32_t reserved;
};
_Static_assert(sizeof(struct kvist_slot_entry) == 64, "slot entry is a cache line");

enum kvist_entry_state {
    KVIST_ENTRY_EMPTY = 0,     /* ends a probe sequence */
    KVIST_ENTRY_TOMBSTONE = 1, /* was in use; a probe goes on */
    KVIST_ENTRY_READY = 2,     /* in DRAM: slot, generation */
    KVIST_ENTRY_NVME = 3,      /* on NVMe alone */
    KVIST_ENTRY_LOADING = 4,   /* on NVMe; being promoted */
};

#define KVIST_INDEX_PROBE_MAX 128U /* entries that a lookup or an insert looks at */
#ifndef KVIST_INDEX_READ_MAX       /* tests/model explores fewer */
#define KVIST_INDEX_READ_MAX  64U  /* times that a busy entry is read */
#endif

struct kvist_index_entry {
    _Atomic uint32_t sequence;   /* odd: being written */
    _Atomic uint32_t state;      /* enum kvist_entry_state */
    _Atomic uint32_t slot;       /* READY: segment * slots_per_segment + slot within it */
    _Atomic uint32_t extent;     /* != 0: the block is also, or only, in this extent on NVMe; not
                                    under the sequence */
    _Atomic uint64_t generation; /* READY: of the slot */
    _Atomic uint64_t parent_tag; /* first 8 bytes of the parent's key, 0 for a root; a hint */
    _Atomic uint64_t key[4];
};
_Static_assert(sizeof(struct kvist_index_entry) == 64, "index entry is a cache line");

/* A private, consistent copy of an index entry. */
struct kvist_entry_copy {
    enum kvist_entry_state state;
    uint32_t slot;
    uint32_t extent;
    uint64_t generation;
    uint64_t parent_tag;
    uint64_t key[4];
};

/* --- Session page --------------------------------------------------------------------------- */

struct kvist_page_header {
    uint64_t magic;
    uint32_t layout_version;
    uint32_t header_bytes;
    uint8_t session_id[16];
    uint64_t page_bytes;
    uint32_t lease_max;   /* lease records, at most KVIST_LEASES_MAX */
    uint32_t ticket_max;  /* fill marks of each rank, at most KVIST_GRANTS_MAX */
    uint32_t rank_count;  /* 1..KVIST_RANKS_MAX */
    uint32_t pool_max;    /* KVIST_SESSION_POOLS_MAX */
    uint32_t segment_max; /* KVIST_SEGMENTS_MAX */
    uint32_t touch_count; /* KVIST_TOUCH_RING_COUNT */
    uint64_t lease_offset;
    uint64_t mark_offset;   /* [rank][ticket] of _Atomic uint64_t */
    uint64_t mapped_offset; /* [rank][pool][segment] of _Atomic uint32_t: serial, 0: not mapped */
    uint64_t touch_offset;
    _Atomic uint32_t lease_high; /* records at and above it were never used; raised before use */
    uint32_t padding;
    _Atomic uint64_t touch_head; /* entries ever written */
    uint8_t reserved[KVIST_HEADER_BYTES - 112];
};
_Static_assert(sizeof(struct kvist_page_header) == KVIST_HEADER_BYTES, "page header is one page");
_Static_assert(offsetof(struct kvist_page_header, lease_high) == 96, "page header is packed");

struct kvist_lease_record {
    _Atomic uint64_t ref; /* kvist_slot_ref(), 0: free */
    _Atomic uint64_t generation;
};
_Static_assert(sizeof(struct kvist_lease_record) == 16, "lease record");

/** Name a slot in a session page: pool is the session's ordinal of the pool. Never 0. */
static inline uint64_t kvist_slot_ref(uint32_t pool, uint32_t slot)
{
    return (((uint64_t)pool + 1) << 32) | slot;
}

/* --- Geometry ------------------------------------------------------------------------------- */

static inline uint64_t kvist_align_up(uint64_t value, uint64_t alignment)
{
    return (value + alignment - 1) / alignment * alignment;
}

/** Lay out a pool map: fills the offsets and map_bytes from the counts that the caller has set. */
static inline void kvist_map_lay_out(struct kvist_map_header *header)
{
    header->segment_table_offset = KVIST_HEADER_BYTES;
    header->slot_table_offset =
        kvist_align_up(header->segment_table_offset +
                           (uint64_t)header->segment_max * sizeof(struct kvist_segment_entry),
                       KVIST_HEADER_BYTES);
    header->index_offset = kvist_align_up(
        header->slot_table_offset + (uint64_t)header->slot_max * sizeof(struct kvist_slot_entry),
        KVIST_HEADER_BYTES);
    header->map_bytes = kvist_align_up(header->index_offset + (uint64_t)header->index_capacity *
                                                                  sizeof(struct kvist_index_entry),
                                       KVIST_HEADER_BYTES);
}

/** Lay out a session page: fills the offsets and page_bytes from the counts. */
static inline void kvist_page_lay_out(struct kvist_page_header *header)
{
    header->lease_offset = KVIST_HEADER_BYTES;
    header->mark_offset =
        header->lease_offset + (uint64_t)header->lease_max * sizeof(struct kvist_lease_record);
    header->mapped_offset =
        header->mark_offset + (uint64_t)header->rank_count * header->ticket_max * sizeof(uint64_t);
    header->touch_offset =
        kvist_align_up(header->mapped_offset + (uint64_t)header->rank_count * header->pool_max *
                                                   header->segment_max * sizeof(uint32_t),
                       sizeof(uint64_t));
    header->page_bytes =
        kvist_align_up(header->touch_offset + (uint64_t)header->touch_count * sizeof(uint64_t),
                       KVIST_HEADER_BYTES);
}

/**
 * Check a private copy of a pool map's header against the limits and the size of its memfd.
 *
 * @return whether every offset and count can be relied upon
 */
bool kvist_map_header_check(const struct kvist_map_header *copy, uint64_t memfd_bytes);

/** The same for a session page's header. */
bool kvist_page_header_check(const struct kvist_page_header *copy, uint64_t memfd_bytes);

/* --- Index: what reader and writer share ------------------------------------------------------ */

/** First index position of a key. The seed keeps peers from aiming at one place. */
static inline uint32_t kvist_index_home(const uint64_t key[4], uint64_t seed, uint32_t capacity)
{
    uint64_t hash = (key[0] ^ seed) * 0x9e3779b97f4a7c15ULL;
    hash ^= (key[1] + (hash >> 29)) * 0xbf58476d1ce4e5b9ULL;
    return (uint32_t)(hash >> 32) & (capacity - 1);
}

/** Read one entry consistently; false when it stays busy (the caller takes it for a miss). */
static inline bool kvist_entry_read(const struct kvist_index_entry *entry,
                                    struct kvist_entry_copy *copy_out)
{
    for (unsigned attempt = 0; attempt < KVIST_INDEX_READ_MAX; attempt++) {
        uint32_t before = atomic_load_explicit(&entry->sequence, memory_order_acquire);
        if ((before & 1U) != 0) {
            continue;
        }
        struct kvist_entry_copy copy;
        copy.state =
            (enum kvist_entry_state)atomic_load_explicit(&entry->state, memory_order_relaxed);
        copy.slot = atomic_load_explicit(&entry->slot, memory_order_relaxed);
        copy.extent = atomic_load_explicit(&entry->extent, memory_order_relaxed);
        copy.generation = atomic_load_explicit(&entry->generation, memory_order_relaxed);
        copy.parent_tag = atomic_load_explicit(&entry->parent_tag, memory_order_relaxed);
        for (unsigned word = 0; word < 4; word++) {
            copy.key[word] = atomic_load_explicit(&entry->key[word], memory_order_relaxed);
        }
        atomic_thread_fence(memory_order_acquire);
        if (atomic_load_explicit(&entry->sequence, memory_order_relaxed) == before) {
            *copy_out = copy;
            return true;
        }
    }
    return false;
}

/** Write one entry; the daemon's loop thread alone. */
static inline void kvist_entry_write(struct kvist_index_entry *entry,
                                     const struct kvist_entry_copy *copy)
{
    uint32_t sequence = atomic_load_explicit(&entry->sequence, memory_order_relaxed);
    atomic_store_explicit(&entry->sequence, sequence | 1U, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    atomic_store_explicit(&entry->state, (uint32_t)copy->state, memory_order_relaxed);
    atomic_store_explicit(&entry->slot, copy->slot, memory_order_relaxed);
    atomic_store_explicit(&entry->extent, copy->extent, memory_order_relaxed);
    atomic_store_explicit(&entry->generation, copy->generation, memory_order_relaxed);
    atomic_store_explicit(&entry->parent_tag, copy->parent_tag, memory_order_relaxed);
    for (unsigned word = 0; word < 4; word++) {
        atomic_store_explicit(&entry->key[word], copy->key[word], memory_order_relaxed);
    }
    atomic_store_explicit(&entry->sequence, (sequence | 1U) + 1U, memory_order_release);
}

/**
 * Find a key in an index that another process may be writing.
 *
 * @param index     [capacity] entries
 * @param capacity  a power of two
 * @param key       32 bytes
 * @param copy_out  written when found
 * @return position of the entry, or KVIST_ENTRY_NONE
 *
 * Thread: any.  Blocks: no.  Cost: one cache line for most keys, KVIST_INDEX_PROBE_MAX at most.
 */
static inline uint32_t kvist_index_find(const struct kvist_index_entry *index,
                                        uint32_t capacity,
                                        uint64_t seed,
                                        const uint8_t key[KVIST_KEY_BYTES],
                                        struct kvist_entry_copy *copy_out)
{
    uint64_t words[4];
    memcpy(words, key, KVIST_KEY_BYTES);
    uint32_t position = kvist_index_home(words, seed, capacity);
    for (unsigned probe = 0; probe < KVIST_INDEX_PROBE_MAX; probe++) {
        const struct kvist_index_entry *entry = &index[position];
        uint32_t state = atomic_load_explicit(&entry->state, memory_order_relaxed);
        if (state == KVIST_ENTRY_EMPTY) {
            return KVIST_ENTRY_NONE;
        }
        if (state != KVIST_ENTRY_TOMBSTONE &&
            atomic_load_explicit(&entry->key[0], memory_order_relaxed) == words[0]) {
            struct kvist_entry_copy copy;
            if (kvist_entry_read(entry, &copy) && copy.state >= KVIST_ENTRY_READY &&
                memcmp(copy.key, words, KVIST_KEY_BYTES) == 0) {
                *copy_out = copy;
                return position;
            }
        }
        position = (position + 1) & (capacity - 1);
    }
    return KVIST_ENTRY_NONE;
}

/** The fence that both sides of a lease need; see the protocol above. */
static inline void kvist_lease_fence(void)
{
    atomic_thread_fence(memory_order_seq_cst);
}

#endif
