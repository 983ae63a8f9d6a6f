/*
 * adopt - taking over what an earlier store has left.
 *
 * Role        finds the roster among the kept fds, checks everything that a living process may
 *             still use, and builds pools, sessions and slots from it; or lets all of it go.
 * Believed    the roster and the maps are written by daemons alone, but checked like a peer's;
 *             of a session page nothing but what page.c reads anyway, with the geometry that the
 *             roster knows.
 * A slot is   READY when it and exactly one whole index entry name each other, in the slot's and in
 *             the pool's generation; else RETIRED, free once no lease names it, when an entry names
 *             it all the same; else GRANTED when the map says so and its session lives; else FREE
 *             when the map says so; else RETIRED
 * Kills       what a reader could find is READY by that rule at every moment, but for what is being
 *             dropped: a slot says READY before an entry names it, a READY entry is not written
 *             again but to hide it, slots are raised to a generation before their pool is. A map says
 *             `moved` when the next one is complete and safe, and until then it is the right one
 * Not kept    what the daemon had not seen stored when it died: a process, or a session by its page,
 *             or a pool by its map. Dropped alone if nobody concerned was lent a segment, for then
 *             nobody has mapped one (session.c); else everything is let go
 * NVMe        entries of blocks that are on NVMe are dropped, and come back when the tier reads its
 *             index: so none is believed that the tier does not have
 * Cost        O(slots + index); no block is touched
 */
#include "proto/base/clock.h"
#include "proto/shm/memfd.h"
#include "storage/internal.h"
#include "storage/kept.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define CLASHED (KVIST_ENTRY_NONE - 1) /* as slot.entry: two entries named it */

struct adopter {
    struct kvist_store *store;
    struct kvist_kept kept;
    bool lives[KVIST_SESSIONS_MAX][KVIST_PROCESSES_MAX];
    bool session_lives[KVIST_SESSIONS_MAX];
};

static enum kvist_status refuse(struct kvist_error *err, const char *what)
{
    return kvist_error_set(err, KVIST_CORRUPT, 0, "adopt", "%s", what);
}

/* --- Checks ---------------------------------------------------------------------------------- */

static uint32_t word(const _Atomic uint32_t *at)
{
    return atomic_load_explicit(at, memory_order_relaxed);
}

static bool is_text(const char *text, size_t size)
{
    return memchr(text, '\0', size) != NULL;
}

static const struct kvist_roster_pool *pool_record(const struct kvist_roster *roster,
                                                   uint32_t serial)
{
    for (uint32_t index = 0; serial != 0 && index < KVIST_POOLS_MAX; index++) {
        if (word(&roster->pools[index].serial) == serial) {
            return &roster->pools[index];
        }
    }
    return NULL;
}

/* A process, a page or a map that was not kept was never safe, and segments are lent only when they
   are: so who has mapped one is known, and is not passed over. */
static bool may_map(const struct kvist_roster_process *process)
{
    return word(&process->lent) != 0;
}

/* Find out which processes live. One that cannot be watched is dropped; it connects again. */
static enum kvist_status
check_processes(struct adopter *adopter, uint32_t index, struct kvist_error *err)
{
    const struct kvist_roster_session *session = &adopter->store->roster->sessions[index];
    uint32_t ranks = 0;
    uint32_t schedulers = 0;
    for (uint32_t place = 0; place < KVIST_PROCESSES_MAX; place++) {
        const struct kvist_roster_process *process = &session->processes[place];
        if (word(&process->serial) == 0) {
            continue;
        }
        uint32_t serial = word(&process->serial);
        struct pollfd ended = {.fd = kvist_kept_look(&adopter->kept, KVIST_KEPT_PIDFD, serial),
                               .events = POLLIN};
        if (!kvist_kept_is_pidfd(ended.fd, process->pid, process->inode) ||
            poll(&ended, 1, 0) < 0) {
            if (may_map(process)) {
                return refuse(err, "a process cannot be watched, for its pidfd was not kept");
            }
            adopter->store->adoption.processes_dropped++;
            continue;
        }
        if (ended.revents != 0) {
            continue;
        }
        uint32_t rank = process->maps_segments != 0 ? 1U << (process->rank % 32) : 0;
        if ((process->maps_segments != 0 && process->rank >= session->rank_count) ||
            (ranks & rank) != 0 || (schedulers > 0 && process->schedules != 0)) {
            return refuse(err, "two processes of a session are in one place");
        }
        ranks |= rank;
        schedulers += process->schedules != 0;
        adopter->lives[index][place] = true;
        adopter->session_lives[index] = true;
    }
    return KVIST_OK;
}

