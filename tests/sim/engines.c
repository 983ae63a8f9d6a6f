/*
 * engines - engines whose messages take their time.
 *
 * Role        what the store tells a process waits in that process's queue, in order, until it is
 *             received; commits and returns wait in the engine's. Leases need no message. An engine
 *             has grants in hand that it fills step by step, and now and then gets it wrong: a rank
 *             without a mark, a commit sent twice.
 */
#include "tests/sim/sim.h"

#include <fcntl.h>
#include <unistd.h>

enum kind { LENT, MAP, GRANTED, RECALLED, REVOKED, PROMOTED };

struct kvist_sim_message {
    struct kvist_sim_message *next;
    enum kind kind;
    struct kvist_store_process *process;
    uint32_t ordinal;
    uint32_t segment;
    uint32_t serial; /* or a count */
    int fd;
    uint64_t bytes;
    size_t grant_count;
    struct kvist_store_grant grants[];
};

struct kvist_sim_engine kvist_sim_engines[KVIST_SIM_ENGINES];

static uint64_t maps;
static struct kvist_store_events arrive; /* what a message does when it arrives */

static uint32_t number_of(const struct kvist_sim_engine *mine)
{
    return (uint32_t)(mine - kvist_sim_engines);
}

/* --- From the store -------------------------------------------------------------------------- */

static struct kvist_sim_engine *engine_of(const struct kvist_test_engine *engine)
{
    for (uint32_t index = 0; index < KVIST_SIM_ENGINES; index++) {
        if (kvist_sim_engines[index].engine == engine) {
            return &kvist_sim_engines[index];
        }
    }
    abort();
}

static struct kvist_sim_message *
queue(struct kvist_store_process *process, enum kind kind, uint32_t ordinal, size_t grant_count)
{
    struct kvist_test_member *member = kvist_store_process_ctx(process);
    struct kvist_sim_engine *mine = engine_of(member->engine);
    size_t index = (size_t)(member - member->engine->members);
    struct kvist_sim_message *message =
        calloc(1, sizeof(*message) + grant_count * sizeof(message->grants[0]));
    KVIST_SIM_REQUIRE(message != NULL);
    message->kind = kind;
    message->process = process;
    message->ordinal = ordinal;
    message->fd = -1;
    message->grant_count = grant_count;
    *(mine->first[index] == NULL ? &mine->first[index] : &mine->last[index]->next) = message;
    mine->last[index] = message;
    return message;
}

static void lent(void *ctx,
                 struct kvist_store_process *process,
                 uint32_t ordinal,
                 uint32_t segment,
                 uint32_t serial,
                 int fd,
                 uint64_t bytes)
{
    (void)ctx;
    struct kvist_sim_message *message = queue(process, LENT, ordinal, 0);
    message->segment = segment;
    message->serial = serial;
    message->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    message->bytes = bytes;
}

static void map_replaced(
    void *ctx, struct kvist_store_process *process, uint32_t ordinal, int fd, uint64_t bytes)
{
    (void)ctx;
    struct kvist_sim_message *message = queue(process, MAP, ordinal, 0);
    maps++;
    message->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    message->bytes = bytes;
}

static void granted(void *ctx,
                    struct kvist_store_process *process,
                    uint32_t ordinal,
                    const struct kvist_store_grant *grants,
                    size_t count)
{
    (void)ctx;
    struct kvist_test_member *member = kvist_store_process_ctx(process);
    struct kvist_sim_message *message = queue(process, GRANTED, ordinal, count);
    memcpy(message->grants, grants, count * sizeof(grants[0]));
    for (size_t index = 0; index < count; index++) {
        kvist_sim_model_granted(kvist_sim_engine_pool(engine_of(member->engine), ordinal),
                                grants[index].reservation);
    }
}

static void revoked(void *ctx,
                    struct kvist_store_process *process,
                    uint32_t ordinal,
                    uint32_t segment,
                    uint32_t serial)
{
    (void)ctx;
    struct kvist_sim_message *message = queue(process, REVOKED, ordinal, 0);
    message->segment = segment;
    message->serial = serial;
}

static void
recalled(void *ctx, struct kvist_store_process *process, uint32_t ordinal, uint32_t count)
{
    (void)ctx;
    queue(process, RECALLED, ordinal, 0)->serial = count;
}

static void
promoted(void *ctx, struct kvist_store_process *process, uint32_t ordinal, uint32_t count)
{
    (void)ctx;
    queue(process, PROMOTED, ordinal, 0)->serial = count;
}

uint64_t kvist_sim_engines_maps(void)
{
    return maps;
}

