/*
 * grant - slots that a session is given ahead of need.
 *
 * Role        how many a writer may hold, topping them up, saying them again, calling them back.
 * Invariants  granted_count == tickets in use == GRANTED slots that name the session
 */
#include "storage/internal.h"

#define WINDOW_US       30000000U /* use is remembered for one to two of these */
#define IDLE_PART       64U
#define REST_US         1000000U
#define RECALL_EVERY_US 1000000U
#define RECALL_WAIT_US  50000U /* nothing is evicted meanwhile unless slots are critical */

void kvist_grant_end(struct kvist_store_session *session, uint32_t ticket)
{
    struct kvist_ticket *entry = &session->tickets[ticket];
    KVIST_CHECK(entry->slot != KVIST_SLOT_NONE);
    session->attachments[entry->ordinal].granted_count--;
    session->granted_count--;
    entry->slot = KVIST_SLOT_NONE;
    session->ticket_free[session->ticket_free_count++] = (uint16_t)ticket;
}

/* --- How many --------------------------------------------------------------------------------- */

void kvist_grant_begin(struct kvist_attachment *attachment, uint64_t now_us)
{
    attachment->wants_before = KVIST_GRANT_START;
    attachment->window_us = now_us;
    attachment->fresh_count = KVIST_GRANT_START;
}

/* As many as the pool may have; it may be of a time when the arena was larger. */
static uint32_t slots_of(const struct kvist_store_pool *pool, uint64_t bytes)
{
    uint64_t slots = bytes / pool->about.slot_bytes;
    return slots < pool->slot_max ? (uint32_t)slots : pool->slot_max;
}

/* Of the arena, or of its tenant's quota. */
static uint32_t slots_of_tenant(const struct kvist_store_pool *pool)
{
    uint64_t bytes = pool->store->options.arena_bytes;
    uint64_t quota = pool->tenant->limits.memory_bytes_max;
    return slots_of(pool, quota != 0 && quota < bytes ? quota : bytes);
}

static uint32_t writers_of_tenant(const struct kvist_store_pool *pool)
{
    const struct kvist_store *store = pool->store;
    uint32_t count = 0;
    for (uint32_t index = 0; index < store->pool_high; index++) {
        const struct kvist_store_pool *other = store->pools[index];
        count += other != NULL && other->tenant == pool->tenant ? other->writer_count : 0;
    }
    return count;
}

/* Half of what each writer would get if the arena were shared out evenly among all and one more, and
   so of a quota among those of its tenant. */
static uint32_t half_share(const struct kvist_store_pool *pool)
{
    const struct kvist_store *store = pool->store;
    uint32_t share = slots_of(pool, store->options.arena_bytes) / (2 * (store->writer_count + 1));
    if (pool->tenant->limits.memory_bytes_max != 0) {
        uint32_t own = slots_of_tenant(pool) / (2 * (writers_of_tenant(pool) + 1));
        share = own < share ? own : share;
    }
    return share;
}

/* A small arena before a disk is a way to it: a writer that shares it with nobody may have as much
   of it as a beginner, so that prompts are stored whole, up to half. */
static uint32_t bound_alone(const struct kvist_store_session *session,
                            const struct kvist_store_pool *pool,
                            bool room)
{
    if (session->store->writer_count > 1 || session->store->tier == NULL) {
        return 0;
    }
    uint32_t half = (room ? slots_of_tenant(pool) : kvist_evict_slot_count(pool)) / 2;
    return half < KVIST_GRANT_START ? half : KVIST_GRANT_START;
}

/* While the arena has room, grants cost nothing: each writer may hold half of its share. Without room
   every grant takes the place of a block: half of the pool alone, at most an eighth beside other
   writers of it. */
static uint32_t grant_bound(const struct kvist_store_session *session, uint32_t ordinal, bool room)
{
    const struct kvist_store_pool *pool = session->attachments[ordinal].pool;
    uint32_t bound = half_share(pool);
    if (!room) {
        uint32_t slots = kvist_evict_slot_count(pool);
        uint32_t part = pool->writer_count <= 1 ? 2 : 8;
        part = pool->writer_count > 2 ? 4 * pool->writer_count : part;
        bound = slots / part < bound ? slots / part : bound;
    }
    uint32_t alone = bound_alone(session, pool, room);
    bound = bound < alone ? alone : bound;
    bound = bound < KVIST_GRANT_FLOOR ? KVIST_GRANT_FLOOR : bound;
    uint32_t tickets = KVIST_GRANTS_MAX / session->attachment_count;
    return bound < tickets ? bound : tickets;
}

