/*
 * session - engines, their processes, and what they are lent.
 *
 * Role        opens and closes sessions and processes, attaches them to pools and takes them off,
 *             lends and revokes segments.
 * Invariants  a segment's lent_count == processes whose loan names its serial
 *             a process is lent segments once its pidfd and its session's page are safe, and the
 *             roster says so first: who is not known after a kill has mapped nothing (adopt.c)
 */
#include "storage/internal.h"

#include <stdlib.h>
#include <unistd.h>

/* --- Sessions -------------------------------------------------------------------------------- */

static bool id_in_use(const struct kvist_store *store, const uint8_t id[16])
{
    for (uint32_t index = 0; index < KVIST_SESSIONS_MAX; index++) {
        if (store->sessions[index] != NULL && memcmp(store->sessions[index]->id, id, 16) == 0) {
            return true;
        }
    }
    return false;
}

struct kvist_store_session *
kvist_session_make(struct kvist_store *store, const uint8_t id[16], uint32_t serial)
{
    struct kvist_store_session *session = calloc(1, sizeof(*session));
    if (session == NULL) {
        return NULL;
    }
    session->magic = SESSION_MAGIC;
    session->store = store;
    session->serial = serial;
    memcpy(session->id, id, sizeof(session->id));
    session->ticket_free_count = KVIST_GRANTS_MAX;
    for (uint32_t ticket = 0; ticket < KVIST_GRANTS_MAX; ticket++) {
        session->ticket_free[ticket] = (uint16_t)(KVIST_GRANTS_MAX - 1 - ticket);
        session->tickets[ticket].slot = KVIST_SLOT_NONE;
    }
    return session;
}

enum kvist_status kvist_store_session_open(struct kvist_store *store,
                                           const uint8_t session_id[16],
                                           uint32_t rank_count,
                                           struct kvist_store_session **session_out,
                                           struct kvist_error *err)
{
    KVIST_CHECK(store->magic == STORE_MAGIC);
    if (rank_count == 0 || rank_count > KVIST_RANKS_MAX) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "session",
                               "a session has 1 to %u ranks, not %u",
                               KVIST_RANKS_MAX,
                               rank_count);
    }
    if (id_in_use(store, session_id)) {
        return kvist_error_set(err, KVIST_EXISTS, 0, "session", "that session id is in use");
    }
    uint32_t index = 0;
    while (index < KVIST_SESSIONS_MAX && store->sessions[index] != NULL) {
        index++;
    }
    if (index == KVIST_SESSIONS_MAX) {
        return kvist_error_set(err,
                               KVIST_BUSY,
                               0,
                               "session",
                               "the daemon serves %u sessions already",
                               KVIST_SESSIONS_MAX);
    }
    struct kvist_store_session *session =
        kvist_session_make(store, session_id, kvist_roster_serial(store));
    if (session == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "session", "no memory for a session");
    }
    enum kvist_status status = kvist_page_init(
        session_id, rank_count, store->roster->instance, session->serial, &session->page, err);
    if (status != KVIST_OK) {
        free(session);
        return status;
    }
    if (kvist_roster_keep(store, KVIST_KEPT_PAGE, session->serial, session->page.fd) != KVIST_OK) {
        kvist_page_fini(&session->page);
        free(session);
        return kvist_error_set(err, KVIST_BUSY, 0, "session", "no more fds can be kept");
    }
    session->index = index;
    store->sessions[index] = session;
    store->session_count++;
    *session_out = session;
    return KVIST_OK;
}

void kvist_store_session_close(struct kvist_store_session **session)
{
    if (*session == NULL) {
        return;
    }
    struct kvist_store_session *old = *session;
    struct kvist_store *store = old->store;
    KVIST_CHECK(old->magic == SESSION_MAGIC);
    kvist_roster_drop_session(old);
    for (uint32_t index = 0; index < KVIST_PROCESSES_MAX; index++) {
        kvist_store_process_close(&old->processes[index]);
    }
    KVIST_CHECK(old->attachment_count == 0); /* the last loan of each has gone */
    store->sessions[old->index] = NULL;
    store->session_count--;
    kvist_page_fini(&old->page);
    kvist_roster_forget(store, KVIST_KEPT_PAGE, old->serial);
    old->magic = 0;
    free(old);
    *session = NULL;
}