static bool is_attached(const struct adopter *adopter, uint32_t index, uint32_t ordinal)
{
    const struct kvist_roster_session *session = &adopter->store->roster->sessions[index];
    bool attached = false;
    for (uint32_t place = 0; place < KVIST_PROCESSES_MAX; place++) {
        attached = attached || (adopter->lives[index][place] &&
                                (word(&session->processes[place].loans) & (1U << ordinal)) != 0);
    }
    return attached;
}

/* Its page was not kept. */
static enum kvist_status
drop_session(struct adopter *adopter, uint32_t index, struct kvist_error *err)
{
    const struct kvist_roster_session *session = &adopter->store->roster->sessions[index];
    for (uint32_t place = 0; place < KVIST_PROCESSES_MAX; place++) {
        if (adopter->lives[index][place] && may_map(&session->processes[place])) {
            return refuse(err, "the page of a living session was not kept");
        }
        adopter->store->adoption.processes_dropped += adopter->lives[index][place];
        adopter->lives[index][place] = false;
    }
    adopter->session_lives[index] = false;
    return KVIST_OK;
}

static enum kvist_status
check_session(struct adopter *adopter, uint32_t index, struct kvist_error *err)
{
    const struct kvist_roster *roster = adopter->store->roster;
    const struct kvist_roster_session *session = &roster->sessions[index];
    if (session->rank_count == 0 || session->rank_count > KVIST_RANKS_MAX ||
        !is_text(session->about.tenant, sizeof(session->about.tenant)) ||
        !is_text(session->about.name, sizeof(session->about.name))) {
        return refuse(err, "the record of a session is broken");
    }
    enum kvist_status status = check_processes(adopter, index, err);
    if (status != KVIST_OK || !adopter->session_lives[index]) {
        return status;
    }
    if (kvist_kept_look(&adopter->kept, KVIST_KEPT_PAGE, word(&session->serial)) < 0) {
        return drop_session(adopter, index, err);
    }
    for (uint32_t ordinal = 0; ordinal < KVIST_SESSION_POOLS_MAX; ordinal++) {
        uint32_t pool = session->attachments[ordinal].pool_serial;
        if (!is_attached(adopter, index, ordinal)) {
            continue;
        }
        bool twice = false;
        for (uint32_t other = 0; other < ordinal; other++) {
            twice = twice || (is_attached(adopter, index, other) &&
                              session->attachments[other].pool_serial == pool);
        }
        if (twice || word(&session->attachments[ordinal].serial) == 0 ||
            pool_record(roster, pool) == NULL) {
            return refuse(err, "a living session has a pool open that is not known");
        }
    }
    return KVIST_OK;
}

/* A living process may have mapped a segment of it. */
static bool is_needed(const struct adopter *adopter, uint32_t pool_serial)
{
    uint32_t needs = 0;
    for (uint32_t index = 0; index < KVIST_SESSIONS_MAX; index++) {
        const struct kvist_roster_session *session = &adopter->store->roster->sessions[index];
        for (uint32_t ordinal = 0;
             adopter->session_lives[index] && ordinal < KVIST_SESSION_POOLS_MAX;
             ordinal++) {
            for (uint32_t place = 0; place < KVIST_PROCESSES_MAX; place++) {
                const struct kvist_roster_process *process = &session->processes[place];
                needs += adopter->lives[index][place] &&
                         session->attachments[ordinal].pool_serial == pool_serial &&
                         (word(&process->loans) & word(&process->lent) & 1U << ordinal) != 0;
            }
        }
    }
    return needs > 0;
}