/* What a writer is to hold now. Without room all that use nothing share 1/IDLE_PART of the arena;
   while memory must be given back, nobody has more than what keeps it going. */
static uint32_t wanted(const struct kvist_store_session *session, uint32_t ordinal)
{
    const struct kvist_attachment *attachment = &session->attachments[ordinal];
    if (kvist_evict_is_over(attachment->pool)) {
        return KVIST_GRANT_FLOOR;
    }
    bool room = kvist_evict_has_room(attachment->pool);
    uint32_t least = KVIST_GRANT_START;
    if (!room) {
        uint32_t idle =
            slots_of_tenant(attachment->pool) / (IDLE_PART * session->store->writer_count);
        least = idle < least ? idle : least;
        least = least < KVIST_GRANT_FLOOR ? KVIST_GRANT_FLOOR : least;
    }
    uint32_t wants =
        attachment->wants > attachment->wants_before ? attachment->wants : attachment->wants_before;
    wants = wants > least ? wants : least;
    uint32_t bound = grant_bound(session, ordinal, room);
    return wants < bound ? wants : bound;
}

void kvist_store_used(struct kvist_store_session *session, uint32_t pool, uint32_t used)
{
    KVIST_CHECK(session->magic == SESSION_MAGIC);
    if (kvist_session_pool(session, pool) == NULL) {
        return;
    }
    struct kvist_attachment *attachment = &session->attachments[pool];
    /* What was committed since the last turn could not be granted anew meanwhile. */
    used = used == 0 ? attachment->granted_count : used;
    used = used < KVIST_GRANTS_MAX ? used + attachment->turn_commits : used;
    /* Half more: a quarter is used up before a top-up. */
    uint32_t wants = used < KVIST_GRANTS_MAX ? used + used / 2 : KVIST_GRANTS_MAX;
    attachment->wants = wants > attachment->wants ? wants : attachment->wants;
}

void kvist_grant_committed(struct kvist_attachment *attachment)
{
    attachment->rests_until_us = 0;
    attachment->turn_commits++;
    if (attachment->fresh_count > 0 && --attachment->fresh_count == 0) {
        attachment->wants_before = 0; /* what it uses is known now */
    }
}

static void turn_window(struct kvist_attachment *attachment, uint64_t now_us)
{
    attachment->turn_commits = 0;
    if (now_us - attachment->window_us >= WINDOW_US) {
        attachment->window_us = now_us;
        attachment->wants_before = attachment->wants;
        attachment->wants = 0;
        attachment->fresh_count = 0;
    }
}

/* Ask for what one writer of the pool holds beyond what it is to hold; for all of it where memory
   must be given back, for one slot holds a segment. @return whether it may come */
static bool recall(struct kvist_store_session *session, uint32_t ordinal)
{
    struct kvist_store *store = session->store;
    struct kvist_attachment *attachment = &session->attachments[ordinal];
    struct kvist_store_process *scheduler = kvist_session_scheduler(session);
    if (!attachment->writes) {
        return false; /* without a writer in the store there is nothing to share */
    }
    uint32_t target = kvist_evict_is_over(attachment->pool) ? 0 : wanted(session, ordinal);
    if (scheduler == NULL || !scheduler->loans[ordinal].attached ||
        attachment->granted_count <= target + target / 4) {
        return false;
    }
    if (store->now_us >= attachment->recall_after_us) {
        attachment->recall_after_us = store->now_us + RECALL_EVERY_US;
        store->stats.recalls_total += attachment->granted_count - target;
        store->options.events.recalled(
            store->options.ctx, scheduler, ordinal, attachment->granted_count - target);
    }
    return store->now_us + RECALL_EVERY_US < attachment->recall_after_us + RECALL_WAIT_US;
}

bool kvist_grant_recall(struct kvist_store_pool *pool)
{
    const struct kvist_store *store = pool->store;
    bool coming = false;
    for (uint32_t index = 0; index < KVIST_SESSIONS_MAX; index++) {
        struct kvist_store_session *session = store->sessions[index];
        for (uint32_t ordinal = 0; session != NULL && ordinal < KVIST_SESSION_POOLS_MAX;
             ordinal++) {
            if (session->attachments[ordinal].pool == pool) {
                coming = recall(session, ordinal) || coming;
            }
        }
    }
    return coming;
}

