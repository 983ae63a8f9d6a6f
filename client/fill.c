#include "client/core.h"
#include "proto/key/key.h"

/* --- Grants -------------------------------------------------------------------------------- */

/* Its commit or return is on its way. */
static void finish_ticket(const struct kvist_client *client, struct kvist_ticket *ticket)
{
    ticket->state = KVIST_TICKET_NONE;
    ticket->told_on = client->stats.connects;
}

static void post_return_locked(struct kvist_client *client,
                               const struct kvist_view *view,
                               Kvist__Wire__Return__Slot *slots,
                               size_t slot_count,
                               enum kvist_status *status_out)
{
    Kvist__Wire__Return__Slot *list[KVIST_BATCH_KEYS];
    for (size_t index = 0; index < slot_count; index++) {
        list[index] = &slots[index];
    }
    Kvist__Wire__Return message;
    kvist__wire__return__init(&message);
    message.pool = view->ordinal;
    message.n_slots = slot_count;
    message.slots = list;
    Kvist__Wire__Envelope envelope;
    kvist__wire__envelope__init(&envelope);
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_RETURN_SLOTS;
    envelope.return_slots = &message;
    *status_out = kvist_link_post_locked(client, &envelope);
}

/* Post all tickets of a pool that are to be returned; those that cannot be sent stay so. */
void kvist_grant_return_due_locked(struct kvist_client *client, struct kvist_pool *pool)
{
    struct kvist_epoch *epoch = client->current;
    const struct kvist_view *view = kvist_view_current_locked(pool);
    if (view == NULL || pool->state != KVIST_POOL_OPEN || client->link != KVIST_LINK_UP) {
        return; /* opening the pool again comes here */
    }
    enum kvist_status status = KVIST_OK;
    for (uint32_t ticket = 0; ticket < epoch->page_header.ticket_max && status == KVIST_OK;) {
        Kvist__Wire__Return__Slot slots[KVIST_BATCH_KEYS];
        size_t count = 0;
        for (; ticket < epoch->page_header.ticket_max && count < KVIST_BATCH_KEYS; ticket++) {
            const struct kvist_ticket *due = &epoch->tickets[ticket];
            if (due->state == KVIST_TICKET_RETURN && due->pool == pool->index) {
                kvist__wire__return__slot__init(&slots[count]);
                slots[count].slot = due->slot;
                slots[count].ticket = ticket;
                slots[count].reservation = due->reservation;
                count++;
            }
        }
        if (count > 0) {
            post_return_locked(client, view, slots, count, &status);
        }
        client->has_returns = client->has_returns || status != KVIST_OK;
        for (size_t index = 0; index < count && status == KVIST_OK; index++) {
            finish_ticket(client, &epoch->tickets[slots[index].ticket]);
        }
    }
}

/* The daemon takes back what is forgotten when all processes have closed the pool; should it grant
   it again before, it is given back then. */
static void forget_tickets(struct kvist_epoch *epoch, const struct kvist_pool *pool)
{
    for (uint32_t index = 0; index < epoch->page_header.ticket_max; index++) {
        struct kvist_ticket *ticket = &epoch->tickets[index];
        if (ticket->pool == pool->index && ticket->state != KVIST_TICKET_NONE) {
            ticket->state = KVIST_TICKET_NONE;
            ticket->told_on = 0;
        }
    }
}

void kvist_grant_give_back_locked(struct kvist_client *client,
                                  struct kvist_pool *pool,
                                  uint32_t count)
{
    struct kvist_view *view = kvist_view_current_locked(pool);
    for (; view != NULL && count > 0 && view->held_count > 0; count--) {
        uint32_t ticket = view->held[--view->held_count];
        client->current->tickets[ticket].state = KVIST_TICKET_RETURN;
    }
    if (client->current != NULL) {
        kvist_grant_return_due_locked(client, pool);
    }
}