/* It is dropped: who had it open opens it again, as another one. */
static void detach_all(const struct adopter *adopter, uint32_t pool_serial)
{
    for (uint32_t index = 0; index < KVIST_SESSIONS_MAX; index++) {
        struct kvist_roster_session *session = &adopter->store->roster->sessions[index];
        for (uint32_t ordinal = 0; ordinal < KVIST_SESSION_POOLS_MAX; ordinal++) {
            for (uint32_t place = 0; session->attachments[ordinal].pool_serial == pool_serial &&
                                     place < KVIST_PROCESSES_MAX;
                 place++) {
                (void)atomic_fetch_and(&session->processes[place].loans, ~(1U << ordinal));
            }
        }
    }
}

/* --- Pools ----------------------------------------------------------------------------------- */

/* Map the pool's present map: the one that is not `moved`. */
static enum kvist_status open_map(const struct adopter *adopter,
                                  const struct kvist_roster_pool *record,
                                  struct kvist_map *map_out,
                                  struct kvist_error *err)
{
    const uint64_t arena = adopter->store->roster->instance;
    uint32_t serial = word(&record->map_serial);
    int fd = kvist_kept_look(&adopter->kept, KVIST_KEPT_MAP, serial);
    struct kvist_map map = {.fd = -1};
    enum kvist_status status = fd >= 0 ? kvist_map_adopt(fd, arena, serial, &map, err)
                                       : refuse(err, "a pool map was not kept");
    if (status == KVIST_OK && word(&map.header->moved) != 0) {
        map.fd = -1; /* stays the adopter's */
        kvist_map_fini(&map);
        serial = word(&record->next_map_serial);
        fd = kvist_kept_look(&adopter->kept, KVIST_KEPT_MAP, serial);
        status = fd >= 0 ? kvist_map_adopt(fd, arena, serial, &map, err)
                         : refuse(err, "a pool's next map was not kept");
    }
    if (status != KVIST_OK) {
        return status;
    }
    if (word(&map.header->moved) != 0 || map.header->slot_bytes != record->about.slot_bytes ||
        memcmp(map.header->pool_id, record->about.pool_id, KVIST_KEY_BYTES) != 0) {
        map.fd = -1;
        kvist_map_fini(&map);
        return refuse(err, "a pool map is another one than is noted");
    }
    *map_out = map;
    return KVIST_OK;
}

/* A segment that the map tells of, LIVE or REVOKED. NOT_FOUND: there is none. */
static enum kvist_status adopt_segment(struct adopter *adopter,
                                       struct kvist_store_pool *pool,
                                       uint32_t index,
                                       struct kvist_error *err)
{
    const struct kvist_segment_entry *entry = &pool->map.segments[index];
    uint32_t state = word(&entry->state);
    uint32_t serial = word(&entry->serial);
    if ((state != KVIST_SEGMENT_LIVE && state != KVIST_SEGMENT_REVOKED) || serial == 0) {
        return KVIST_NOT_FOUND;
    }
    int fd = kvist_kept_look(&adopter->kept, KVIST_KEPT_SEGMENT, serial);
    if (fd < 0) {
        return refuse(err, "a segment was not kept");
    }
    enum kvist_status status = kvist_memfd_check_own(fd, pool->segment_bytes, err);
    if (status == KVIST_OK) {
        status = kvist_arena_adopt(pool, index, serial, fd);
    }
    if (status == KVIST_OK) {
        kvist_kept_take(&adopter->kept, KVIST_KEPT_SEGMENT, serial);
    }
    return status;
}

/* A slot of a later generation than its pool's is of this one: the old store died while it raised
   both, and the slots come first. */
static bool is_current(const struct kvist_store_pool *pool, const struct kvist_slot_entry *slot)
{
    return atomic_load_explicit(&slot->pool_generation, memory_order_relaxed) >=
           pool->about.generation;
}

/* Whether entry and slot name each other, in the pool's present generation. */
static bool is_published(const struct kvist_store_pool *pool,
                         uint32_t position,
                         const struct kvist_entry_copy *entry)
{
    const struct kvist_slot_entry *slot = &pool->map.slots[entry->slot];
    uint64_t block_bytes = kvist_slot_block_bytes(pool, entry->slot);
    return word(&slot->state) == KVIST_SLOT_READY && word(&slot->entry) == position &&
           kvist_slot_generation(pool, entry->slot) == entry->generation &&
           is_current(pool, slot) && block_bytes > 0 && block_bytes <= pool->about.slot_bytes;
}

