/* view - what tools may see of a running daemon: stat, list, inspect. */
#include "daemon/daemon.h"
#include "daemon/dispatch.h"
#include "proto/wire/message.h"

#include <stdlib.h>
#include <string.h>

#define POOLS_IN_REPLY 64U

void kvist_dispatch_stat(struct kvist_daemon *daemon,
                         struct kvist_connection *connection,
                         const Kvist__Wire__Envelope *envelope)
{
    double values[KVIST_METRIC_COUNT];
    char health[KVIST_HEALTH_BYTES];
    Kvist__Wire__Metric metrics[KVIST_METRIC_COUNT];
    Kvist__Wire__Metric *pointers[KVIST_METRIC_COUNT];
    kvist_metrics_read(&daemon->metrics, values);
    kvist_metrics_health(&daemon->metrics, health);
    for (size_t index = 0; index < KVIST_METRIC_COUNT; index++) {
        const struct kvist_metric_row *row = &kvist_metric_rows[index];
        kvist__wire__metric__init(&metrics[index]);
        metrics[index].name = kvist_message_text(row->name);
        metrics[index].unit = kvist_message_text(row->unit);
        metrics[index].help = kvist_message_text(row->help);
        metrics[index].counter = row->kind == KVIST_METRIC_COUNTER;
        metrics[index].value = values[index];
        pointers[index] = &metrics[index];
    }
    Kvist__Wire__StatReply reply;
    kvist__wire__stat_reply__init(&reply);
    reply.metrics = pointers;
    reply.n_metrics = KVIST_METRIC_COUNT;
    reply.health = health;
    Kvist__Wire__Envelope answer = KVIST__WIRE__ENVELOPE__INIT;
    answer.id = envelope->id;
    answer.body_case = KVIST__WIRE__ENVELOPE__BODY_STAT_REPLY;
    answer.stat_reply = &reply;
    kvist_connection_send(connection, &answer, NULL, 0);
}

struct list_reply {
    struct kvist_store_pool_info infos[POOLS_IN_REPLY];
    Kvist__Wire__PoolInfo pools[POOLS_IN_REPLY];
    Kvist__Wire__PoolInfo *pool_pointers[POOLS_IN_REPLY];
    Kvist__Wire__SessionInfo sessions[KVIST_SESSIONS_MAX];
    Kvist__Wire__SessionInfo *session_pointers[KVIST_SESSIONS_MAX];
    uint32_t pids[KVIST_SESSIONS_MAX][KVIST_RANKS_MAX + 1];
};

/* Pools from `offset` on. @return where the next reply begins, 0 when there is nothing more */
static uint32_t list_pools(struct kvist_daemon *daemon,
                           const struct kvist_connection *connection,
                           uint32_t offset,
                           struct list_reply *list,
                           size_t *count_out)
{
    size_t count = 0;
    struct kvist_store_pool_info info;
    uint32_t index = offset;
    kvist_store_count_leases(daemon->store);
    for (; kvist_store_pool_info(daemon->store, index, &info); index++) {
        if (!kvist_connection_may_see(connection, info.tenant)) {
            continue;
        }
        if (count == POOLS_IN_REPLY) {
            *count_out = count;
            return index;
        }
        list->infos[count] = info;
        const struct kvist_store_pool_info *from = &list->infos[count];
        Kvist__Wire__PoolInfo *to = &list->pools[count];
        kvist__wire__pool_info__init(to);
        to->pool_id = kvist_message_bytes(from->pool_id, KVIST_KEY_BYTES);
        to->tenant = kvist_message_text(from->tenant);
        to->description = kvist_message_text(from->description);
        to->slot_bytes = from->slot_bytes;
        to->segments = from->segments;
        to->dram_blocks = from->slots_ready;
        to->dram_bytes = from->block_bytes_ready;
        to->nvme_blocks = from->nvme_blocks;
        to->leased_slots = from->slots_leased;
        to->granted_slots = from->slots_granted;
        to->free_slots = from->slots_free;
        to->generation = from->generation;
        to->sessions = from->sessions;
        list->pool_pointers[count++] = to;
    }
    *count_out = count;
    return 0;
}

static size_t list_sessions(struct kvist_daemon *daemon,
                            const struct kvist_connection *connection,
                            struct list_reply *list)
{
    size_t count = 0;
    for (struct kvist_session *session = daemon->sessions.first;
         session != NULL && count < KVIST_SESSIONS_MAX;
         session = session->next) {
        if (!kvist_connection_may_see(connection, session->tenant)) {
            continue;
        }
        struct kvist_store_session_info info;
        kvist_store_session_info(session->store, &info);
        Kvist__Wire__SessionInfo *to = &list->sessions[count];
        kvist__wire__session_info__init(to);
        to->session_id = kvist_message_bytes(session->id, sizeof(session->id));
        to->name = session->name;
        to->tenant = session->tenant;
        to->rank_count = session->rank_count;
        to->leased_slots = info.slots_leased;
        to->granted_slots = info.slots_granted;
        to->pids = list->pids[count];
        for (const struct kvist_process *process = session->processes;
             process != NULL && to->n_pids < KVIST_RANKS_MAX + 1;
             process = process->next) {
            to->pids[to->n_pids++] = (uint32_t)process->pid;
        }
        to->processes = (uint32_t)to->n_pids;
        list->session_pointers[count++] = to;
    }
    return count;
}