/* --- Granting --------------------------------------------------------------------------------- */

static void give(struct kvist_store_session *session, uint32_t ordinal, uint32_t slot)
{
    struct kvist_store *store = session->store;
    struct kvist_attachment *attachment = &session->attachments[ordinal];
    struct kvist_store_pool *pool = attachment->pool;
    uint32_t ticket = session->ticket_free[--session->ticket_free_count];
    session->tickets[ticket] = (struct kvist_ticket){.slot = slot, .ordinal = (uint8_t)ordinal};
    struct kvist_slot *info = &pool->slots[slot];
    info->reservation = kvist_roster_reservation(store);
    info->ticket = (uint16_t)ticket;
    info->session = (uint16_t)session->index;
    struct kvist_slot_entry *entry = &pool->map.slots[slot];
    atomic_store_explicit(&entry->session, session->index, memory_order_relaxed);
    atomic_store_explicit(&entry->ticket, ticket, memory_order_relaxed);
    /* Last: a slot that is GRANTED without it was told to nobody. */
    atomic_store_explicit(&entry->reservation, info->reservation, memory_order_release);
    attachment->granted_count++;
    session->granted_count++;
    store->stats.grants_total++;
}

static struct kvist_store_grant grant_of(const struct kvist_store_session *session, uint32_t ticket)
{
    uint32_t slot = session->tickets[ticket].slot;
    const struct kvist_store_pool *pool =
        session->attachments[session->tickets[ticket].ordinal].pool;
    return (struct kvist_store_grant){
        .slot = slot, .ticket = ticket, .reservation = pool->slots[slot].reservation};
}

void kvist_grant_rest(struct kvist_store_session *session, uint32_t ordinal)
{
    session->attachments[ordinal].rests_until_us = session->store->now_us + REST_US;
}

/* All that is outstanding, to a scheduler that has attached anew. */
static void grant_again(struct kvist_store_process *process, uint32_t ordinal)
{
    struct kvist_store_session *session = process->session;
    struct kvist_store *store = session->store;
    process->loans[ordinal].regrant = false;
    uint32_t count = 0;
    for (uint32_t ticket = 0; ticket < KVIST_GRANTS_MAX; ticket++) {
        if (session->tickets[ticket].slot != KVIST_SLOT_NONE &&
            session->tickets[ticket].ordinal == ordinal) {
            store->grants[count++] = grant_of(session, ticket);
        }
    }
    if (count > 0) {
        store->options.events.granted(store->options.ctx, process, ordinal, store->grants, count);
    }
}

static void top_up(struct kvist_store_process *process, uint32_t ordinal)
{
    struct kvist_store_session *session = process->session;
    struct kvist_store *store = session->store;
    struct kvist_attachment *attachment = &session->attachments[ordinal];
    turn_window(attachment, store->now_us);
    if (store->now_us < attachment->rests_until_us) {
        return;
    }
    uint32_t target = wanted(session, ordinal);
    /* A quarter is used up before a message is worth sending; then they are filled up again, as
       fast as there are slots. */
    if (attachment->granted_count >= target) {
        attachment->filling = false;
    } else if (attachment->granted_count <= target - (target + 3) / 4) {
        attachment->filling = true;
    }
    if (!attachment->filling) {
        return;
    }
    uint32_t count = 0;
    while (attachment->granted_count < target && session->ticket_free_count > 0) {
        uint32_t slot = kvist_session_take_slot(session, ordinal, KVIST_SLOT_GRANTED);
        if (slot == KVIST_SLOT_NONE) {
            break;
        }
        give(session, ordinal, slot);
        store->grants[count++] = grant_of(session, attachment->pool->slots[slot].ticket);
    }
    if (count > 0) {
        store->options.events.granted(store->options.ctx, process, ordinal, store->grants, count);
    }
}

void kvist_grant_top_up(struct kvist_store_session *session)
{
    struct kvist_store_process *scheduler = kvist_session_scheduler(session);
    for (uint32_t ordinal = 0; scheduler != NULL && ordinal < KVIST_SESSION_POOLS_MAX; ordinal++) {
        if (!scheduler->loans[ordinal].attached || !session->attachments[ordinal].writes) {
            continue;
        }
        if (scheduler->loans[ordinal].regrant) {
            grant_again(scheduler, ordinal);
        }
        top_up(scheduler, ordinal);
    }
}