/* A slot that an entry names and that is not READY by it may be leased: CLASHED, it retires. */
static bool keep_entry(void *ctx, uint32_t position, const struct kvist_entry_copy *entry)
{
    struct kvist_store_pool *pool = ctx;
    uint64_t *dropped = &pool->store->adoption.blocks_dropped;
    if (entry->state != KVIST_ENTRY_READY) {
        return false;
    }
    if (entry->slot >= pool->slot_max ||
        kvist_slot_segment(pool, entry->slot)->life != KVIST_LIFE_LIVE) {
        (*dropped)++;
        return false;
    }
    struct kvist_slot *slot = &pool->slots[entry->slot];
    if (slot->entry == KVIST_ENTRY_NONE && is_published(pool, position, entry)) {
        slot->entry = position;
        return true;
    }
    if (slot->entry < CLASHED) { /* whose bytes are these? */
        kvist_map_remove(&pool->map, slot->entry);
        (*dropped)++;
    }
    slot->entry = CLASHED;
    (*dropped)++;
    return false;
}

static void forget_entries(struct kvist_store_pool *pool, uint32_t segment)
{
    uint32_t first = segment * pool->slots_per_segment;
    for (uint32_t slot = first; slot < first + pool->slots_per_segment; slot++) {
        pool->slots[slot].entry = KVIST_ENTRY_NONE;
    }
}

/* Its segment is lost: in the next one that takes the place it begins as in any. */
static void reset_slots(struct kvist_store_pool *pool, uint32_t segment)
{
    uint32_t first = segment * pool->slots_per_segment;
    for (uint32_t slot = first; slot < first + pool->slots_per_segment; slot++) {
        struct kvist_slot_entry *entry = &pool->map.slots[slot];
        atomic_store_explicit(&entry->flags, 0, memory_order_relaxed);
        atomic_store_explicit(&entry->reservation, 0, memory_order_relaxed);
        atomic_store_explicit(&entry->state, KVIST_SLOT_FREE, memory_order_release);
    }
}

static enum kvist_status fill_pool(struct adopter *adopter,
                                   struct kvist_store_pool *pool,
                                   bool needed,
                                   struct kvist_error *err)
{
    pool->about.generation =
        atomic_load_explicit(&pool->map.header->generation, memory_order_relaxed);
    pool->epoch = 1; /* that of slots from before a clear is 0 */
    pool->adopted = adopter->store->options.tier != NULL;
    for (uint32_t index = 0; index < pool->segment_max; index++) {
        enum kvist_status status = adopt_segment(adopter, pool, index, err);
        if (status == KVIST_OK) {
            forget_entries(pool, index);
        } else if (status != KVIST_NOT_FOUND && needed) {
            return status; /* somebody has it mapped */
        } else if (status != KVIST_NOT_FOUND) {
            reset_slots(pool, index);
        }
        if (status != KVIST_OK) {
            struct kvist_segment_entry *entry = &pool->map.segments[index];
            atomic_store_explicit(&entry->serial, 0, memory_order_relaxed);
            atomic_store_explicit(&entry->state, KVIST_SEGMENT_NONE, memory_order_release);
        }
    }
    adopter->store->adoption.blocks_dropped += kvist_map_sift(&pool->map, keep_entry, pool);
    return KVIST_OK;
}

static enum kvist_status
adopt_pool(struct adopter *adopter, uint32_t index, struct kvist_error *err)
{
    struct kvist_store *store = adopter->store;
    const struct kvist_roster_pool *record = &store->roster->pools[index];
    bool needed = is_needed(adopter, word(&record->serial));
    struct kvist_map map;
    enum kvist_status status =
        !is_text(record->about.tenant, sizeof(record->about.tenant)) ||
                !is_text(record->about.description, sizeof(record->about.description))
            ? refuse(err, "the record of a pool is broken")
            : open_map(adopter, record, &map, err);
    if (status == KVIST_OK) {
        status = kvist_pool_adopt(store, &record->about, index, word(&record->serial), &map);
        if (status == KVIST_OK) {
            kvist_kept_take(&adopter->kept, KVIST_KEPT_MAP, map.serial);
            kvist_roster_moved(store->pools[index]);
            return fill_pool(adopter, store->pools[index], needed, err);
        }
        map.fd = -1;
        kvist_map_fini(&map);
    }
    if (needed || status == KVIST_NO_MEMORY) {
        return status;
    }
    detach_all(adopter, word(&record->serial));
    store->adoption.pools_dropped++;
    atomic_store_explicit(&store->roster->pools[index].serial, 0, memory_order_release);
    return KVIST_OK;
}