void kvist_grant_close_locked(struct kvist_client *client, struct kvist_pool *pool)
{
    kvist_grant_give_back_locked(client, pool, UINT32_MAX);
    if (client->current != NULL) {
        forget_tickets(client->current, pool);
    }
    for (struct kvist_epoch *epoch = client->retired; epoch != NULL; epoch = epoch->next) {
        forget_tickets(epoch, pool);
    }
}

/* A rank has filled the slot under this very reservation: it was taken before. */
static bool is_filled(const struct kvist_epoch *epoch, uint32_t ticket, uint64_t reservation)
{
    for (uint32_t rank = 0; rank < epoch->page_header.rank_count; rank++) {
        if (atomic_load_explicit(kvist_page_mark(epoch, rank, ticket), memory_order_relaxed) ==
            reservation) {
            return true;
        }
    }
    return false;
}

/*
 * What becomes of a slot that is granted. After a reconnect the daemon says again what it has
 * granted. Taken once, a slot must not be taken again under the same reservation: its old fill
 * marks would vouch for bytes that were never written. So when its commit or return was lost with
 * an earlier connection it goes back; when that is on its way on this one, nothing is to be done.
 */
static enum kvist_ticket_state judge_grant(const struct kvist_client *client,
                                           const Kvist__Wire__Grant__Slot *slot)
{
    const struct kvist_ticket *ticket = &client->current->tickets[slot->ticket];
    if (ticket->reservation == slot->reservation) {
        bool lost = ticket->state == KVIST_TICKET_NONE && ticket->told_on != client->stats.connects;
        return lost ? KVIST_TICKET_RETURN : (enum kvist_ticket_state)ticket->state;
    }
    return is_filled(client->current, slot->ticket, slot->reservation) ? KVIST_TICKET_RETURN
                                                                       : KVIST_TICKET_HELD;
}

static enum kvist_status grant_slot(struct kvist_client *client,
                                    const struct kvist_pool *pool,
                                    struct kvist_view *view,
                                    const Kvist__Wire__Grant__Slot *slot,
                                    struct kvist_error *err)
{
    struct kvist_epoch *epoch = client->current;
    if (slot->slot >= view->map.header.slot_max || slot->ticket >= epoch->page_header.ticket_max ||
        slot->reservation == 0) {
        return kvist_error_set(
            err, KVIST_PROTOCOL, 0, "peer", "the daemon sent a grant of no slot");
    }
    struct kvist_ticket *ticket = &epoch->tickets[slot->ticket];
    bool is_new = ticket->reservation != slot->reservation;
    bool is_used = ticket->state == KVIST_TICKET_HELD || ticket->state == KVIST_TICKET_TAKEN;
    bool is_other = is_new || ticket->slot != slot->slot || ticket->pool != pool->index;
    if (is_used && is_other) {
        return kvist_error_set(
            err, KVIST_PROTOCOL, 0, "peer", "the daemon granted a ticket that is in use");
    }
    enum kvist_ticket_state state = judge_grant(client, slot);
    *ticket = (struct kvist_ticket){
        .reservation = slot->reservation,
        .told_on = ticket->told_on,
        .slot = slot->slot,
        .pool = (uint8_t)pool->index,
        .state = (uint8_t)state,
    };
    if (is_new && state == KVIST_TICKET_HELD) {
        view->held[view->held_count++] = slot->ticket;
    }
    return KVIST_OK;
}

enum kvist_status kvist_grant_receive_locked(struct kvist_client *client,
                                             struct kvist_pool *pool,
                                             struct kvist_view *view,
                                             const Kvist__Wire__Grant *grant,
                                             struct kvist_error *err)
{
    enum kvist_status status = KVIST_OK;
    bool returns = false;
    for (size_t index = 0; index < grant->n_slots && status == KVIST_OK; index++) {
        status = grant_slot(client, pool, view, grant->slots[index], err);
        returns = returns || (status == KVIST_OK &&
                              client->current->tickets[grant->slots[index]->ticket].state ==
                                  KVIST_TICKET_RETURN);
    }
    if (returns) {
        kvist_grant_return_due_locked(client, pool);
    }
    return status;
}

/* --- Take ---------------------------------------------------------------------------------- */

