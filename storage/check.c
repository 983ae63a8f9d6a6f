/*
 * check - every invariant of the store, in O(slots + index).
 */
#include "storage/internal.h"

static const char *check_entries(const struct kvist_store_pool *pool)
{
    uint64_t nvme_blocks = 0;
    for (uint32_t position = 0; position < pool->map.capacity; position++) {
        struct kvist_entry_copy entry;
        kvist_map_read(&pool->map, position, &entry);
        if (entry.state < KVIST_ENTRY_READY) {
            continue;
        }
        nvme_blocks += entry.extent != 0;
        if (entry.state == KVIST_ENTRY_NVME && entry.extent == 0) {
            return "an entry says NVME and names no extent";
        }
        bool has_slot = entry.state == KVIST_ENTRY_READY ||
                        (entry.state == KVIST_ENTRY_LOADING && entry.slot != KVIST_SLOT_NONE);
        if (!has_slot) {
            continue;
        }
        if (entry.slot >= pool->slot_max || pool->slots[entry.slot].entry != position) {
            return "an index entry names a slot that does not name it";
        }
        if (entry.state == KVIST_ENTRY_READY &&
            (kvist_slot_state_of(pool, entry.slot) != KVIST_SLOT_READY ||
             kvist_slot_generation(pool, entry.slot) != entry.generation)) {
            return "a READY entry names a slot that is not READY in that generation";
        }
    }
    return nvme_blocks == pool->nvme_blocks ? NULL : "nvme_blocks is not what the index holds";
}

static const char *check_slot(const struct kvist_store_pool *pool, uint32_t slot)
{
    const struct kvist_slot *info = &pool->slots[slot];
    enum kvist_slot_state state = kvist_slot_state_of(pool, slot);
    if (atomic_load_explicit(&pool->map.slots[slot].state, memory_order_relaxed) != state) {
        return "the map tells another state of a slot than the store";
    }
    if (state == KVIST_SLOT_READY) {
        struct kvist_entry_copy entry;
        if (info->entry >= pool->map.capacity) {
            return "a READY slot is not published";
        }
        kvist_map_read(&pool->map, info->entry, &entry);
        if (entry.state != KVIST_ENTRY_READY || entry.slot != slot) {
            return "a READY slot names an entry that does not name it";
        }
    }
    if (state == KVIST_SLOT_GRANTED) {
        const struct kvist_store_session *session = pool->store->sessions[info->session];
        if (session == NULL || session->tickets[info->ticket].slot != slot ||
            session->attachments[session->tickets[info->ticket].ordinal].pool != pool) {
            return "a GRANTED slot is no session's";
        }
    }
    bool unused = info->pins == 0 && info->flags == 0 && info->entry == KVIST_ENTRY_NONE;
    return state == KVIST_SLOT_FREE && !unused ? "a FREE slot is still in use" : NULL;
}

static const char *check_segment(const struct kvist_store_pool *pool,
                                 const struct kvist_segment *segment,
                                 uint32_t counts[5])
{
    uint32_t own[5] = {0};
    uint32_t first = segment->index * pool->slots_per_segment;
    for (uint32_t slot = first; slot < first + pool->slots_per_segment; slot++) {
        const char *broken = check_slot(pool, slot);
        if (broken != NULL) {
            return broken;
        }
        own[kvist_slot_state_of(pool, slot)]++;
    }
    uint32_t length = 0;
    for (uint32_t slot = segment->free_head; slot != KVIST_SLOT_NONE && length <= own[0];
         slot = pool->slots[slot].next) {
        if (kvist_slot_state_of(pool, slot) != KVIST_SLOT_FREE) {
            return "a slot on a free list is not FREE";
        }
        length++;
    }
    if (length != own[KVIST_SLOT_FREE] || length != segment->free_count) {
        return "a free list is not as long as there are FREE slots";
    }
    for (uint32_t state = 0; state < KVIST_ARRAY_COUNT(own); state++) {
        if (own[state] != segment->counts[state]) {
            return "a segment's counters are wrong";
        }
        counts[state] += own[state];
    }
    return NULL;
}