/* --- Sessions -------------------------------------------------------------------------------- */

/* maps: it may have mapped whatever exists of the pool. */
static enum kvist_status
lend_again(struct kvist_store_process *process, uint32_t ordinal, bool maps)
{
    struct kvist_store_pool *pool = process->session->attachments[ordinal].pool;
    struct kvist_loan *loan = &process->loans[ordinal];
    enum kvist_status status = kvist_session_make_loan(loan, pool);
    if (status != KVIST_OK) {
        return status;
    }
    for (uint32_t index = 0; maps && index < pool->segment_max; index++) {
        struct kvist_segment *segment = &pool->segments[index];
        if (segment->life != KVIST_LIFE_NONE) {
            loan->lent[index] = segment->serial;
            segment->lent_count++;
        }
    }
    return KVIST_OK;
}

static enum kvist_status adopt_attachment(struct kvist_store_session *session, uint32_t ordinal)
{
    struct kvist_store *store = session->store;
    const struct kvist_roster_attachment *record =
        &store->roster->sessions[session->index].attachments[ordinal];
    struct kvist_store_pool *pool = NULL;
    for (uint32_t index = 0; index < store->pool_high; index++) {
        if (store->pools[index] != NULL && store->pools[index]->serial == record->pool_serial) {
            pool = store->pools[index];
        }
    }
    if (pool == NULL) {
        return KVIST_CORRUPT;
    }
    struct kvist_attachment attachment = {
        .pool = pool,
        .serial = word(&record->serial),
        .writes = word(&record->writes) != 0,
        .window_us = store->now_us,
        .mapped = calloc(pool->segment_room, sizeof(attachment.mapped[0])),
    };
    if (attachment.mapped == NULL) {
        return KVIST_NO_MEMORY;
    }
    session->attachments[ordinal] = attachment;
    session->attachment_count++;
    pool->session_count++;
    pool->writer_count += attachment.writes;
    store->writer_count += attachment.writes;
    return KVIST_OK;
}

static enum kvist_status
adopt_process(struct adopter *adopter, struct kvist_store_session *session, uint32_t place)
{
    struct kvist_store *store = adopter->store;
    const struct kvist_roster_process *record =
        &store->roster->sessions[session->index].processes[place];
    struct kvist_store_process *process = calloc(1, sizeof(*process));
    if (process == NULL) {
        return KVIST_NO_MEMORY;
    }
    process->magic = PROCESS_MAGIC;
    process->index = place;
    process->serial = word(&record->serial);
    process->session = session;
    process->pidfd = kvist_kept_look(&adopter->kept, KVIST_KEPT_PIDFD, process->serial);
    process->schedules = record->schedules != 0;
    process->maps_segments = record->maps_segments != 0;
    process->rank = record->rank;
    kvist_kept_take(&adopter->kept, KVIST_KEPT_PIDFD, process->serial);
    session->processes[place] = process;
    store->process_count++;
    enum kvist_status status = KVIST_OK;
    for (uint32_t ordinal = 0; ordinal < KVIST_SESSION_POOLS_MAX && status == KVIST_OK; ordinal++) {
        if ((word(&record->loans) & (1U << ordinal)) != 0) {
            bool lent = (word(&record->lent) & (1U << ordinal)) != 0;
            status = lend_again(process, ordinal, process->maps_segments && lent);
        }
    }
    return status;
}

