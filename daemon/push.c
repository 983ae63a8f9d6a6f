#include "daemon/daemon.h"
#include "daemon/dispatch.h"
#include "proto/shm/memfd.h"

#include <unistd.h>

#define GRANTS_IN_MESSAGE 256U

/* To the process if it has a connection; what it misses is sent again when it attaches again. */
static void push(void *ctx,
                 const struct kvist_store_process *process,
                 const Kvist__Wire__Envelope *envelope,
                 const int *fd)
{
    struct kvist_daemon *daemon = ctx;
    struct kvist_connection *connection = kvist_store_process_ctx(process);
    if (connection != NULL) {
        daemon->counters.pushes_total++;
        kvist_connection_send(connection, envelope, fd, fd != NULL ? 1 : 0);
    }
}

static void on_segment_lent(void *ctx,
                            struct kvist_store_process *process,
                            uint32_t pool,
                            uint32_t segment,
                            uint32_t serial,
                            int fd,
                            uint64_t bytes)
{
    Kvist__Wire__Segment body = KVIST__WIRE__SEGMENT__INIT;
    body.pool = pool;
    body.segment = segment;
    body.serial = serial;
    body.bytes = bytes;
    Kvist__Wire__Envelope envelope = KVIST__WIRE__ENVELOPE__INIT;
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_SEGMENT;
    envelope.segment = &body;
    /* Who may only read is not trusted to do so: it gets an fd that cannot write. */
    const struct kvist_connection *connection = kvist_store_process_ctx(process);
    int read_only_fd = -1;
    if (connection == NULL || !connection->reads_only) {
        push(ctx, process, &envelope, &fd);
    } else if (kvist_memfd_reopen_read_only(fd, &read_only_fd, NULL) == KVIST_OK) {
        push(ctx, process, &envelope, &read_only_fd);
        (void)close(read_only_fd);
    }
}

static void on_map_replaced(
    void *ctx, struct kvist_store_process *process, uint32_t pool, int fd, uint64_t bytes)
{
    Kvist__Wire__PoolMap body = KVIST__WIRE__POOL_MAP__INIT;
    body.pool = pool;
    body.map_bytes = bytes;
    Kvist__Wire__Envelope envelope = KVIST__WIRE__ENVELOPE__INIT;
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_POOL_MAP;
    envelope.pool_map = &body;
    push(ctx, process, &envelope, &fd);
}

static void push_grants(void *ctx,
                        const struct kvist_store_process *process,
                        uint32_t pool,
                        const struct kvist_store_grant *grants,
                        size_t count)
{
    Kvist__Wire__Grant__Slot slots[GRANTS_IN_MESSAGE];
    Kvist__Wire__Grant__Slot *pointers[GRANTS_IN_MESSAGE];
    for (size_t index = 0; index < count; index++) {
        kvist__wire__grant__slot__init(&slots[index]);
        slots[index].slot = grants[index].slot;
        slots[index].ticket = grants[index].ticket;
        slots[index].reservation = grants[index].reservation;
        pointers[index] = &slots[index];
    }
    Kvist__Wire__Grant body = KVIST__WIRE__GRANT__INIT;
    body.pool = pool;
    body.slots = pointers;
    body.n_slots = count;
    Kvist__Wire__Envelope envelope = KVIST__WIRE__ENVELOPE__INIT;
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_GRANT;
    envelope.grant = &body;
    push(ctx, process, &envelope, NULL);
}

static void on_granted(void *ctx,
                       struct kvist_store_process *process,
                       uint32_t pool,
                       const struct kvist_store_grant *grants,
                       size_t count)
{
    while (count > 0) {
        size_t part = count < GRANTS_IN_MESSAGE ? count : GRANTS_IN_MESSAGE;
        push_grants(ctx, process, pool, grants, part);
        grants += part;
        count -= part;
    }
}

static void on_revoked(void *ctx,
                       struct kvist_store_process *process,
                       uint32_t pool,
                       uint32_t segment,
                       uint32_t serial)
{
    Kvist__Wire__Revoke body = KVIST__WIRE__REVOKE__INIT;
    body.pool = pool;
    body.segment = segment;
    body.serial = serial;
    Kvist__Wire__Envelope envelope = KVIST__WIRE__ENVELOPE__INIT;
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_REVOKE;
    envelope.revoke = &body;
    push(ctx, process, &envelope, NULL);
}

static void
on_recalled(void *ctx, struct kvist_store_process *process, uint32_t pool, uint32_t count)
{
    Kvist__Wire__Recall body = KVIST__WIRE__RECALL__INIT;
    body.pool = pool;
    body.count = count;
    Kvist__Wire__Envelope envelope = KVIST__WIRE__ENVELOPE__INIT;
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_RECALL;
    envelope.recall = &body;
    push(ctx, process, &envelope, NULL);
}

static void
on_promoted(void *ctx, struct kvist_store_process *process, uint32_t pool, uint32_t count)
{
    Kvist__Wire__Promoted body = KVIST__WIRE__PROMOTED__INIT;
    body.pool = pool;
    body.blocks = count;
    Kvist__Wire__Envelope envelope = KVIST__WIRE__ENVELOPE__INIT;
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_PROMOTED;
    envelope.promoted = &body;
    push(ctx, process, &envelope, NULL);
}

const struct kvist_store_events kvist_push_events = {
    .segment_lent = on_segment_lent,
    .map_replaced = on_map_replaced,
    .granted = on_granted,
    .revoked = on_revoked,
    .recalled = on_recalled,
    .promoted = on_promoted,
};