static uint32_t count_members(const struct kvist_store_pool *pool,
                              const struct kvist_segment *segment)
{
    uint32_t count = 0;
    for (uint32_t index = 0; index < KVIST_SESSIONS_MAX; index++) {
        const struct kvist_store_session *session = pool->store->sessions[index];
        for (uint32_t ordinal = 0; session != NULL && ordinal < KVIST_SESSION_POOLS_MAX;
             ordinal++) {
            for (uint32_t member = 0; member < KVIST_PROCESSES_MAX; member++) {
                const struct kvist_store_process *process = session->processes[member];
                count += session->attachments[ordinal].pool == pool && process != NULL &&
                         process->loans[ordinal].lent != NULL &&
                         process->loans[ordinal].lent[segment->index] == segment->serial;
            }
        }
    }
    return count;
}

static const char *check_segments(const struct kvist_store_pool *pool, uint64_t *bytes_out)
{
    uint32_t counts[5] = {0};
    uint32_t usable = 0;
    uint32_t existing = 0;
    uint64_t bytes = 0;
    for (uint32_t index = 0; index < pool->segment_max; index++) {
        const struct kvist_segment *segment = &pool->segments[index];
        if (segment->life == KVIST_LIFE_NONE) {
            continue;
        }
        existing++;
        bytes += segment->bytes;
        if (count_members(pool, segment) != segment->lent_count) {
            return "a segment is not lent to as many processes as were counted";
        }
        if (segment->life != KVIST_LIFE_LIVE && segment->life != KVIST_LIFE_DRAINING) {
            continue;
        }
        usable += segment->life == KVIST_LIFE_LIVE ? segment->free_count : 0;
        const char *broken = check_segment(pool, segment, counts);
        if (broken != NULL) {
            return broken;
        }
    }
    if (memcmp(counts, pool->counts, sizeof(counts)) != 0 || usable != pool->usable_free) {
        return "a pool's slot counters are wrong";
    }
    if (existing != pool->segment_count || bytes != pool->used_bytes) {
        return "a pool's segments are not what was counted";
    }
    *bytes_out += bytes;
    return NULL;
}

static const char *check_policy(const struct kvist_store_pool *pool)
{
    uint32_t count = 0;
    uint64_t bytes = 0;
    for (uint32_t slot = pool->ops->hottest(pool->policy, KVIST_SLOT_NONE);
         slot != KVIST_SLOT_NONE && count <= pool->slot_max;
         slot = pool->ops->hottest(pool->policy, slot)) {
        if (kvist_slot_state_of(pool, slot) != KVIST_SLOT_READY) {
            return "the policy knows a slot that is not READY";
        }
        bytes += kvist_slot_block_bytes(pool, slot);
        count++;
    }
    if (count != pool->counts[KVIST_SLOT_READY] || bytes != pool->block_bytes_ready) {
        return "the policy does not know every READY slot";
    }
    uint32_t retired = 0;
    for (uint32_t slot = pool->retired_head;
         slot != KVIST_SLOT_NONE && retired <= pool->slot_max;
         slot = pool->slots[slot].next) {
        retired++;
    }
    return retired == pool->counts[KVIST_SLOT_RETIRED]
               ? NULL
               : "the retired list is not as long as there are RETIRED slots";
}

/* The processes of a session that have a loan of an ordinal. */
static uint32_t count_loans(const struct kvist_store_session *session, uint32_t ordinal)
{
    uint32_t count = 0;
    for (uint32_t member = 0; member < KVIST_PROCESSES_MAX; member++) {
        const struct kvist_store_process *process = session->processes[member];
        count += process != NULL && process->loans[ordinal].lent != NULL;
    }
    return count;
}

static const char *check_attachments(const struct kvist_store_session *session,
                                     const uint32_t granted[KVIST_SESSION_POOLS_MAX])
{
    uint32_t count = 0;
    for (uint32_t ordinal = 0; ordinal < KVIST_SESSION_POOLS_MAX; ordinal++) {
        const struct kvist_attachment *attachment = &session->attachments[ordinal];
        bool is_used = attachment->pool != NULL;
        count += is_used;
        if (is_used != (count_loans(session, ordinal) > 0) ||
            is_used != (attachment->serial != 0) || is_used != (attachment->mapped != NULL)) {
            return "a session's place for a pool is in use, and nobody has a loan, or the reverse";
        }
        if (granted[ordinal] != attachment->granted_count) {
            return "an attachment's grants are not what was counted";
        }
    }
    return count == session->attachment_count ? NULL
                                              : "a session has not as many pools as were counted";
}