static enum kvist_status
adopt_session(struct adopter *adopter, uint32_t index, struct kvist_error *err)
{
    struct kvist_store *store = adopter->store;
    struct kvist_roster_session *record = &store->roster->sessions[index];
    struct kvist_store_session *session =
        kvist_session_make(store, record->id, word(&record->serial));
    if (session == NULL) {
        return KVIST_NO_MEMORY;
    }
    int fd = kvist_kept_look(&adopter->kept, KVIST_KEPT_PAGE, session->serial);
    enum kvist_status status = kvist_page_adopt(fd, record->rank_count, &session->page, err);
    if (status != KVIST_OK) {
        free(session);
        return status;
    }
    kvist_kept_take(&adopter->kept, KVIST_KEPT_PAGE, session->serial);
    session->index = index;
    session->adopted = true;
    session->about = record->about;
    store->sessions[index] = session;
    store->session_count++;
    for (uint32_t ordinal = 0; ordinal < KVIST_SESSION_POOLS_MAX && status == KVIST_OK; ordinal++) {
        if (is_attached(adopter, index, ordinal)) {
            status = adopt_attachment(session, ordinal);
        } else {
            kvist_roster_drop_attachment(session, ordinal);
        }
    }
    for (uint32_t place = 0; place < KVIST_PROCESSES_MAX && status == KVIST_OK; place++) {
        if (adopter->lives[index][place]) {
            status = adopt_process(adopter, session, place);
        } else {
            atomic_store_explicit(&record->processes[place].serial, 0, memory_order_release);
        }
    }
    return status;
}

/* --- Slots ----------------------------------------------------------------------------------- */

/* Give a granted slot to the session that the map names, if it may have it. */
static bool claim(struct kvist_store_pool *pool, uint32_t slot)
{
    struct kvist_store *store = pool->store;
    const struct kvist_slot_entry *entry = &pool->map.slots[slot];
    uint64_t reservation = atomic_load_explicit(&entry->reservation, memory_order_relaxed);
    uint32_t ticket = word(&entry->ticket);
    uint32_t index = word(&entry->session);
    struct kvist_store_session *session =
        index < KVIST_SESSIONS_MAX ? store->sessions[index] : NULL;
    uint32_t ordinal = 0;
    while (session != NULL && ordinal < KVIST_SESSION_POOLS_MAX &&
           session->attachments[ordinal].pool != pool) {
        ordinal++;
    }
    if (session == NULL || ordinal == KVIST_SESSION_POOLS_MAX || ticket >= KVIST_GRANTS_MAX ||
        session->tickets[ticket].slot != KVIST_SLOT_NONE ||
        !kvist_roster_reserved(store, reservation)) {
        return false;
    }
    session->tickets[ticket] = (struct kvist_ticket){.slot = slot, .ordinal = (uint8_t)ordinal};
    session->granted_count++;
    session->attachments[ordinal].granted_count++;
    session->attachments[ordinal].wants_before++; /* it goes on as it was */
    struct kvist_slot *info = &pool->slots[slot];
    info->reservation = reservation;
    info->ticket = (uint16_t)ticket;
    info->session = (uint16_t)index;
    return true;
}

static enum kvist_slot_state judge_slot(struct kvist_store_pool *pool, uint32_t slot)
{
    struct kvist_slot *info = &pool->slots[slot];
    struct kvist_slot_entry *entry = &pool->map.slots[slot];
    uint32_t state = word(&entry->state);
    info->epoch = pool->epoch - 1;
    if (is_current(pool, entry)) {
        info->epoch = pool->epoch;
        atomic_store_explicit(
            &entry->pool_generation, pool->about.generation, memory_order_relaxed);
    }
    info->next = KVIST_SLOT_NONE;
    if (info->entry < CLASHED) {
        return KVIST_SLOT_READY;
    }
    if (info->entry == CLASHED) {
        info->entry = KVIST_ENTRY_NONE;
        return KVIST_SLOT_RETIRED;
    }
    if (state == KVIST_SLOT_GRANTED && claim(pool, slot)) {
        return KVIST_SLOT_GRANTED;
    }
    return state == KVIST_SLOT_FREE ? KVIST_SLOT_FREE : KVIST_SLOT_RETIRED;
}