void kvist_store_session_describe(struct kvist_store_session *session,
                                  const struct kvist_store_about *about)
{
    KVIST_CHECK(session->magic == SESSION_MAGIC);
    session->about = *about;
    kvist_roster_put_session(session);
}

int kvist_store_session_page_fd(const struct kvist_store_session *session)
{
    return session->page.fd;
}

void kvist_store_session_pools(const struct kvist_store_session *session,
                               bool open_out[KVIST_POOLS_MAX])
{
    for (uint32_t ordinal = 0; ordinal < KVIST_SESSION_POOLS_MAX; ordinal++) {
        if (session->attachments[ordinal].pool != NULL) {
            open_out[session->attachments[ordinal].pool->index] = true;
        }
    }
}

uint64_t kvist_store_session_page_bytes(const struct kvist_store_session *session)
{
    return session->page.bytes;
}

struct kvist_attachment *kvist_session_attachment(const struct kvist_store *store,
                                                  uint32_t session_index,
                                                  uint32_t ordinal,
                                                  uint32_t serial)
{
    struct kvist_store_session *session = store->sessions[session_index];
    struct kvist_attachment *attachment =
        session != NULL ? &session->attachments[ordinal] : NULL;
    return attachment != NULL && attachment->serial == serial ? attachment : NULL;
}

/* --- Processes ------------------------------------------------------------------------------- */

static enum kvist_status find_place(const struct kvist_store_session *session,
                                    const struct kvist_store_process *wanted,
                                    uint32_t *index_out)
{
    uint32_t place = KVIST_PROCESSES_MAX;
    for (uint32_t index = 0; index < KVIST_PROCESSES_MAX; index++) {
        const struct kvist_store_process *other = session->processes[index];
        if (other == NULL) {
            place = index < place ? index : place;
        } else if ((wanted->schedules && other->schedules) ||
                   (wanted->maps_segments && other->maps_segments && other->rank == wanted->rank)) {
            return KVIST_EXISTS;
        }
    }
    *index_out = place;
    return place == KVIST_PROCESSES_MAX ? KVIST_BUSY : KVIST_OK;
}

enum kvist_status kvist_store_process_open(struct kvist_store_session *session,
                                           bool schedules,
                                           bool maps_segments,
                                           uint32_t rank,
                                           void *ctx,
                                           struct kvist_store_process **process_out,
                                           struct kvist_error *err)
{
    KVIST_CHECK(session->magic == SESSION_MAGIC);
    if (maps_segments && rank >= session->page.rank_count) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "session",
                               "rank %u is not below the session's %u",
                               rank,
                               session->page.rank_count);
    }
    const struct kvist_store_process about = {
        .magic = PROCESS_MAGIC,
        .session = session,
        .pidfd = -1,
        .ctx = ctx,
        .schedules = schedules,
        .maps_segments = maps_segments,
        .rank = rank,
    };
    uint32_t index = 0;
    enum kvist_status status = find_place(session, &about, &index);
    if (status != KVIST_OK) {
        return kvist_error_set(err,
                               status,
                               0,
                               "session",
                               "that place in the session is taken by a process that lives");
    }
    struct kvist_store_process *process = malloc(sizeof(*process));
    if (process == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "session", "no memory for a process");
    }
    *process = about;
    process->index = index;
    session->processes[index] = process;
    session->store->process_count++;
    *process_out = process;
    return KVIST_OK;
}

static void drop_grants(struct kvist_store_session *session, uint32_t ordinal)
{
    struct kvist_attachment *attachment = &session->attachments[ordinal];
    for (uint32_t ticket = 0; attachment->granted_count > 0; ticket++) {
        uint32_t slot = session->tickets[ticket].slot;
        if (slot != KVIST_SLOT_NONE && session->tickets[ticket].ordinal == ordinal) {
            kvist_grant_end(session, ticket);
            kvist_slot_drop(attachment->pool, slot);
        }
    }
}