void kvist_dispatch_list(struct kvist_daemon *daemon,
                         struct kvist_connection *connection,
                         const Kvist__Wire__Envelope *envelope)
{
    struct list_reply *list = calloc(1, sizeof(*list));
    if (list == NULL) {
        kvist_connection_fail(connection, envelope->id, KVIST_NO_MEMORY, "kvistd is out of memory");
        return;
    }
    uint32_t offset = envelope->list->offset;
    Kvist__Wire__ListReply reply = KVIST__WIRE__LIST_REPLY__INIT;
    reply.next_offset = list_pools(daemon, connection, offset, list, &reply.n_pools);
    reply.pools = list->pool_pointers;
    reply.n_sessions = offset == 0 ? list_sessions(daemon, connection, list) : 0;
    reply.sessions = list->session_pointers;
    Kvist__Wire__Envelope answer = KVIST__WIRE__ENVELOPE__INIT;
    answer.id = envelope->id;
    answer.body_case = KVIST__WIRE__ENVELOPE__BODY_LIST_REPLY;
    answer.list_reply = &reply;
    kvist_connection_send(connection, &answer, NULL, 0);
    free(list);
}

struct inspect_reply {
    Kvist__Wire__InspectReply__Place places[KVIST_POOLS_MAX];
    Kvist__Wire__InspectReply__Place *pointers[KVIST_POOLS_MAX];
    uint8_t pool_ids[KVIST_POOLS_MAX][KVIST_KEY_BYTES];
    uint8_t parent_tags[KVIST_POOLS_MAX][sizeof(uint64_t)];
};

static void add_place(struct inspect_reply *inspect,
                      size_t count,
                      const struct kvist_store_pool_info *pool,
                      const struct kvist_store_block_info *block)
{
    Kvist__Wire__InspectReply__Place *to = &inspect->places[count];
    kvist__wire__inspect_reply__place__init(to);
    memcpy(inspect->pool_ids[count], pool->pool_id, KVIST_KEY_BYTES);
    for (size_t byte = 0; byte < sizeof(uint64_t); byte++) {
        inspect->parent_tags[count][byte] = (uint8_t)(block->parent_tag >> (8 * byte));
    }
    to->pool_id = kvist_message_bytes(inspect->pool_ids[count], KVIST_KEY_BYTES);
    to->parent_tag = kvist_message_bytes(inspect->parent_tags[count], sizeof(uint64_t));
    to->tier = kvist_message_text(!block->in_dram ? "nvme" : block->on_nvme ? "dram+nvme" : "dram");
    to->block_bytes = block->block_bytes;
    to->generation = block->generation;
    to->checksum = block->checksum;
    to->checksummed = block->checksummed;
    to->leased = block->leased;
    inspect->pointers[count] = to;
}

void kvist_dispatch_inspect(struct kvist_daemon *daemon,
                            struct kvist_connection *connection,
                            const Kvist__Wire__Envelope *envelope)
{
    struct inspect_reply *inspect = calloc(1, sizeof(*inspect));
    if (inspect == NULL) {
        kvist_connection_fail(connection, envelope->id, KVIST_NO_MEMORY, "kvistd is out of memory");
        return;
    }
    size_t count = 0;
    struct kvist_store_pool_info info;
    kvist_store_count_leases(daemon->store);
    for (uint32_t index = 0; kvist_store_pool_info(daemon->store, index, &info); index++) {
        struct kvist_store_pool *pool = kvist_store_pool_lookup(daemon->store, info.pool_id);
        struct kvist_store_block_info block;
        if (pool != NULL && kvist_connection_may_see(connection, info.tenant) &&
            count < KVIST_POOLS_MAX &&
            kvist_store_inspect(pool, envelope->inspect->key.data, &block) == KVIST_OK) {
            add_place(inspect, count++, &info, &block);
        }
    }
    Kvist__Wire__InspectReply reply = KVIST__WIRE__INSPECT_REPLY__INIT;
    reply.places = inspect->pointers;
    reply.n_places = count;
    Kvist__Wire__Envelope answer = KVIST__WIRE__ENVELOPE__INIT;
    answer.id = envelope->id;
    answer.body_case = KVIST__WIRE__ENVELOPE__BODY_INSPECT_REPLY;
    answer.inspect_reply = &reply;
    kvist_connection_send(connection, &answer, NULL, 0);
    free(inspect);
}