/* The pool was cleared since the slot was granted: what is put there can no longer be committed. */
static bool is_stale(const struct kvist_view *view, uint32_t slot)
{
    return atomic_load_explicit(&kvist_map_slot(&view->map, slot)->pool_generation,
                                memory_order_relaxed) !=
           atomic_load_explicit(&kvist_map_shared_header(&view->map)->generation,
                                memory_order_relaxed);
}

/* Slots were taken, and so many more were wanted. */
static void note_used(struct kvist_view *view, size_t lacked)
{
    size_t used = view->taken_count + lacked;
    used = used < KVIST_GRANTS_MAX ? used : KVIST_GRANTS_MAX;
    view->used = used > view->used ? (uint32_t)used : view->used;
}

enum kvist_status kvist_pool_take(struct kvist_pool *pool,
                                  size_t take_max,
                                  struct kvist_take *takes_out,
                                  size_t *take_count_out)
{
    struct kvist_client *client = pool->client;
    KVIST_CHECK_OR(pool->magic == KVIST_POOL_MAGIC, KVIST_BUG);
    if (!client->schedules || pool->read_only) {
        return KVIST_INVALID;
    }
    size_t count = 0;
    kvist_client_lock_soon(client);
    struct kvist_view *view = kvist_view_current_locked(pool);
    bool usable = view != NULL && client->link == KVIST_LINK_UP && pool->state == KVIST_POOL_OPEN &&
                  !client->broken;
    bool returns = false;
    while (usable && count < take_max && view->held_count > 0) {
        uint32_t number = view->held[--view->held_count];
        struct kvist_ticket *ticket = &client->current->tickets[number];
        if (is_stale(view, ticket->slot)) {
            ticket->state = KVIST_TICKET_RETURN;
            returns = true;
            continue;
        }
        ticket->state = KVIST_TICKET_TAKEN;
        takes_out[count++] = (struct kvist_take){
            .instance = client->current->instance,
            .reservation = ticket->reservation,
            .slot = ticket->slot,
            .ticket = number,
        };
    }
    if (returns) {
        kvist_grant_return_due_locked(client, pool);
    }
    if (usable) {
        view->taken_count += (uint32_t)count;
        note_used(view, take_max - count);
    }
    client->stats.takes += count;
    client->stats.take_shortfalls += count < take_max;
    (void)pthread_mutex_unlock(client->lock);
    *take_count_out = count;
    return KVIST_OK;
}

/* The ticket that a take stands for, when it is still taken. */
static struct kvist_ticket *find_ticket_locked(const struct kvist_pool *pool,
                                               const struct kvist_take *take)
{
    struct kvist_epoch *epoch = kvist_epoch_find_locked(pool->client, take->instance);
    if (epoch == NULL || take->ticket >= epoch->page_header.ticket_max) {
        return NULL;
    }
    struct kvist_ticket *ticket = &epoch->tickets[take->ticket];
    bool fits = ticket->state == KVIST_TICKET_TAKEN && ticket->pool == pool->index &&
                ticket->reservation == take->reservation && ticket->slot == take->slot;
    return fits ? ticket : NULL;
}

/* Nobody writes its slot any more. NONE for a take of an arena that is gone: there is nobody to
   tell. */
static void end_take_locked(const struct kvist_pool *pool,
                            const struct kvist_take *take,
                            struct kvist_ticket *ticket,
                            enum kvist_ticket_state state)
{
    if (ticket != NULL) {
        ticket->state = (uint8_t)state;
        kvist_epoch_find_locked(pool->client, take->instance)->views[pool->index]->taken_count--;
    }
}

void kvist_pool_untake(struct kvist_pool *pool, const struct kvist_take *takes, size_t take_count)
{
    struct kvist_client *client = pool->client;
    kvist_client_lock_soon(client);
    for (size_t index = 0; index < take_count; index++) {
        struct kvist_ticket *ticket = find_ticket_locked(pool, &takes[index]);
        if (client->current == NULL || takes[index].instance != client->current->instance) {
            end_take_locked(pool, &takes[index], ticket, KVIST_TICKET_NONE);
        } else {
            end_take_locked(pool, &takes[index], ticket, KVIST_TICKET_RETURN);
        }
    }
    kvist_grant_return_due_locked(client, pool);
    (void)pthread_mutex_unlock(client->lock);
}