/* Nobody in the session uses the pool any more, unless a process has a loan of it. */
void kvist_session_settle(struct kvist_store_session *session, uint32_t ordinal)
{
    for (uint32_t index = 0; index < KVIST_PROCESSES_MAX; index++) {
        const struct kvist_store_process *process = session->processes[index];
        if (process != NULL && process->loans[ordinal].lent != NULL) {
            return;
        }
    }
    struct kvist_attachment *attachment = &session->attachments[ordinal];
    struct kvist_store_pool *pool = attachment->pool;
    kvist_roster_drop_attachment(session, ordinal);
    drop_grants(session, ordinal);
    kvist_promote_forget_holds(session->store, attachment->serial);
    pool->session_count--;
    pool->writer_count -= attachment->writes;
    session->store->writer_count -= attachment->writes;
    pool->last_used_us = session->store->now_us;
    free(attachment->mapped);
    *attachment = (struct kvist_attachment){.pool = NULL};
    session->attachment_count--;
}

static void close_loan(struct kvist_store_process *process, uint32_t ordinal)
{
    struct kvist_attachment *attachment = &process->session->attachments[ordinal];
    struct kvist_store_pool *pool = attachment->pool;
    struct kvist_loan *loan = &process->loans[ordinal];
    for (uint32_t index = 0; index < pool->segment_max; index++) {
        struct kvist_segment *segment = &pool->segments[index];
        if (loan->lent[index] != 0) {
            KVIST_CHECK(loan->lent[index] == segment->serial);
            kvist_arena_unlend(pool, segment);
        }
    }
    kvist_roster_set_loan(process, ordinal, false);
    free(loan->lent);
    free(loan->told);
    *loan = (struct kvist_loan){.lent = NULL};
    /* It, or another process in its place, may come again, and has mapped nothing then. */
    memset(attachment->mapped, 0, pool->segment_max * sizeof(attachment->mapped[0]));
    kvist_session_settle(process->session, ordinal);
}

void kvist_store_process_close(struct kvist_store_process **process)
{
    if (*process == NULL) {
        return;
    }
    struct kvist_store_process *old = *process;
    struct kvist_store_session *session = old->session;
    KVIST_CHECK(old->magic == PROCESS_MAGIC);
    for (uint32_t ordinal = 0; ordinal < KVIST_SESSION_POOLS_MAX; ordinal++) {
        kvist_store_detach(old, ordinal);
    }
    session->processes[old->index] = NULL;
    session->store->process_count--;
    if (old->serial != 0) {
        kvist_roster_drop_process(old);
        kvist_roster_forget(session->store, KVIST_KEPT_PIDFD, old->serial);
    }
    if (old->pidfd >= 0) {
        (void)close(old->pidfd);
    }
    old->magic = 0;
    free(old);
    *process = NULL;
}

enum kvist_status
kvist_store_process_watch(struct kvist_store_process *process, uint32_t pid, int pidfd)
{
    KVIST_CHECK(process->magic == PROCESS_MAGIC && process->serial == 0);
    struct kvist_store *store = process->session->store;
    uint32_t serial = kvist_roster_serial(store);
    enum kvist_status status = kvist_roster_keep(store, KVIST_KEPT_PIDFD, serial, pidfd);
    if (status == KVIST_OK) {
        process->serial = serial;
        process->keep_number = store->keep_count;
        kvist_roster_put_process(process, pid, pidfd);
    }
    return status;
}

void kvist_store_process_set_ctx(struct kvist_store_process *process, void *ctx)
{
    KVIST_CHECK(process->magic == PROCESS_MAGIC);
    process->ctx = ctx;
    for (uint32_t ordinal = 0; ordinal < KVIST_SESSION_POOLS_MAX; ordinal++) {
        process->loans[ordinal].attached = false; /* until the new connection attaches */
    }
}

void *kvist_store_process_ctx(const struct kvist_store_process *process)
{
    return process->ctx;
}