static const char *check_session(const struct kvist_store_session *session)
{
    uint32_t granted = 0;
    uint32_t granted_of[KVIST_SESSION_POOLS_MAX] = {0};
    for (uint32_t ticket = 0; ticket < KVIST_GRANTS_MAX; ticket++) {
        const struct kvist_ticket *entry = &session->tickets[ticket];
        if (entry->slot == KVIST_SLOT_NONE) {
            continue;
        }
        granted++;
        granted_of[entry->ordinal]++;
        const struct kvist_store_pool *pool = session->attachments[entry->ordinal].pool;
        if (pool == NULL ||
            kvist_slot_state_of(pool, entry->slot) != KVIST_SLOT_GRANTED ||
            pool->slots[entry->slot].ticket != ticket ||
            pool->slots[entry->slot].session != session->index) {
            return "a ticket names a slot that is not granted by it";
        }
    }
    if (granted != session->granted_count ||
        granted + session->ticket_free_count != KVIST_GRANTS_MAX) {
        return "a session's grants are not what was counted";
    }
    return check_attachments(session, granted_of);
}

static const char *check_members(const struct kvist_store_pool *pool)
{
    uint32_t sessions = 0;
    uint32_t writers = 0;
    for (uint32_t index = 0; index < KVIST_SESSIONS_MAX; index++) {
        const struct kvist_store_session *session = pool->store->sessions[index];
        for (uint32_t ordinal = 0; session != NULL && ordinal < KVIST_SESSION_POOLS_MAX;
             ordinal++) {
            const struct kvist_attachment *attachment = &session->attachments[ordinal];
            sessions += attachment->pool == pool;
            writers += attachment->pool == pool && attachment->writes;
        }
    }
    return sessions == pool->session_count && writers == pool->writer_count
               ? NULL
               : "a pool has not as many sessions as were counted";
}

static const char *check_pins(const struct kvist_store_pool *pool)
{
    uint32_t count = 0;
    for (uint32_t slot = 0; slot < pool->slot_max; slot++) {
        count += pool->slots[slot].pins;
    }
    return count == pool->pin_count ? NULL : "a pool has not as many pins as were counted";
}

static const char *check_pool(const struct kvist_store_pool *pool, uint64_t *bytes_out)
{
    const char *broken = kvist_map_check(&pool->map);
    broken = broken != NULL ? broken : check_entries(pool);
    broken = broken != NULL ? broken : check_segments(pool, bytes_out);
    broken = broken != NULL ? broken : check_members(pool);
    broken = broken != NULL ? broken : check_pins(pool);
    return broken != NULL ? broken : check_policy(pool);
}

const char *kvist_store_check(struct kvist_store *store)
{
    KVIST_CHECK(store->magic == STORE_MAGIC);
    uint64_t bytes = 0;
    uint64_t granted_slots = 0;
    uint64_t granted_tickets = 0;
    uint32_t writers = 0;
    for (uint32_t index = 0; index < store->pool_high; index++) {
        if (store->pools[index] != NULL) {
            const char *broken = check_pool(store->pools[index], &bytes);
            if (broken != NULL) {
                return broken;
            }
            granted_slots += store->pools[index]->counts[KVIST_SLOT_GRANTED];
            writers += store->pools[index]->writer_count;
        }
    }
    for (uint32_t index = 0; index < KVIST_SESSIONS_MAX; index++) {
        if (store->sessions[index] != NULL) {
            const char *broken = check_session(store->sessions[index]);
            if (broken != NULL) {
                return broken;
            }
            granted_tickets += store->sessions[index]->granted_count;
        }
    }
    if (granted_slots != granted_tickets) {
        return "not every GRANTED slot is some session's";
    }
    if (writers != store->writer_count) {
        return "the store has not as many writers as were counted";
    }
    if (bytes != store->used_bytes ||
        (bytes > store->options.arena_bytes && bytes > store->adopted_bytes)) {
        return "the arena is larger than counted, or than it may be";
    }
    return NULL;
}