struct kvist_store_options kvist_sim_engine_options(uint64_t arena_bytes)
{
    struct kvist_store_options options = kvist_test_options(arena_bytes);
    arrive = options.events;
    maps = 0;
    options.events = (struct kvist_store_events){.segment_lent = lent,
                                                 .map_replaced = map_replaced,
                                                 .granted = granted,
                                                 .revoked = revoked,
                                                 .recalled = recalled,
                                                 .promoted = promoted};
    return options;
}

/* --- Receiving ------------------------------------------------------------------------------- */

/* Whether the engine has this grant in hand, or has sent what became of it. */
static bool has_grant(const struct kvist_sim_engine *mine,
                      uint32_t ordinal,
                      const struct kvist_store_grant *grant)
{
    const struct kvist_test_pool *pool = &mine->engine->pools[ordinal];
    for (uint32_t index = 0; index < pool->grant_count; index++) {
        if (pool->grants[index].reservation == grant->reservation) {
            return true;
        }
    }
    for (uint32_t index = 0; index < KVIST_SIM_FILLS; index++) {
        if (mine->fills[index].version != 0 &&
            mine->fills[index].grant.reservation == grant->reservation) {
            return true;
        }
    }
    for (uint32_t index = 0; index < mine->order_count; index++) {
        if (mine->orders[index].fill.grant.reservation == grant->reservation) {
            return true;
        }
    }
    return false;
}

/* Taken once, a grant is not taken again: its slot may have been published. */
static void
return_taken(struct kvist_sim_engine *mine, uint32_t ordinal, const struct kvist_store_grant *grant)
{
    if (mine->order_count < KVIST_SIM_ORDERS) {
        mine->orders[mine->order_count++] = (struct kvist_sim_order){
            .fill = {.ordinal = ordinal, .grant = *grant}, .returns = true, .repeats = true};
    }
}

static void receive_grants(struct kvist_sim_engine *mine, struct kvist_sim_message *message)
{
    size_t kept = 0;
    kvist_sim_trace("  engine %u is granted %zu slots of ordinal %u",
                    number_of(mine),
                    message->grant_count,
                    message->ordinal);
    for (size_t index = 0; index < message->grant_count; index++) {
        const struct kvist_store_grant *grant = &message->grants[index];
        if (has_grant(mine, message->ordinal, grant)) {
            continue;
        }
        if (kvist_sim_model_is_taken(grant->reservation)) {
            return_taken(mine, message->ordinal, grant);
        } else {
            message->grants[kept++] = *grant;
        }
    }
    arrive.granted(NULL, message->process, message->ordinal, message->grants, kept);
}

static void give_back(struct kvist_sim_engine *mine, uint32_t ordinal, uint32_t count)
{
    struct kvist_test_pool *pool = &mine->engine->pools[ordinal];
    kvist_sim_trace(
        "  engine %u is to give back %u grants of ordinal %u", number_of(mine), count, ordinal);
    for (; count > 0 && pool->grant_count > 0 && mine->order_count < KVIST_SIM_ORDERS; count--) {
        const struct kvist_store_grant *grant = &pool->grants[--pool->grant_count];
        kvist_sim_model_take(grant->reservation); /* nor is it again, should it be said again */
        mine->orders[mine->order_count++] = (struct kvist_sim_order){
            .fill = {.ordinal = ordinal, .grant = *grant}, .returns = true};
    }
}

static void take_in(struct kvist_sim_engine *mine, struct kvist_sim_message *message)
{
    struct kvist_store_process *process = message->process;
    uint32_t ordinal = message->ordinal;
    switch (message->kind) {
    case LENT:
        arrive.segment_lent(
            NULL, process, ordinal, message->segment, message->serial, message->fd, message->bytes);
        break;
    case MAP:
        arrive.map_replaced(NULL, process, ordinal, message->fd, message->bytes);
        break;
    case GRANTED:
        receive_grants(mine, message);
        break;
    case RECALLED:
        give_back(mine, ordinal, message->serial);
        break;
    case REVOKED:
        arrive.revoked(NULL, process, ordinal, message->segment, message->serial);
        break;
    case PROMOTED:
        arrive.promoted(NULL, process, ordinal, message->serial);
        break;
    }
}

/* Off the queue. @return false: it is empty */
static bool next(struct kvist_sim_engine *mine, uint32_t member, bool arrives)
{
    struct kvist_sim_message *message = mine->first[member];
    if (message == NULL) {
        return false;
    }
    mine->first[member] = message->next;
    if (arrives) {
        take_in(mine, message);
    }
    if (message->fd >= 0) {
        (void)close(message->fd);
    }
    free(message);
    return true;
}