struct kvist_store_process *kvist_session_scheduler(const struct kvist_store_session *session)
{
    for (uint32_t index = 0; index < KVIST_PROCESSES_MAX; index++) {
        struct kvist_store_process *process = session->processes[index];
        if (process != NULL && process->schedules && process->ctx != NULL) {
            return process;
        }
    }
    return NULL;
}

/* --- Attachments ----------------------------------------------------------------------------- */

/* The ordinal of a pool; NULL: a free one. KVIST_SESSION_POOLS_MAX: there is none. */
static uint32_t find_ordinal(const struct kvist_store_session *session,
                             const struct kvist_store_pool *pool)
{
    uint32_t ordinal = 0;
    while (ordinal < KVIST_SESSION_POOLS_MAX && session->attachments[ordinal].pool != pool) {
        ordinal++;
    }
    return ordinal;
}

static enum kvist_status add_attachment(struct kvist_store_session *session,
                                        struct kvist_store_pool *pool,
                                        uint32_t *ordinal_out)
{
    uint32_t ordinal = find_ordinal(session, NULL);
    if (ordinal == KVIST_SESSION_POOLS_MAX) {
        return KVIST_BUSY;
    }
    struct kvist_attachment attachment = {
        .pool = pool,
        .serial = kvist_roster_serial(session->store),
        .mapped = calloc(pool->segment_room, sizeof(attachment.mapped[0])),
    };
    if (attachment.mapped == NULL) {
        return KVIST_NO_MEMORY;
    }
    kvist_grant_begin(&attachment, session->store->now_us);
    pool->session_count++;
    session->attachments[ordinal] = attachment;
    session->attachment_count++;
    *ordinal_out = ordinal;
    return KVIST_OK;
}

enum kvist_status kvist_session_make_loan(struct kvist_loan *loan,
                                          const struct kvist_store_pool *pool)
{
    uint32_t *lent = calloc(pool->segment_room, sizeof(*lent));
    uint32_t *told = calloc(pool->segment_room, sizeof(*told));
    if (lent == NULL || told == NULL) {
        free(lent);
        free(told);
        return KVIST_NO_MEMORY;
    }
    loan->lent = lent;
    loan->told = told;
    return KVIST_OK;
}

static enum kvist_status open_loan(struct kvist_loan *loan, const struct kvist_store_pool *pool)
{
    if (loan->lent == NULL) {
        enum kvist_status status = kvist_session_make_loan(loan, pool);
        if (status != KVIST_OK) {
            return status;
        }
    } else {
        memset(loan->told, 0, pool->segment_max * sizeof(loan->told[0]));
    }
    loan->attached = true;
    loan->regrant = true;
    return KVIST_OK;
}

enum kvist_status kvist_store_attach(struct kvist_store_process *process,
                                     struct kvist_store_pool *pool,
                                     bool read_only,
                                     uint32_t *ordinal_out,
                                     struct kvist_error *err)
{
    KVIST_CHECK(process->magic == PROCESS_MAGIC && pool->magic == POOL_MAGIC);
    struct kvist_store_session *session = process->session;
    uint32_t ordinal = find_ordinal(session, pool);
    enum kvist_status status = KVIST_OK;
    if (ordinal == KVIST_SESSION_POOLS_MAX) {
        status = add_attachment(session, pool, &ordinal);
    }
    if (status == KVIST_OK) {
        status = open_loan(&process->loans[ordinal], pool);
        if (status != KVIST_OK) {
            kvist_session_settle(session, ordinal);
        }
    }
    if (status != KVIST_OK) {
        return kvist_error_set(err,
                               status,
                               0,
                               "session",
                               "cannot attach to one more pool; a session has at most %u at once",
                               KVIST_SESSION_POOLS_MAX);
    }
    struct kvist_attachment *attachment = &session->attachments[ordinal];
    if (!read_only && !attachment->writes) {
        attachment->writes = true;
        pool->writer_count++;
        session->store->writer_count++;
    }
    kvist_roster_put_attachment(session, ordinal);
    kvist_roster_set_loan(process, ordinal, true);
    if (process->schedules) {
        attachment->rests_until_us = 0;
    }
    pool->lend_wanted = true;
    *ordinal_out = ordinal;
    return KVIST_OK;
}

