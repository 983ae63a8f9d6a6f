/*
 * grant - slots that a session is given ahead of need.
 *
 * Role        how many a writer may hold, topping them up, saying them again.
 * Invariants  granted_count == tickets in use == GRANTED slots that name the session
 */
#include "storage/internal.h"

#define GRANT_RATE_US 1000000U /* a target used up faster than this is doubled */

void kvist_grant_end(struct kvist_store_session *session, uint32_t ticket)
{
    struct kvist_ticket *entry = &session->tickets[ticket];
    KVIST_CHECK(entry->slot != KVIST_SLOT_NONE);
    session->attachments[entry->ordinal].granted_count--;
    session->granted_count--;
    entry->slot = KVIST_SLOT_NONE;
    session->ticket_free[session->ticket_free_count++] = (uint16_t)ticket;
}

/* While the arena has room, grants cost nothing: each writer may hold half of what it would get if
   the arena were shared out evenly among all writers and one more. Without room every grant takes
   the place of a block: half of the pool alone, at most an eighth beside other writers of it. */
static uint32_t grant_bound(const struct kvist_store_session *session, uint32_t ordinal)
{
    const struct kvist_store_pool *pool = session->attachments[ordinal].pool;
    uint32_t bound = pool->slot_max / (2 * (session->store->writer_count + 1));
    if (!kvist_evict_has_room(pool)) {
        uint32_t slots = kvist_evict_slot_count(pool);
        uint32_t part = pool->writer_count <= 1 ? 2 : 8;
        part = pool->writer_count > 2 ? 4 * pool->writer_count : part;
        bound = slots / part < bound ? slots / part : bound;
    }
    bound = bound < KVIST_GRANT_FLOOR ? KVIST_GRANT_FLOOR : bound;
    uint32_t tickets = KVIST_GRANTS_MAX / session->attachment_count;
    return bound < tickets ? bound : tickets;
}

/* Called when a part of the grants was used up. */
static void adapt_target(struct kvist_attachment *attachment, uint64_t now_us)
{
    uint64_t since_us = now_us - attachment->topped_up_us;
    if (attachment->granted_count <= attachment->target / 2 && attachment->topped_up_us != 0) {
        if (since_us < GRANT_RATE_US) {
            attachment->target *= 2;
        } else if (since_us > 10 * GRANT_RATE_US && attachment->target > KVIST_GRANT_START) {
            attachment->target /= 2;
        }
    }
    if (attachment->target > KVIST_GRANTS_MAX) {
        attachment->target = KVIST_GRANTS_MAX;
    }
}

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
    struct kvist_attachment *attachment = &session->attachments[ordinal];
    attachment->target = attachment->granted_count > KVIST_GRANT_FLOOR ? attachment->granted_count
                                                                       : KVIST_GRANT_FLOOR;
    attachment->rests_until_us = session->store->now_us + GRANT_RATE_US;
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
    if (store->now_us < attachment->rests_until_us) {
        return;
    }
    uint32_t bound = grant_bound(session, ordinal);
    uint32_t wanted = attachment->target < bound ? attachment->target : bound;
    /* A quarter is used up before a message is worth sending; then they are filled up again, as
       fast as there are slots. */
    if (attachment->granted_count >= wanted) {
        attachment->filling = false;
    } else if (!attachment->filling && attachment->granted_count <= wanted - (wanted + 3) / 4) {
        attachment->filling = true;
        adapt_target(attachment, store->now_us);
        wanted = attachment->target < bound ? attachment->target : bound;
    }
    if (!attachment->filling) {
        return;
    }
    uint32_t count = 0;
    while (attachment->granted_count < wanted && session->ticket_free_count > 0) {
        uint32_t slot = kvist_session_take_slot(session, ordinal, KVIST_SLOT_GRANTED);
        if (slot == KVIST_SLOT_NONE) {
            break;
        }
        give(session, ordinal, slot);
        store->grants[count++] = grant_of(session, attachment->pool->slots[slot].ticket);
    }
    if (count > 0) {
        attachment->topped_up_us = store->now_us;
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
