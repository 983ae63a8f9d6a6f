/*
 * tenant - whose memory it is, and how much of it a tenant may have.
 *
 * Role        knows the limits of tenants, and sums up what their pools have.
 * Shares      the arena is shared out max-min by weight between tenants, and within a tenant
 *             between its pools (evict.c). A tenant never has more than its quota. As segments come
 *             back only when whoever maps them lets go, every other tenant that is configured has a
 *             floor, which is kept free for it until it has that much: a sixteenth of the arena, a
 *             quarter of an even share if that is less.
 * Threads     loop
 * Limits      KVIST_TENANTS_MAX: those configured, and one for each pool
 */
#include "storage/internal.h"

#include <stdio.h>

#define FLOOR_OF_ARENA 16U
#define FLOOR_OF_SHARE 4U

static struct kvist_tenant *lookup(struct kvist_store *store, const char *name)
{
    for (uint32_t index = 0; index < store->tenant_count; index++) {
        if (strcmp(store->tenants[index].limits.name, name) == 0) {
            return &store->tenants[index];
        }
    }
    return NULL;
}

static bool is_used(const struct kvist_store *store, const struct kvist_tenant *tenant)
{
    for (uint32_t index = 0; index < store->pool_high; index++) {
        if (store->pools[index] != NULL && store->pools[index]->tenant == tenant) {
            return true;
        }
    }
    return tenant->is_configured;
}

struct kvist_tenant *kvist_tenant_find(struct kvist_store *store, const char *name)
{
    struct kvist_tenant *tenant = lookup(store, name);
    if (tenant != NULL) {
        return tenant;
    }
    uint32_t index = 0;
    while (index < store->tenant_count && is_used(store, &store->tenants[index])) {
        index++;
    }
    KVIST_CHECK(index < KVIST_TENANTS_MAX);
    store->tenant_count += index == store->tenant_count;
    store->tenants[index] = (struct kvist_tenant){.limits = {.weight = 1}};
    (void)snprintf(
        store->tenants[index].limits.name, sizeof(store->tenants[index].limits.name), "%s", name);
    return &store->tenants[index];
}

void kvist_store_set_tenants(struct kvist_store *store,
                             const struct kvist_store_tenant_limits *limits,
                             size_t count)
{
    KVIST_CHECK(store->magic == STORE_MAGIC && count <= KVIST_STORE_TENANTS_MAX);
    for (uint32_t index = 0; index < store->tenant_count; index++) {
        struct kvist_tenant *tenant = &store->tenants[index];
        tenant->is_configured = false;
        tenant->limits.memory_bytes_max = 0;
        tenant->limits.nvme_bytes_max = 0;
        tenant->limits.weight = 1;
    }
    for (size_t index = 0; index < count; index++) {
        struct kvist_tenant *tenant = kvist_tenant_find(store, limits[index].name);
        tenant->limits = limits[index];
        tenant->is_configured = true;
    }
    uint64_t part_bytes = store->options.arena_bytes / FLOOR_OF_ARENA;
    uint64_t share_bytes = store->options.arena_bytes / (FLOOR_OF_SHARE * (count + 1));
    store->tenant_floor_bytes = part_bytes < share_bytes ? part_bytes : share_bytes;
    for (uint32_t index = 0; store->tier != NULL && index < store->tenant_count; index++) {
        const struct kvist_store_tenant_limits *known = &store->tenants[index].limits;
        kvist_tier_set_tenant(store->tier, known->name, known->nvme_bytes_max, known->weight);
    }
}

/* What is on its way out. A member that does not let go in time is not waited for: what it holds
   counts as its tenant's, which is not asked for more as long as others can give. */
static void count_leaving(const struct kvist_store_pool *pool)
{
    uint64_t now_us = pool->store->now_us;
    for (uint32_t index = 0; index < pool->segment_max; index++) {
        const struct kvist_segment *segment = &pool->segments[index];
        bool is_late = segment->life == KVIST_LIFE_REVOKED &&
                       now_us - segment->drain_since_us >= KVIST_DRAIN_GIVE_UP_US;
        if (is_late) {
            pool->tenant->late_bytes += segment->bytes;
        } else if (segment->life == KVIST_LIFE_DRAINING || segment->life == KVIST_LIFE_REVOKED) {
            pool->tenant->leaving_bytes += segment->bytes;
        }
    }
}

void kvist_tenant_turn(struct kvist_store *store)
{
    for (uint32_t index = 0; index < store->tenant_count; index++) {
        store->tenants[index].used_bytes = 0;
        store->tenants[index].leaving_bytes = 0;
        store->tenants[index].late_bytes = 0;
    }
    for (uint32_t index = 0; index < store->pool_high; index++) {
        const struct kvist_store_pool *pool = store->pools[index];
        if (pool != NULL) {
            pool->tenant->used_bytes += pool->used_bytes;
            if (store->draining_bytes > 0) {
                count_leaving(pool);
            }
        }
    }
    store->leaving_bytes = 0;
    for (uint32_t index = 0; index < store->tenant_count; index++) {
        store->leaving_bytes += store->tenants[index].leaving_bytes;
    }
}

static uint64_t less(uint64_t bytes, uint64_t taken)
{
    return bytes > taken ? bytes - taken : 0;
}