void kvist_store_detach(struct kvist_store_process *process, uint32_t pool)
{
    KVIST_CHECK(process->magic == PROCESS_MAGIC);
    if (pool < KVIST_SESSION_POOLS_MAX && process->loans[pool].lent != NULL) {
        close_loan(process, pool);
    }
}

/* --- Lending --------------------------------------------------------------------------------- */

/* Tell a process of what is live and of what is revoked, once a connection. */
static void lend_to(struct kvist_store_process *process,
                    uint32_t ordinal,
                    struct kvist_store_pool *pool)
{
    struct kvist_loan *loan = &process->loans[ordinal];
    const struct kvist_store_events *events = &pool->store->options.events;
    void *ctx = pool->store->options.ctx;
    for (uint32_t index = 0; index < pool->segment_max; index++) {
        struct kvist_segment *segment = &pool->segments[index];
        if (segment->life == KVIST_LIFE_LIVE && loan->told[index] != segment->serial) {
            kvist_roster_set_lent(process, ordinal);
            loan->told[index] = segment->serial;
            if (loan->lent[index] == 0) {
                loan->lent[index] = segment->serial;
                segment->lent_count++;
            }
            events->segment_lent(
                ctx, process, ordinal, index, segment->serial, segment->fd, segment->bytes);
        } else if (segment->life == KVIST_LIFE_REVOKED && loan->lent[index] == segment->serial &&
                   loan->told[index] != UINT32_MAX) {
            loan->told[index] = UINT32_MAX;
            events->revoked(ctx, process, ordinal, index, segment->serial);
        }
    }
}

void kvist_session_lend(struct kvist_store_pool *pool)
{
    struct kvist_store *store = pool->store;
    bool map_replaced = pool->map_replaced;
    pool->lend_wanted = false;
    pool->map_replaced = false;
    for (uint32_t index = 0; index < KVIST_SESSIONS_MAX; index++) {
        struct kvist_store_session *session = store->sessions[index];
        for (uint32_t ordinal = 0; session != NULL && ordinal < KVIST_SESSION_POOLS_MAX;
             ordinal++) {
            if (session->attachments[ordinal].pool != pool) {
                continue;
            }
            for (uint32_t member = 0; member < KVIST_PROCESSES_MAX; member++) {
                struct kvist_store_process *process = session->processes[member];
                if (process == NULL || process->ctx == NULL || !process->loans[ordinal].attached) {
                    continue;
                }
                if (map_replaced) {
                    store->options.events.map_replaced(store->options.ctx,
                                                       process,
                                                       ordinal,
                                                       pool->map.read_only_fd,
                                                       pool->map.bytes);
                }
                if (process->maps_segments && process->keep_number > store->kept_count) {
                    pool->lend_waits = true;
                } else if (process->maps_segments) {
                    lend_to(process, ordinal, pool);
                }
            }
        }
    }
}

/* The segment of a loan that a peer's message names, or NULL when it does not fit. */
static struct kvist_segment *named_segment(struct kvist_store_process *process,
                                           uint32_t ordinal,
                                           uint32_t segment,
                                           uint32_t serial)
{
    KVIST_CHECK(process->magic == PROCESS_MAGIC);
    struct kvist_store_pool *pool = kvist_session_pool(process->session, ordinal);
    if (pool == NULL || segment >= pool->segment_max || serial == 0) {
        return NULL;
    }
    const struct kvist_loan *loan = &process->loans[ordinal];
    return loan->lent != NULL && loan->lent[segment] == serial ? &pool->segments[segment] : NULL;
}

/* Whether every rank of the session has mapped a segment; remembered, for ranks unmap only what is
   revoked. */
static bool may_use(struct kvist_store_session *session,
                    uint32_t ordinal,
                    const struct kvist_segment *segment)
{
    struct kvist_attachment *attachment = &session->attachments[ordinal];
    if (attachment->mapped[segment->index] == segment->serial) {
        return true;
    }
    if (!kvist_page_has_mapped(&session->page, ordinal, segment->index, segment->serial)) {
        return false;
    }
    attachment->mapped[segment->index] = segment->serial;
    return true;
}