/* Its segments cannot fill the arena; those of a new pool would be larger. */
static bool is_bound(const struct kvist_store_pool *pool)
{
    const struct kvist_store *store = pool->store;
    uint64_t room_bytes = pool->segment_room * pool->segment_bytes;
    return room_bytes + pool->segment_bytes <= store->options.arena_bytes &&
           pool->segment_bytes < kvist_pool_segment_bytes(store, pool->about.slot_bytes);
}

static void adopt_slots(struct kvist_store_pool *pool)
{
    struct kvist_adoption *adoption = &pool->store->adoption;
    for (uint32_t index = 0; index < pool->segment_max; index++) {
        struct kvist_segment *segment = &pool->segments[index];
        if (segment->life == KVIST_LIFE_REVOKED && segment->lent_count == 0) {
            kvist_arena_end_revoked(pool, segment);
        }
        if (segment->life == KVIST_LIFE_NONE) {
            continue;
        }
        adoption->segments++;
        if (segment->life != KVIST_LIFE_LIVE) {
            continue;
        }
        /* From the last to the first: free slots are handed out in the order of addresses. */
        uint32_t first = index * pool->slots_per_segment;
        for (uint32_t left = pool->slots_per_segment; left > 0; left--) {
            uint32_t slot = first + left - 1;
            kvist_slot_adopt(pool, slot, judge_slot(pool, slot));
        }
    }
    adoption->pools++;
    adoption->pools_bound += is_bound(pool);
    adoption->blocks += pool->counts[KVIST_SLOT_READY];
    adoption->bytes += pool->block_bytes_ready;
}

static void list_free_tickets(struct kvist_store_session *session)
{
    session->ticket_free_count = 0;
    for (uint32_t left = KVIST_GRANTS_MAX; left > 0; left--) {
        if (session->tickets[left - 1].slot == KVIST_SLOT_NONE) {
            session->ticket_free[session->ticket_free_count++] = (uint16_t)(left - 1);
        }
    }
}

/* --- All of it ------------------------------------------------------------------------------- */

static enum kvist_status build(struct adopter *adopter, struct kvist_error *err)
{
    struct kvist_store *store = adopter->store;
    struct kvist_roster *roster = store->roster;
    enum kvist_status status = KVIST_OK;
    for (uint32_t index = 0; index < KVIST_SESSIONS_MAX && status == KVIST_OK; index++) {
        if (word(&roster->sessions[index].serial) != 0) {
            status = check_session(adopter, index, err);
        }
    }
    for (uint32_t index = 0; index < KVIST_POOLS_MAX && status == KVIST_OK; index++) {
        if (word(&roster->pools[index].serial) != 0) {
            status = adopt_pool(adopter, index, err);
        }
    }
    for (uint32_t index = 0; index < KVIST_SESSIONS_MAX && status == KVIST_OK; index++) {
        if (adopter->session_lives[index]) {
            status = adopt_session(adopter, index, err);
            store->adoption.sessions++;
        } else {
            memset(&roster->sessions[index], 0, sizeof(roster->sessions[index]));
        }
    }
    for (uint32_t index = 0; index < store->pool_high && status == KVIST_OK; index++) {
        if (store->pools[index] != NULL) {
            adopt_slots(store->pools[index]);
            status = kvist_adopt_order(store->pools[index]);
        }
    }
    for (uint32_t index = 0; index < KVIST_SESSIONS_MAX && status == KVIST_OK; index++) {
        if (store->sessions[index] != NULL) {
            list_free_tickets(store->sessions[index]);
        }
    }
    return status;
}

/* Attachments that no process has come to. */
static void settle_all(struct kvist_store_session *session)
{
    for (uint32_t ordinal = 0; ordinal < KVIST_SESSION_POOLS_MAX; ordinal++) {
        if (session->attachments[ordinal].pool != NULL) {
            kvist_session_settle(session, ordinal);
        }
    }
}

/* Take down what was built, with no effect on what is shared. */
static void unbuild(struct kvist_store *store)
{
    kvist_store_make_private(store);
    store->left = true;
    for (uint32_t index = 0; index < KVIST_SESSIONS_MAX; index++) {
        struct kvist_store_session *session = store->sessions[index];
        if (session != NULL) {
            list_free_tickets(session);
            settle_all(session);
        }
        kvist_store_session_close(&store->sessions[index]);
    }
    for (uint32_t index = 0; index < KVIST_POOLS_MAX; index++) {
        kvist_pool_destroy(&store->pools[index]);
    }
    store->pool_high = 0;
    store->left = false;
    kvist_roster_fini(store);
}