/* --- Commit -------------------------------------------------------------------------------- */

static void encode_block(const struct kvist_take *take,
                         const uint8_t *key,
                         uint64_t parent_tag,
                         uint64_t block_bytes,
                         Kvist__Wire__Commit__Block *block_out)
{
    kvist__wire__commit__block__init(block_out);
    block_out->slot = take->slot;
    block_out->ticket = take->ticket;
    block_out->reservation = take->reservation;
    memcpy(&block_out->key.data, &key, sizeof(key)); /* packing only reads */
    block_out->key.len = KVIST_KEY_BYTES;
    block_out->parent_tag = parent_tag;
    block_out->block_bytes = block_bytes;
}

/* Post the commit of up to KVIST_BATCH_KEYS takes. Their tickets are used up, or returned. */
static enum kvist_status post_commit_locked(struct kvist_pool *pool,
                                            const struct kvist_take *takes,
                                            const uint8_t *keys,
                                            size_t count,
                                            uint64_t parent_tag,
                                            uint64_t block_bytes)
{
    struct kvist_client *client = pool->client;
    struct kvist_view *view = kvist_view_current_locked(pool);
    Kvist__Wire__Commit__Block blocks[KVIST_BATCH_KEYS];
    Kvist__Wire__Commit__Block *list[KVIST_BATCH_KEYS];
    size_t block_count = 0;
    bool stale = false;
    for (size_t index = 0; index < count; index++) {
        const uint8_t *key = keys + index * KVIST_KEY_BYTES;
        struct kvist_ticket *ticket = find_ticket_locked(pool, &takes[index]);
        uint64_t tag = parent_tag;
        parent_tag = kvist_key_tag(key);
        if (client->current == NULL || takes[index].instance != client->current->instance) {
            stale = true;
            end_take_locked(pool, &takes[index], ticket, KVIST_TICKET_NONE);
            continue;
        }
        if (ticket == NULL) {
            continue; /* given back already */
        }
        end_take_locked(pool, &takes[index], ticket, KVIST_TICKET_RETURN);
        encode_block(&takes[index], key, tag, block_bytes, &blocks[block_count]);
        list[block_count] = &blocks[block_count];
        block_count++;
    }
    if (block_count == 0) {
        return stale ? KVIST_STALE : KVIST_OK;
    }
    client->has_returns = true; /* until it is posted */
    if (view == NULL || pool->state != KVIST_POOL_OPEN) {
        client->stats.dropped_messages++;
        return KVIST_UNAVAILABLE;
    }
    Kvist__Wire__Commit commit;
    kvist__wire__commit__init(&commit);
    commit.pool = view->ordinal;
    commit.n_blocks = block_count;
    commit.blocks = list;
    commit.used = view->used;
    Kvist__Wire__Envelope envelope;
    kvist__wire__envelope__init(&envelope);
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_COMMIT;
    envelope.commit = &commit;
    enum kvist_status status = kvist_link_post_locked(client, &envelope);
    for (size_t index = 0; index < block_count && status == KVIST_OK; index++) {
        finish_ticket(client, &client->current->tickets[blocks[index].ticket]);
    }
    if (status == KVIST_OK) {
        client->stats.commits += block_count;
        view->used = view->taken_count;
    }
    return status == KVIST_OK && stale ? KVIST_STALE : status;
}