void kvist_sim_engine_receive(struct kvist_sim_engine *mine, uint32_t count)
{
    for (uint32_t member = 0; member < mine->engine->member_count; member++) {
        for (uint32_t left = count; left > 0 && next(mine, member, true); left--) {
        }
    }
}

/* --- Sending --------------------------------------------------------------------------------- */

static bool is_marked(const struct kvist_sim_engine *mine, const struct kvist_sim_fill *fill)
{
    return fill->marks == (1U << mine->engine->rank_count) - 1;
}

static void arrive_at_store(struct kvist_sim_engine *mine, const struct kvist_sim_order *order)
{
    const struct kvist_sim_fill *fill = &order->fill;
    uint32_t pool = kvist_sim_engine_pool(mine, fill->ordinal);
    bool stale = kvist_sim_model_is_stale(pool, fill->grant.reservation);
    enum kvist_status status =
        order->returns ? kvist_store_return(mine->engine->session,
                                            fill->ordinal,
                                            fill->grant.slot,
                                            fill->grant.ticket,
                                            fill->grant.reservation)
                       : kvist_test_engine_commit(
                             mine->engine, fill->ordinal, &fill->grant, fill->key, fill->bytes);
    kvist_sim_trace("  engine %u: %s pool %u key %llu version %llu slot %u: %s",
                    number_of(mine),
                    order->repeats   ? "repeats"
                    : order->returns ? "return"
                                     : "commit",
                    pool,
                    (unsigned long long)fill->key,
                    (unsigned long long)fill->version,
                    fill->grant.slot,
                    kvist_status_name(status));
    if (order->repeats) {
        KVIST_SIM_REQUIRE(status == KVIST_OK || status == KVIST_NOT_FOUND);
    } else if (order->returns) {
        KVIST_SIM_REQUIRE(status == KVIST_OK);
    } else if (stale) {
        KVIST_SIM_REQUIRE(status == KVIST_STALE);
    } else if (!is_marked(mine, fill)) {
        KVIST_SIM_REQUIRE(status == KVIST_NOT_FOUND);
    } else {
        KVIST_SIM_REQUIRE(status == KVIST_OK || status == KVIST_EXISTS || status == KVIST_NO_SPACE);
        if (status == KVIST_OK) {
            kvist_sim_model_committed(fill->version);
        }
    }
}

void kvist_sim_engine_send(struct kvist_sim_engine *mine, uint32_t count)
{
    if (!mine->connected[0]) {
        return;
    }
    count = count < mine->order_count ? count : mine->order_count;
    for (uint32_t index = 0; index < count; index++) {
        arrive_at_store(mine, &mine->orders[index]);
    }
    mine->order_count -= count;
    memmove(mine->orders, &mine->orders[count], mine->order_count * sizeof(mine->orders[0]));
}

static void post(struct kvist_sim_engine *mine, struct kvist_sim_fill *fill, bool returns)
{
    struct kvist_sim_order order = {.fill = *fill, .returns = returns};
    uint32_t wanted = kvist_sim_chance(5) ? 2 : 1;
    if (mine->order_count + wanted > KVIST_SIM_ORDERS) {
        kvist_sim_engine_send(mine, KVIST_SIM_ORDERS);
    }
    if (mine->order_count + wanted > KVIST_SIM_ORDERS) {
        return; /* no connection: it stays in hand */
    }
    for (uint32_t left = wanted; left > 0; left--) {
        mine->orders[mine->order_count++] = order;
        order.repeats = true;
    }
    fill->version = 0;
}

/* --- Life ------------------------------------------------------------------------------------ */

uint32_t kvist_sim_engine_pool(const struct kvist_sim_engine *mine, uint32_t ordinal)
{
    const struct kvist_test_pool *pool = &mine->engine->pools[ordinal];
    return pool->map == NULL ? KVIST_SIM_POOLS : pool->header.pool_id[0];
}

void kvist_sim_engine_open(struct kvist_sim_engine *mine, struct kvist_store *store)
{
    memset(mine, 0, sizeof(*mine));
    mine->engine = kvist_test_engine_open(store, (uint8_t)number_of(mine), 1 + kvist_sim_below(2));
    kvist_sim_trace("  engine %u of %u ranks", number_of(mine), mine->engine->rank_count);
    memset(mine->connected, true, sizeof(mine->connected));
}

void kvist_sim_engine_close(struct kvist_sim_engine *mine)
{
    for (uint32_t member = 0; member < mine->engine->member_count; member++) {
        while (next(mine, member, false)) {
        }
    }
    kvist_test_engine_close(&mine->engine);
    memset(mine, 0, sizeof(*mine));
}