static enum kvist_status adopt_all(struct adopter *adopter, struct kvist_error *err)
{
    struct kvist_store *store = adopter->store;
    int fd = kvist_kept_look(&adopter->kept, KVIST_KEPT_ROSTER, 0);
    enum kvist_status status =
        fd >= 0 ? kvist_roster_adopt(store, fd, err) : refuse(err, "the roster was not kept");
    if (status != KVIST_OK) {
        return status;
    }
    struct kvist_roster *roster = store->roster;
    kvist_kept_take(&adopter->kept, KVIST_KEPT_ROSTER, 0);
    store->adoption.files_mistaken = kvist_kept_check(&adopter->kept, roster->instance);
    uint32_t adopts = word(&roster->adopts) + 1;
    atomic_store_explicit(&roster->adopts, adopts, memory_order_release);
    status = adopts > KVIST_ADOPTS_MAX ? refuse(err, "earlier daemons died while they adopted it")
                                       : build(adopter, err);
    if (status != KVIST_OK) {
        unbuild(store);
        return status;
    }
    store->adoption.arena_bytes = roster->arena_bytes;
    roster->arena_bytes = store->options.arena_bytes;
    store->adopted_bytes = store->used_bytes;
    store->adoption.adopted = true;
    return KVIST_OK;
}

/* Why nothing was taken over. */
static void note_refusal(struct kvist_store *store, const struct kvist_error *why)
{
    struct kvist_adoption adoption = {.files_mistaken = store->adoption.files_mistaken};
    (void)snprintf(adoption.why,
                   sizeof(adoption.why),
                   "%.110s",
                   why->text[0] != '\0' ? why->text : "no memory");
    store->adoption = adoption;
}

enum kvist_status kvist_adopt(struct kvist_store *store, struct kvist_error *err)
{
    uint64_t began_us = kvist_clock_now_us();
    struct kvist_error why = KVIST_ERROR_INIT;
    if (store->options.kept_count > 0) {
        struct adopter *adopter = calloc(1, sizeof(*adopter));
        if (adopter == NULL || !kvist_kept_init(&adopter->kept, &store->options)) {
            free(adopter);
            return kvist_error_set(err, KVIST_NO_MEMORY, 0, "store", "no memory to adopt");
        }
        adopter->store = store;
        uint64_t bytes = kvist_kept_segment_bytes(&adopter->kept);
        if (adopt_all(adopter, &why) != KVIST_OK) {
            note_refusal(store, &why);
            kvist_kept_untake(&adopter->kept);
        }
        store->adoption.released_bytes = kvist_kept_release(&adopter->kept, &store->options);
        if (!store->adoption.adopted) {
            store->adoption.released_bytes = bytes; /* those that were taken at first, too */
        }
        kvist_kept_fini(&adopter->kept);
        free(adopter);
    }
    store->options.kept = NULL;
    store->adoption.released_bytes += store->options.let_go_bytes;
    store->adoption.took_us = kvist_clock_now_us() - began_us;
    return store->adoption.adopted ? KVIST_OK : kvist_roster_create(store, err);
}

void kvist_adopt_settle(struct kvist_store_pool *pool, const struct kvist_tier_pool *about)
{
    pool->adopted = false;
    if (kvist_roster_is_cleared(pool) && about->generation >= pool->about.generation) {
        kvist_pool_set_generation(pool, about->generation + 1); /* the clear is the later one */
    } else if (about->generation > pool->about.generation) {
        /* Cleared since these blocks were committed. */
        kvist_block_unpublish_all(pool);
        pool->epoch++;
        kvist_pool_set_generation(pool, about->generation);
    }
    pool->tier_knows = about->generation == pool->about.generation;
    pool->put_wanted = !pool->tier_knows;
}

void kvist_store_adoption(const struct kvist_store *store, struct kvist_adoption *adoption_out)
{
    *adoption_out = store->adoption;
}