enum kvist_status kvist_pool_commit(struct kvist_pool *pool,
                                    const struct kvist_take *takes,
                                    const uint8_t *keys,
                                    size_t take_count,
                                    const uint8_t *parent,
                                    uint64_t block_bytes)
{
    struct kvist_client *client = pool->client;
    KVIST_CHECK_OR(pool->magic == KVIST_POOL_MAGIC, KVIST_BUG);
    if (take_count > KVIST_KEYS_MAX || block_bytes == 0 || block_bytes > pool->slot_bytes ||
        !client->schedules || pool->read_only) {
        return KVIST_INVALID;
    }
    uint64_t parent_tag = parent != NULL ? kvist_key_tag(parent) : 0;
    enum kvist_status status = KVIST_OK;
    for (size_t done = 0; done < take_count;) {
        size_t batch = take_count - done < KVIST_BATCH_KEYS ? take_count - done : KVIST_BATCH_KEYS;
        kvist_client_lock_soon(client);
        enum kvist_status posted = post_commit_locked(
            pool, takes + done, keys + done * KVIST_KEY_BYTES, batch, parent_tag, block_bytes);
        (void)pthread_mutex_unlock(client->lock);
        status = status == KVIST_OK ? posted : status;
        done += batch;
        parent_tag = kvist_key_tag(keys + (done - 1) * KVIST_KEY_BYTES);
    }
    return status;
}

/* --- Ranks --------------------------------------------------------------------------------- */

enum kvist_status kvist_pool_pin(struct kvist_pool *pool, uint64_t instance)
{
    struct kvist_client *client = pool->client;
    KVIST_CHECK_OR(pool->magic == KVIST_POOL_MAGIC, KVIST_BUG);
    kvist_client_lock_soon(client);
    const struct kvist_epoch *epoch = kvist_epoch_find_locked(client, instance);
    struct kvist_view *view = epoch != NULL ? epoch->views[pool->index] : NULL;
    if (view != NULL) {
        view->pins++;
    }
    (void)pthread_mutex_unlock(client->lock);
    return view != NULL ? KVIST_OK : KVIST_STALE;
}

void kvist_pool_unpin(struct kvist_pool *pool, uint64_t instance)
{
    struct kvist_client *client = pool->client;
    kvist_client_lock_soon(client);
    const struct kvist_epoch *epoch = kvist_epoch_find_locked(client, instance);
    struct kvist_view *view = epoch != NULL ? epoch->views[pool->index] : NULL;
    bool wakes = false;
    if (view != NULL && view->pins > 0) {
        view->pins--;
        wakes = view->pins == 0 && (view->leaving_count > 0 || client->retired != NULL);
    }
    (void)pthread_mutex_unlock(client->lock);
    if (wakes) {
        kvist_client_wake(client);
    }
}

void *kvist_pool_slot_address(struct kvist_pool *pool, uint64_t instance, uint32_t slot)
{
    struct kvist_client *client = pool->client;
    void *address = NULL;
    kvist_client_lock_soon(client);
    const struct kvist_epoch *epoch = kvist_epoch_find_locked(client, instance);
    const struct kvist_view *view = epoch != NULL ? epoch->views[pool->index] : NULL;
    if (view != NULL && slot < view->map.header.slot_max) {
        uint32_t per_segment = view->map.header.slots_per_segment;
        const struct kvist_segment_view *segment = &view->segments[slot / per_segment];
        if (segment->base != NULL && !segment->leaving) {
            address = (char *)segment->base + (slot % per_segment) * view->map.header.slot_bytes;
        }
    }
    (void)pthread_mutex_unlock(client->lock);
    return address;
}

enum kvist_status kvist_pool_mark(struct kvist_pool *pool, const struct kvist_take *take)
{
    struct kvist_client *client = pool->client;
    KVIST_CHECK_OR(pool->magic == KVIST_POOL_MAGIC, KVIST_BUG);
    if (!client->maps || pool->read_only) {
        return KVIST_INVALID;
    }
    enum kvist_status status = KVIST_STALE;
    kvist_client_lock_soon(client);
    const struct kvist_epoch *epoch = kvist_epoch_find_locked(client, take->instance);
    if (epoch != NULL && take->ticket >= epoch->page_header.ticket_max) {
        status = KVIST_INVALID;
    } else if (epoch != NULL) {
        atomic_store_explicit(kvist_page_mark(epoch, client->rank, take->ticket),
                              take->reservation,
                              memory_order_release);
        status = KVIST_OK;
    }
    (void)pthread_mutex_unlock(client->lock);
    return status;
}