void kvist_sim_engine_attach(struct kvist_sim_engine *mine, struct kvist_store_pool *pool)
{
    kvist_sim_engine_receive(mine, UINT32_MAX); /* the answer comes after what was sent before */
    kvist_sim_trace("  engine %u attaches pool %u", number_of(mine), kvist_store_pool_id(pool)[0]);
    (void)kvist_test_engine_attach(mine->engine, pool);
}

void kvist_sim_engine_detach(struct kvist_sim_engine *mine, uint32_t ordinal)
{
    kvist_sim_trace("  engine %u detaches ordinal %u", number_of(mine), ordinal);
    kvist_sim_engine_receive(mine, UINT32_MAX);
    kvist_sim_engine_send(mine, UINT32_MAX);
    for (uint32_t record = 0; record < KVIST_SIM_LEASES; record++) {
        if (mine->leases[record].bytes != NULL && mine->leases[record].ordinal == ordinal) {
            kvist_sim_engine_release(mine, record);
        }
    }
    for (uint32_t index = 0; index < KVIST_SIM_FILLS; index++) {
        if (mine->fills[index].ordinal == ordinal) {
            mine->fills[index].version = 0;
        }
    }
    uint32_t kept = 0; /* what is left was not sent: there is no connection */
    for (uint32_t index = 0; index < mine->order_count; index++) {
        if (mine->orders[index].fill.ordinal != ordinal) {
            mine->orders[kept++] = mine->orders[index];
        }
    }
    mine->order_count = kept;
    kvist_test_engine_detach(mine->engine, ordinal);
}

/* What was not sent is not sent any more; its grants, filled as they are, go back. */
static void give_back_orders(struct kvist_sim_engine *mine)
{
    uint32_t kept = 0;
    for (uint32_t index = 0; index < mine->order_count; index++) {
        if (!mine->orders[index].repeats) {
            mine->orders[kept] = mine->orders[index];
            mine->orders[kept++].returns = true;
        }
    }
    mine->order_count = kept;
}

void kvist_sim_engine_disconnect(struct kvist_sim_engine *mine, uint32_t member)
{
    kvist_sim_trace("  engine %u loses process %u", number_of(mine), member);
    mine->connected[member] = false;
    while (next(mine, member, kvist_sim_chance(50))) {
    }
    if (member == 0 && kvist_sim_chance(50)) {
        give_back_orders(mine);
    }
    kvist_store_process_set_ctx(mine->engine->members[member].process, NULL);
}

void kvist_sim_engine_lose(struct kvist_sim_engine *mine)
{
    for (uint32_t member = 0; member < mine->engine->member_count; member++) {
        while (next(mine, member, kvist_sim_chance(50))) {
        }
        mine->connected[member] = false;
    }
    if (kvist_sim_chance(50)) {
        give_back_orders(mine);
    }
}

void kvist_sim_engine_adopt(struct kvist_sim_engine *mine, struct kvist_store *store)
{
    KVIST_SIM_REQUIRE(kvist_test_engine_can_adopt(mine->engine, store));
    kvist_test_engine_adopt(mine->engine, store);
    memset(mine->connected, true, sizeof(mine->connected));
}

void kvist_sim_engine_abandon(struct kvist_sim_engine *mine)
{
    kvist_test_engine_abandon(&mine->engine);
    memset(mine, 0, sizeof(*mine));
}

void kvist_sim_engine_reconnect(struct kvist_sim_engine *mine, uint32_t member)
{
    kvist_store_process_set_ctx(mine->engine->members[member].process,
                                &mine->engine->members[member]);
    mine->connected[member] = true;
    kvist_sim_trace("  engine %u has process %u again", number_of(mine), member);
    for (uint32_t ordinal = 0; ordinal < mine->engine->pool_count; ordinal++) {
        if (kvist_sim_engine_pool(mine, ordinal) != KVIST_SIM_POOLS) {
            kvist_sim_engine_attach(mine, mine->engine->pools[ordinal].pool);
        }
    }
}

void kvist_sim_engine_unmap(struct kvist_sim_engine *mine)
{
    kvist_sim_engine_receive(mine, UINT32_MAX); /* all ranks share what is mapped here */
    kvist_test_engine_unmap_revoked(mine->engine);
}

/* --- Storing --------------------------------------------------------------------------------- */