void kvist_store_segment_mapped(struct kvist_store_process *process,
                                uint32_t pool,
                                uint32_t segment,
                                uint32_t serial)
{
    const struct kvist_segment *named = named_segment(process, pool, segment, serial);
    if (named != NULL && named->life == KVIST_LIFE_LIVE &&
        may_use(process->session, pool, named)) {
        process->session->attachments[pool].blocked_until_us = 0;
    }
}

void kvist_store_segment_unmapped(struct kvist_store_process *process,
                                  uint32_t pool,
                                  uint32_t segment,
                                  uint32_t serial)
{
    struct kvist_segment *named = named_segment(process, pool, segment, serial);
    if (named != NULL && named->life == KVIST_LIFE_REVOKED) {
        process->loans[pool].lent[segment] = 0;
        kvist_arena_unlend(named->pool, named);
    }
}

/* --- Slots ----------------------------------------------------------------------------------- */

uint32_t kvist_session_take_slot(struct kvist_store_session *session,
                                 uint32_t ordinal,
                                 enum kvist_slot_state state)
{
    struct kvist_attachment *attachment = &session->attachments[ordinal];
    struct kvist_store_pool *pool = attachment->pool;
    if (pool->usable_free == 0 || session->store->now_us < attachment->blocked_until_us) {
        return KVIST_SLOT_NONE;
    }
    for (uint32_t step = 0; step < pool->segment_max; step++) {
        uint32_t index = attachment->segment_hint + step;
        index = index < pool->segment_max ? index : index - pool->segment_max;
        struct kvist_segment *segment = &pool->segments[index];
        if (segment->life == KVIST_LIFE_LIVE && segment->free_count > 0 &&
            may_use(session, ordinal, segment)) {
            attachment->segment_hint = index;
            return kvist_slot_take(pool, segment, state);
        }
    }
    attachment->blocked_until_us = session->store->now_us + KVIST_MAPPED_CHECK_US;
    return KVIST_SLOT_NONE;
}

void kvist_session_tell_promoted(struct kvist_store_session *session)
{
    struct kvist_store_process *scheduler = kvist_session_scheduler(session);
    for (uint32_t ordinal = 0; ordinal < KVIST_SESSION_POOLS_MAX; ordinal++) {
        struct kvist_attachment *attachment = &session->attachments[ordinal];
        if (attachment->promoted_count > 0 && scheduler != NULL) {
            session->store->options.events.promoted(session->store->options.ctx,
                                                    scheduler,
                                                    ordinal,
                                                    attachment->promoted_count);
        }
        attachment->promoted_count = 0;
    }
}

/* --- Touches --------------------------------------------------------------------------------- */

void kvist_session_drain_touches(struct kvist_store_session *session)
{
    struct kvist_store *store = session->store;
    uint32_t count =
        kvist_page_take_touches(&session->page, store->touches, KVIST_TOUCHES_PER_TURN);
    for (uint32_t index = 0; index < count; index++) {
        uint64_t ref = store->touches[index];
        uint32_t slot = (uint32_t)ref;
        struct kvist_store_pool *pool = kvist_session_pool(session, (ref >> 32) - 1);
        if (pool != NULL && slot < pool->slot_max &&
            kvist_slot_state_of(pool, slot) == KVIST_SLOT_READY) {
            struct kvist_slot *info = &pool->slots[slot];
            if ((info->flags & KVIST_FLAG_HELD) != 0 && info->session == session->index) {
                info->flags &= (uint8_t)~KVIST_FLAG_HELD; /* what it waited for has come */
            }
            pool->ops->touch(pool->policy, slot);
            store->stats.touches_total++;
        }
    }
}

void kvist_store_session_info(struct kvist_store_session *session,
                              struct kvist_store_session_info *info_out)
{
    KVIST_CHECK(session->magic == SESSION_MAGIC);
    *info_out = (struct kvist_store_session_info){
        .slots_leased = kvist_evict_count_leases(session->store, session),
        .slots_granted = session->granted_count,
    };
}
