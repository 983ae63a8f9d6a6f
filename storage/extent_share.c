/* Whose extent goes: shares and quotas of tenants on disk. */
#include "storage/extent_internal.h"

/* Whether a is a better victim than b: sealed before open, empty before full, then the older. */
static bool victim_before(const struct kvist_extent *a, const struct kvist_extent *b)
{
    if (b == NULL) {
        return true;
    }
    if ((a->state == KVIST_EXTENT_SEALED) != (b->state == KVIST_EXTENT_SEALED)) {
        return a->state == KVIST_EXTENT_SEALED;
    }
    return a->number < b->number;
}

static void count_locked(struct kvist_extents *extents)
{
    for (uint32_t index = 0; index < extents->tenant_count; index++) {
        extents->tenants[index].bytes = 0;
    }
    for (uint32_t index = 0; index < extents->extent_count; index++) {
        const struct kvist_extent *extent = extents->extents[index];
        extents->tenants[extent->tenant].bytes += extent->disk_bytes;
    }
    if (extents->spare != NULL) {
        extents->tenants[extents->spare->tenant].bytes += extents->spare->disk_bytes;
    }
}

static bool is_over(const struct kvist_extent_tenant *tenant)
{
    return tenant->bytes_max != 0 && tenant->bytes > tenant->bytes_max;
}

/* The tenant that has most by weight, of those with something that can go. */
static uint32_t most_locked(const struct kvist_extents *extents, bool over_only)
{
    uint32_t most = KVIST_EXTENT_TENANT_NONE;
    double level_of_most = -1;
    for (uint32_t index = 0; index < extents->extent_count; index++) {
        uint32_t owner = extents->extents[index]->tenant;
        const struct kvist_extent_tenant *tenant = &extents->tenants[owner];
        double level = (double)tenant->bytes / tenant->weight;
        if (kvist_extent_may_go(extents->extents[index]) && level > level_of_most &&
            (!over_only || is_over(tenant))) {
            most = owner;
            level_of_most = level;
        }
    }
    return most;
}

static uint32_t owner_locked(struct kvist_extents *extents, uint32_t asking, uint64_t file_bytes)
{
    count_locked(extents);
    if (asking < extents->tenant_count) {
        extents->tenants[asking].bytes += file_bytes;
        if (is_over(&extents->tenants[asking])) {
            return asking;
        }
    }
    return most_locked(extents, false);
}

void kvist_extents_set_tenant(struct kvist_extents *extents,
                              uint32_t tenant,
                              uint64_t bytes_max,
                              uint32_t weight)
{
    kvist_extents_lock(extents);
    extents->tenants[tenant].bytes_max = bytes_max;
    extents->tenants[tenant].weight = weight;
    kvist_extents_unlock(extents);
}

uint64_t
kvist_extents_tenant_bytes(struct kvist_extents *extents, uint32_t tenant, uint64_t *bytes_max_out)
{
    kvist_extents_lock(extents);
    count_locked(extents);
    uint64_t bytes = extents->tenants[tenant].bytes;
    *bytes_max_out = extents->tenants[tenant].bytes_max;
    kvist_extents_unlock(extents);
    return bytes;
}

uint32_t kvist_extents_over(struct kvist_extents *extents)
{
    kvist_extents_lock(extents);
    count_locked(extents);
    uint32_t tenant = most_locked(extents, true);
    kvist_extents_unlock(extents);
    return tenant;
}

enum kvist_status kvist_extents_victim(struct kvist_extents *extents,
                                       uint32_t tenant,
                                       uint64_t file_bytes,
                                       bool empty_only,
                                       uint32_t *number_out)
{
    const struct kvist_extent *victim = NULL;
    kvist_extents_lock(extents);
    for (uint32_t index = 0; index < extents->extent_count && victim == NULL; index++) {
        const struct kvist_extent *extent = extents->extents[index];
        if (kvist_extent_may_go(extent) && extent->state == KVIST_EXTENT_SEALED &&
            extent->blocks == 0) {
            victim = extent;
        }
    }
    if (victim == NULL && !empty_only) {
        uint32_t owner = owner_locked(extents, tenant, file_bytes);
        for (uint32_t index = 0; index < extents->extent_count; index++) {
            const struct kvist_extent *extent = extents->extents[index];
            if (extent->tenant == owner && kvist_extent_may_go(extent) &&
                victim_before(extent, victim)) {
                victim = extent;
            }
        }
    }
    enum kvist_status status = victim != NULL ? KVIST_OK : KVIST_NOT_FOUND;
    *number_out = victim != NULL ? victim->number : *number_out;
    kvist_extents_unlock(extents);
    return status;
}