bool kvist_sim_engine_take(struct kvist_sim_engine *mine, uint32_t ordinal, uint64_t key)
{
    struct kvist_sim_fill *fill = mine->fills;
    while (fill < &mine->fills[KVIST_SIM_FILLS] && fill->version != 0) {
        fill++;
    }
    uint32_t pool = kvist_sim_engine_pool(mine, ordinal);
    struct kvist_store_grant grant;
    if (fill == &mine->fills[KVIST_SIM_FILLS] || pool == KVIST_SIM_POOLS ||
        !kvist_test_engine_take(mine->engine, ordinal, &grant)) {
        return false;
    }
    kvist_sim_model_take(grant.reservation);
    uint64_t bytes = 16 + 8ULL * kvist_sim_below(120);
    *fill = (struct kvist_sim_fill){
        .version = kvist_sim_model_version(pool, key, bytes, grant.reservation),
        .ordinal = ordinal,
        .grant = grant,
        .key = key,
        .bytes = bytes,
    };
    return true;
}

void kvist_sim_engine_fill(struct kvist_sim_engine *mine, struct kvist_sim_fill *fill)
{
    uint32_t rank = kvist_sim_below(mine->engine->rank_count);
    if (kvist_sim_below(200) == 0) {
        post(mine, fill, true);
    } else if (!fill->written) {
        kvist_test_fill(kvist_test_engine_slot(mine->engine, fill->ordinal, fill->grant.slot),
                        fill->version,
                        fill->bytes);
        fill->written = true;
    } else if (!is_marked(mine, fill) && !kvist_sim_chance(2)) {
        kvist_test_engine_mark(mine->engine, rank, &fill->grant);
        fill->marks |= 1U << rank;
    } else {
        post(mine, fill, false);
    }
}

void kvist_sim_engine_fill_all(struct kvist_sim_engine *mine, struct kvist_sim_fill *fill)
{
    for (uint32_t left = 16; left > 0 && fill->version != 0; left--) {
        kvist_sim_engine_fill(mine, fill);
    }
}

/* --- Reading --------------------------------------------------------------------------------- */

uint32_t
kvist_sim_engine_slot(const struct kvist_sim_engine *mine, uint32_t ordinal, const void *bytes)
{
    const struct kvist_test_pool *pool = &mine->engine->pools[ordinal];
    const char *at = bytes;
    for (uint32_t index = 0; index < pool->header.segment_max; index++) {
        const char *first = pool->segments[index].map;
        if (first != NULL && at >= first && at < first + pool->segments[index].bytes) {
            return index * pool->header.slots_per_segment +
                   (uint32_t)((uint64_t)(at - first) / pool->header.slot_bytes);
        }
    }
    abort();
}

/* What the slot table says. */
static uint64_t length_at(const struct kvist_sim_engine *mine, uint32_t ordinal, const void *bytes)
{
    const struct kvist_test_pool *pool = &mine->engine->pools[ordinal];
    const struct kvist_slot_entry *slots =
        (const void *)((const char *)pool->map + pool->header.slot_table_offset);
    return slots[kvist_sim_engine_slot(mine, ordinal, bytes)].block_bytes;
}

void kvist_sim_engine_lease(struct kvist_sim_engine *mine, uint32_t ordinal, uint64_t key)
{
    uint32_t record = kvist_sim_below(KVIST_SIM_LEASES);
    uint32_t pool = kvist_sim_engine_pool(mine, ordinal);
    if (pool == KVIST_SIM_POOLS || mine->leases[record].bytes != NULL) {
        return;
    }
    const void *bytes = kvist_test_engine_lease(mine->engine, ordinal, key, record);
    kvist_sim_trace("  engine %u: lease pool %u key %llu: %s",
                    number_of(mine),
                    pool,
                    (unsigned long long)key,
                    bytes == NULL ? "miss" : "hit");
    if (bytes != NULL) {
        uint64_t version = kvist_sim_model_check(pool, key, bytes, length_at(mine, ordinal, bytes));
        mine->leases[record] =
            (struct kvist_sim_lease){.bytes = bytes, .ordinal = ordinal, .version = version};
    }
}

void kvist_sim_engine_release(struct kvist_sim_engine *mine, uint32_t record)
{
    if (mine->leases[record].bytes != NULL) {
        kvist_test_engine_release(mine->engine, record);
        mine->leases[record].bytes = NULL;
    }
}

void kvist_sim_engine_check(const struct kvist_sim_engine *mine)
{
    for (uint32_t record = 0; record < KVIST_SIM_LEASES; record++) {
        const struct kvist_sim_lease *lease = &mine->leases[record];
        if (lease->bytes != NULL) {
            kvist_sim_model_check_same(lease->bytes, lease->version);
        }
    }
}