void kvist_tenant_gives_back(const struct kvist_segment *segment)
{
    struct kvist_tenant *tenant = segment->pool->tenant;
    tenant->used_bytes = less(tenant->used_bytes, segment->bytes);
    if (segment->life == KVIST_LIFE_DRAINING || segment->life == KVIST_LIFE_REVOKED) {
        struct kvist_store *store = segment->pool->store;
        store->leaving_bytes = less(store->leaving_bytes, segment->bytes);
        tenant->leaving_bytes = less(tenant->leaving_bytes, segment->bytes);
    }
}

/* What a tenant can count on. */
static uint64_t floor_bytes(const struct kvist_store *store, const struct kvist_tenant *tenant)
{
    uint64_t quota = tenant->limits.memory_bytes_max;
    uint64_t bytes = store->tenant_floor_bytes;
    bytes = quota != 0 && quota < bytes ? quota : bytes;
    return tenant->is_configured ? bytes : 0;
}

/* What is not for this tenant, because others have not had their floor yet. */
static uint64_t kept_bytes(const struct kvist_store *store, const struct kvist_tenant *tenant)
{
    uint64_t bytes = 0;
    for (uint32_t index = 0; index < store->tenant_count; index++) {
        const struct kvist_tenant *other = &store->tenants[index];
        uint64_t floor = floor_bytes(store, other);
        if (other != tenant && other->used_bytes < floor) {
            bytes += floor - other->used_bytes;
        }
    }
    return bytes;
}

bool kvist_tenant_can_spare(const struct kvist_store_pool *donor)
{
    const struct kvist_tenant *tenant = donor->tenant;
    return tenant->used_bytes - tenant->leaving_bytes >=
           floor_bytes(donor->store, tenant) + donor->segment_bytes;
}

uint64_t
kvist_tenant_room(const struct kvist_store *store, const struct kvist_tenant *tenant, bool coming)
{
    uint64_t used = store->used_bytes - (coming ? store->leaving_bytes : 0);
    uint64_t own = tenant->used_bytes - (coming ? tenant->leaving_bytes : 0);
    uint64_t quota = tenant->limits.memory_bytes_max;
    uint64_t room = less(less(store->options.arena_bytes, used), kept_bytes(store, tenant));
    uint64_t room_of_quota = quota != 0 ? less(quota, own) : UINT64_MAX;
    return room < room_of_quota ? room : room_of_quota;
}

bool kvist_tenant_fits(const struct kvist_tenant *tenant, uint64_t bytes)
{
    uint64_t quota = tenant->limits.memory_bytes_max;
    return quota == 0 || tenant->used_bytes - tenant->leaving_bytes + bytes <= quota;
}

bool kvist_tenant_is_over_quota(const struct kvist_tenant *tenant)
{
    uint64_t quota = tenant->limits.memory_bytes_max;
    return quota != 0 && tenant->used_bytes - tenant->leaving_bytes > quota;
}

/* What it has and keeps, with so much more, by weight; for comparing. */
static double level(const struct kvist_tenant *tenant, int64_t more_bytes)
{
    int64_t bytes = (int64_t)(tenant->used_bytes - tenant->leaving_bytes) + more_bytes;
    return (double)bytes / tenant->limits.weight;
}

bool kvist_tenant_gives_first(const struct kvist_tenant *tenant, const struct kvist_tenant *other)
{
    bool is_late = tenant->late_bytes > 0;
    if (is_late != (other->late_bytes > 0)) {
        return !is_late;
    }
    return level(tenant, 0) > level(other, 0);
}

bool kvist_tenant_outweighs(const struct kvist_store_pool *donor,
                            const struct kvist_store_pool *pool)
{
    return level(donor->tenant, -(int64_t)donor->segment_bytes) >=
           level(pool->tenant, (int64_t)pool->segment_bytes);
}

bool kvist_store_tenant_info(struct kvist_store *store,
                             uint32_t index,
                             struct kvist_store_tenant_info *info_out)
{
    KVIST_CHECK(store->magic == STORE_MAGIC);
    kvist_tenant_turn(store);
    for (uint32_t place = 0; place < store->tenant_count; place++) {
        const struct kvist_tenant *tenant = &store->tenants[place];
        if (!is_used(store, tenant) || index-- > 0) {
            continue;
        }
        struct kvist_store_tenant_info info = {
            .limits = tenant->limits,
            .memory_bytes = tenant->used_bytes,
            .refusals_total = tenant->refusals_total,
        };
        for (uint32_t at = 0; at < store->pool_high; at++) {
            const struct kvist_store_pool *pool = store->pools[at];
            if (pool != NULL && pool->tenant == tenant) {
                info.pools++;
                info.blocks += pool->counts[KVIST_SLOT_READY];
                info.block_bytes += pool->block_bytes_ready;
                info.nvme_blocks += pool->nvme_blocks;
            }
        }
        info.nvme_bytes =
            store->tier != NULL ? kvist_tier_tenant_bytes(store->tier, tenant->limits.name) : 0;
        *info_out = info;
        return true;
    }
    return false;
}

void kvist_store_tenant_refused(struct kvist_store *store, const char *name)
{
    struct kvist_tenant *tenant = lookup(store, name);
    if (tenant != NULL) {
        tenant->refusals_total++;
    }
}
