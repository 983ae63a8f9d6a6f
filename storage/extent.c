#include "proto/base/check.h"
#include "proto/base/fault.h"
#include "storage/extent_file.h"
#include "storage/extent_internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PAGE       KVIST_RECORD_PAGE_BYTES
#define TREE_BYTES (32U << 10) /* block maps of a file system, beside the blocks */

static size_t hit_words(uint64_t file_bytes)
{
    return (size_t)(file_bytes / KVIST_EXTENT_HIT_BYTES / 64) + 1;
}

static struct kvist_extent *extent_new(int fd, bool direct, uint32_t number, uint64_t file_bytes)
{
    struct kvist_extent *extent = calloc(1, sizeof(*extent));
    if (extent == NULL) {
        return NULL;
    }
    extent->hits = calloc(hit_words(file_bytes), sizeof(extent->hits[0]));
    if (extent->hits == NULL) {
        free(extent);
        return NULL;
    }
    extent->fd = fd;
    extent->direct = direct;
    extent->number = number;
    extent->file_bytes = file_bytes;
    extent->append_bytes = PAGE;
    return extent;
}

/* Closes the file. */
static void extent_free(struct kvist_extent *extent)
{
    if (extent->fd >= 0) {
        (void)close(extent->fd);
    }
    free(extent->hits);
    free(extent);
}

/* Position of the first extent whose number is not below. */
static uint32_t position_locked(const struct kvist_extents *extents, uint32_t number)
{
    uint32_t low = 0;
    uint32_t high = extents->extent_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (extents->extents[middle]->number < number) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static struct kvist_extent *find_locked(const struct kvist_extents *extents, uint32_t number)
{
    uint32_t position = position_locked(extents, number);
    if (position < extents->extent_count && extents->extents[position]->number == number) {
        return extents->extents[position];
    }
    return NULL;
}

static void insert_locked(struct kvist_extents *extents, struct kvist_extent *extent)
{
    uint32_t position = position_locked(extents, extent->number);
    KVIST_CHECK(extents->extent_count < KVIST_EXTENTS_MAX);
    memmove(&extents->extents[position + 1],
            &extents->extents[position],
            (extents->extent_count - position) *
                sizeof(extents->extents[0])); /* NOLINT(bugprone-sizeof-expression): pointers */
    extents->extents[position] = extent;
    extents->extent_count++;
}

static enum kvist_status
tenant_locked(struct kvist_extents *extents, const char *name, uint32_t *tenant_out)
{
    for (uint32_t index = 0; index < extents->tenant_count; index++) {
        if (strcmp(extents->tenants[index].name, name) == 0) {
            *tenant_out = index;
            return KVIST_OK;
        }
    }
    struct kvist_extent_tenant *grown =
        realloc(extents->tenants, (extents->tenant_count + 1) * sizeof(extents->tenants[0]));
    if (grown == NULL) {
        return KVIST_NO_MEMORY;
    }
    extents->tenants = grown;
    struct kvist_extent_tenant *tenant = &grown[extents->tenant_count];
    memset(tenant, 0, sizeof(*tenant));
    (void)snprintf(tenant->name, sizeof(tenant->name), "%s", name);
    tenant->weight = 1;
    *tenant_out = extents->tenant_count++;
    return KVIST_OK;
}

enum kvist_status
kvist_extents_tenant(struct kvist_extents *extents, const char *name, uint32_t *tenant_out)
{
    kvist_extents_lock(extents);
    enum kvist_status status = tenant_locked(extents, name, tenant_out);
    kvist_extents_unlock(extents);
    return status;
}

/* Take up one file that was found. One with a broken header was never finished, and goes. */
static enum kvist_status
adopt(struct kvist_extents *extents, uint32_t number, struct kvist_error *err)
{
    char tenant[KVIST_TENANT_BYTES_MAX + 1];
    uint64_t file_bytes = 0;
    int fd = -1;
    int failure = kvist_extent_file_open(
        extents->directory_fd, extents->direct, number, tenant, &file_bytes, &fd);
    if (failure == EBADMSG) {
        kvist_extent_file_remove(extents->directory_fd, number);
        return KVIST_OK;
    }
    if (failure != 0) {
        return kvist_error_set_errno(err, failure, "open", "cannot open extent %08u", number);
    }
    struct kvist_extent *extent = extent_new(fd, extents->direct, number, file_bytes);
    if (extent == NULL) {
        (void)close(fd);
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "tier", "no memory for extents");
    }
    if (tenant_locked(extents, tenant, &extent->tenant) != KVIST_OK) {
        extent_free(extent);
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "tier", "no memory for extents");
    }
    if (extents->extent_count >= KVIST_EXTENTS_MAX) {
        extent_free(extent);
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "tier",
                               "more than %u extents: remove the tier's directory to start empty",
                               KVIST_EXTENTS_MAX);
    }
    extent->found = true;
    atomic_store(&extent->dirty, true); /* who wrote it may have been killed before a sync */
    extent->state = KVIST_EXTENT_SEALED;
    extent->disk_bytes = kvist_extent_file_disk_bytes(fd, file_bytes);
    insert_locked(extents, extent);
    return KVIST_OK;
}

static enum kvist_status
scan(struct kvist_extents *extents, const char *directory, struct kvist_error *err)
{
    DIR *listing = opendir(directory);
    if (listing == NULL) {
        return kvist_error_set_errno(err, errno, "opendir", "cannot list %s", directory);
    }
    enum kvist_status status = KVIST_OK;
    while (status == KVIST_OK) {
        errno = 0;
        const struct dirent *entry = readdir(listing); /* NOLINT(concurrency-mt-unsafe): own DIR */
        if (entry == NULL) {
            if (errno != 0) {
                status = kvist_error_set_errno(err, errno, "readdir", "cannot list %s", directory);
            }
            break;
        }
        uint32_t number = kvist_extent_file_number(entry->d_name);
        if (number == 0) {
            continue;
        }
        if (number > extents->number_last) {
            extents->number_last = number;
        }
        status = adopt(extents, number, err);
    }
    (void)closedir(listing);
    return status;
}

enum kvist_status kvist_extents_open(const char *directory,
                                     bool direct,
                                     uint32_t number_floor,
                                     struct kvist_extents **extents_out,
                                     struct kvist_error *err)
{
    struct kvist_extents *extents = calloc(1, sizeof(*extents));
    if (extents == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "tier", "no memory for extents");
    }
    (void)pthread_mutex_init(&extents->lock, NULL);
    extents->direct = direct;
    extents->number_last = number_floor;
    extents->directory_fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    enum kvist_status status =
        extents->directory_fd < 0
            ? kvist_error_set_errno(err, errno, "open", "cannot open %s", directory)
            : scan(extents, directory, err);
    if (status != KVIST_OK) {
        kvist_extents_close(&extents);
        return status;
    }
    *extents_out = extents;
    return KVIST_OK;
}

void kvist_extents_close(struct kvist_extents **extents_inout)
{
    struct kvist_extents *extents = *extents_inout;
    if (extents == NULL) {
        return;
    }
    KVIST_CHECK(extents->retired_bytes == 0);
    for (uint32_t index = 0; index < extents->extent_count; index++) {
        KVIST_CHECK(extents->extents[index]->loans == 0);
        extent_free(extents->extents[index]);
    }
    if (extents->spare != NULL) {
        KVIST_CHECK(extents->spare->loans == 0);
        kvist_extents_drop_spare(extents);
    }
    if (extents->directory_fd >= 0) {
        (void)close(extents->directory_fd);
    }
    (void)pthread_mutex_destroy(&extents->lock);
    free(extents->tenants);
    free(extents);
    *extents_inout = NULL;
}

uint64_t kvist_extent_file_bytes(uint64_t extent_bytes, uint64_t record_bytes)
{
    uint64_t needed = PAGE + record_bytes;
    return extent_bytes > needed ? extent_bytes : needed;
}

static bool fits_locked(const struct kvist_extents *extents, uint32_t tenant, uint64_t record_bytes)
{
    const struct kvist_extent *extent = extents->tenants[tenant].open;
    return extent != NULL && record_bytes <= extent->file_bytes - extent->append_bytes;
}

bool kvist_extents_fits(struct kvist_extents *extents, uint32_t tenant, uint64_t record_bytes)
{
    kvist_extents_lock(extents);
    bool fits = fits_locked(extents, tenant, record_bytes);
    kvist_extents_unlock(extents);
    return fits;
}

enum kvist_status kvist_extents_reserve(struct kvist_extents *extents,
                                        uint32_t tenant,
                                        uint64_t record_bytes,
                                        struct kvist_extent **extent_out,
                                        uint64_t *offset_out)
{
    enum kvist_status status = KVIST_NO_SPACE;
    kvist_extents_lock(extents);
    if (fits_locked(extents, tenant, record_bytes)) {
        struct kvist_extent *extent = extents->tenants[tenant].open;
        *offset_out = extent->append_bytes;
        *extent_out = extent;
        extent->append_bytes += record_bytes;
        extent->loans++;
        extent->writers++;
        status = KVIST_OK;
    }
    kvist_extents_unlock(extents);
    return status;
}

void kvist_extents_unreserve(struct kvist_extents *extents,
                             struct kvist_extent *extent,
                             uint64_t offset,
                             uint64_t record_bytes)
{
    kvist_extents_lock(extents);
    if (extent->state == KVIST_EXTENT_OPEN && extent->append_bytes == offset + record_bytes) {
        extent->append_bytes = offset;
    }
    kvist_extents_unlock(extents);
}

enum kvist_status kvist_extents_acquire(struct kvist_extents *extents,
                                        uint32_t number,
                                        struct kvist_extent **extent_out)
{
    kvist_extents_lock(extents);
    struct kvist_extent *extent = find_locked(extents, number);
    if (extent != NULL) {
        extent->loans++;
        *extent_out = extent;
    }
    kvist_extents_unlock(extents);
    return extent != NULL ? KVIST_OK : KVIST_NOT_FOUND;
}

static void release(struct kvist_extents *extents, struct kvist_extent **extent_inout, bool writer)
{
    struct kvist_extent *extent = *extent_inout;
    if (extent == NULL) {
        return;
    }
    *extent_inout = NULL;
    kvist_extents_lock(extents);
    KVIST_CHECK(extent->loans > 0);
    extent->loans--;
    if (writer) {
        extent->writers--;
    }
    bool last = extent->retired && extent->loans == 0;
    uint64_t disk_bytes = extent->disk_bytes;
    kvist_extents_unlock(extents);
    if (last) {
        extent_free(extent);
        kvist_extents_lock(extents);
        extents->retired_bytes -= disk_bytes;
        kvist_extents_unlock(extents);
    }
}

void kvist_extents_release(struct kvist_extents *extents, struct kvist_extent **extent)
{
    release(extents, extent, false);
}

void kvist_extents_release_reserved(struct kvist_extents *extents, struct kvist_extent **extent)
{
    release(extents, extent, true);
}

/* Give the unused end of a file back. */
static void extent_trim(struct kvist_extents *extents, struct kvist_extent *extent)
{
    kvist_extents_lock(extents);
    uint64_t end_bytes = extent->append_bytes;
    bool shorter = extent->state != KVIST_EXTENT_OPEN && end_bytes < extent->file_bytes;
    kvist_extents_unlock(extents);
    if (shorter && ftruncate(extent->fd, (off_t)end_bytes) == 0) {
        uint64_t disk_bytes = kvist_extent_file_disk_bytes(extent->fd, end_bytes);
        kvist_extents_lock(extents);
        extent->file_bytes = end_bytes;
        extent->disk_bytes = disk_bytes;
        kvist_extents_unlock(extents);
    }
}

/* The spare's file under a new number. False: there is none for this tenant, any more. */
static bool use_spare(struct kvist_extents *extents,
                      uint32_t tenant,
                      uint32_t number,
                      const char *tenant_name,
                      uint64_t *file_bytes_inout,
                      int *fd_out)
{
    struct kvist_extent *spare = NULL;
    kvist_extents_lock(extents);
    if (extents->spare != NULL && extents->spare->loans == 0 && extents->spare->tenant == tenant) {
        spare = extents->spare;
        extents->spare = NULL;
        extents->retired_bytes += spare->disk_bytes;
    }
    kvist_extents_unlock(extents);
    if (spare == NULL) {
        return false;
    }
    uint64_t file_bytes =
        spare->file_bytes > *file_bytes_inout ? spare->file_bytes : *file_bytes_inout;
    bool used =
        kvist_extent_file_reuse(
            extents->directory_fd, spare->fd, spare->number, number, tenant_name, file_bytes) == 0;
    if (used) {
        *file_bytes_inout = file_bytes;
        *fd_out = spare->fd;
        spare->fd = -1;
    }
    uint64_t disk_bytes = spare->disk_bytes;
    extent_free(spare);
    kvist_extents_lock(extents);
    extents->retired_bytes -= disk_bytes;
    kvist_extents_unlock(extents);
    return used;
}

enum kvist_status kvist_extents_make(struct kvist_extents *extents,
                                     uint32_t tenant,
                                     uint64_t file_bytes,
                                     uint32_t *sealed_out,
                                     struct kvist_error *err)
{
    char tenant_name[KVIST_TENANT_BYTES_MAX + 1];
    file_bytes = (file_bytes + PAGE - 1) / PAGE * PAGE;
    kvist_extents_lock(extents);
    bool full = extents->extent_count >= KVIST_EXTENTS_MAX ||
                extents->number_last >= KVIST_EXTENT_NUMBER_MAX;
    uint32_t number = full ? 0 : ++extents->number_last;
    memcpy(tenant_name, extents->tenants[tenant].name, sizeof(tenant_name));
    kvist_extents_unlock(extents);
    if (full) {
        return kvist_error_set(err, KVIST_NO_SPACE, 0, "tier", "too many extents");
    }
    int fd = -1;
    int failure = 0;
    if (!use_spare(extents, tenant, number, tenant_name, &file_bytes, &fd)) {
        failure = kvist_extent_file_make(
            extents->directory_fd, extents->direct, number, tenant_name, file_bytes, &fd);
    }
    if (failure != 0) {
        return kvist_error_set_errno(err,
                                     failure,
                                     "extent",
                                     "cannot make an extent of %llu MiB",
                                     (unsigned long long)(file_bytes >> 20));
    }
    struct kvist_extent *extent = extent_new(fd, extents->direct, number, file_bytes);
    if (extent == NULL) {
        kvist_extent_file_remove(extents->directory_fd, number);
        (void)close(fd);
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "tier", "no memory for an extent");
    }
    extent->tenant = tenant;
    extent->state = KVIST_EXTENT_OPEN;
    extent->disk_bytes = kvist_extent_file_disk_bytes(fd, file_bytes) + TREE_BYTES;
    atomic_store(&extent->dirty, true);
    kvist_extents_lock(extents);
    struct kvist_extent *before = extents->tenants[tenant].open;
    extents->tenants[tenant].open = extent;
    insert_locked(extents, extent);
    if (before != NULL) {
        before->state = KVIST_EXTENT_SEALED;
    }
    *sealed_out = before != NULL ? before->number : 0;
    kvist_extents_unlock(extents);
    return KVIST_OK;
}

enum kvist_status kvist_extents_drain(struct kvist_extents *extents, uint32_t number)
{
    kvist_extents_lock(extents);
    struct kvist_extent *extent = find_locked(extents, number);
    enum kvist_status status = KVIST_NOT_FOUND;
    if (extent != NULL) {
        status = kvist_extent_may_go(extent) ? KVIST_OK : KVIST_BUSY;
    }
    if (status == KVIST_OK) {
        if (extents->tenants[extent->tenant].open == extent) {
            extents->tenants[extent->tenant].open = NULL;
        }
        extent->state = KVIST_EXTENT_DRAINING;
    }
    kvist_extents_unlock(extents);
    return status;
}

void kvist_extents_undrain(struct kvist_extents *extents, uint32_t number)
{
    kvist_extents_lock(extents);
    struct kvist_extent *extent = find_locked(extents, number);
    if (extent != NULL && extent->state == KVIST_EXTENT_DRAINING) {
        extent->state = KVIST_EXTENT_SEALED;
    }
    kvist_extents_unlock(extents);
}

/* The last loan closes the file. */
static void remove_file(struct kvist_extents *extents, struct kvist_extent *extent)
{
    kvist_extent_file_remove(extents->directory_fd, extent->number);
    kvist_extents_release(extents, &extent);
}

static void retire_locked(struct kvist_extents *extents, struct kvist_extent *extent)
{
    extent->retired = true;
    extent->loans++;
    extents->retired_bytes += extent->disk_bytes;
}

void kvist_extents_drop_spare(struct kvist_extents *extents)
{
    kvist_extents_lock(extents);
    struct kvist_extent *spare = extents->spare;
    extents->spare = NULL;
    if (spare != NULL) {
        retire_locked(extents, spare);
    }
    kvist_extents_unlock(extents);
    if (spare != NULL) {
        remove_file(extents, spare);
    }
}

bool kvist_extents_has_spare(struct kvist_extents *extents)
{
    kvist_extents_lock(extents);
    bool has = extents->spare != NULL;
    kvist_extents_unlock(extents);
    return has;
}

void kvist_extents_retire(struct kvist_extents *extents, uint32_t number, bool keep)
{
    kvist_extents_lock(extents);
    uint32_t position = position_locked(extents, number);
    struct kvist_extent *extent = find_locked(extents, number);
    if (extent == NULL) {
        kvist_extents_unlock(extents);
        return;
    }
    KVIST_CHECK(extent->writers == 0);
    if (extents->tenants[extent->tenant].open == extent) {
        extents->tenants[extent->tenant].open = NULL;
    }
    extents->extent_count--;
    memmove(&extents->extents[position],
            &extents->extents[position + 1],
            (extents->extent_count - position) *
                sizeof(extents->extents[0])); /* NOLINT(bugprone-sizeof-expression): pointers */
    bool kept = keep && extents->spare == NULL;
    if (kept) {
        extents->spare = extent;
    } else {
        retire_locked(extents, extent);
    }
    kvist_extents_unlock(extents);
    if (!kept) {
        remove_file(extents, extent);
    }
}

void kvist_extents_account(struct kvist_extents *extents,
                           uint32_t number,
                           int64_t blocks,
                           int64_t block_bytes)
{
    kvist_extents_lock(extents);
    struct kvist_extent *extent = find_locked(extents, number);
    if (extent != NULL) {
        extent->blocks += blocks;
        extent->block_bytes += block_bytes;
    }
    kvist_extents_unlock(extents);
}

void kvist_extents_trim(struct kvist_extents *extents, uint32_t number)
{
    struct kvist_extent *extent = NULL;
    if (kvist_extents_acquire(extents, number, &extent) == KVIST_OK) {
        extent_trim(extents, extent);
        kvist_extents_release(extents, &extent);
    }
}

bool kvist_extents_holds(struct kvist_extents *extents, const struct kvist_tier_record *record)
{
    uint64_t end_bytes = record->offset + kvist_record_bytes(record->block.block_bytes);
    kvist_extents_lock(extents);
    struct kvist_extent *extent = find_locked(extents, record->block.extent);
    bool holds = extent != NULL && record->offset >= PAGE && record->offset % PAGE == 0 &&
                 record->block.block_bytes <= KVIST_BLOCK_BYTES_MAX &&
                 record->offset < extent->file_bytes && end_bytes <= extent->file_bytes;
    if (holds && extent->found && end_bytes > extent->append_bytes) {
        extent->append_bytes = end_bytes;
    }
    kvist_extents_unlock(extents);
    return holds;
}

size_t kvist_extents_list(struct kvist_extents *extents,
                          uint32_t number_max,
                          uint32_t *numbers_out,
                          size_t capacity)
{
    size_t count = 0;
    kvist_extents_lock(extents);
    while (count < capacity && count < extents->extent_count &&
           extents->extents[count]->number <= number_max) {
        numbers_out[count] = extents->extents[count]->number;
        count++;
    }
    kvist_extents_unlock(extents);
    return count;
}

uint32_t kvist_extents_number_last(struct kvist_extents *extents)
{
    kvist_extents_lock(extents);
    uint32_t number = extents->number_last;
    kvist_extents_unlock(extents);
    return number;
}

enum kvist_status kvist_extents_sync(struct kvist_extents *extents, struct kvist_error *err)
{
    enum kvist_status status = KVIST_OK;
    uint32_t number = 0;
    for (;;) {
        kvist_extents_lock(extents);
        uint32_t position = position_locked(extents, number + 1);
        struct kvist_extent *extent =
            position < extents->extent_count ? extents->extents[position] : NULL;
        if (extent != NULL) {
            number = extent->number;
            extent->loans++;
        }
        kvist_extents_unlock(extents);
        if (extent == NULL) {
            break;
        }
        if (atomic_exchange(&extent->dirty, false) &&
            (kvist_fault_point("tier.sync") ? (errno = EIO) : fdatasync(extent->fd)) != 0) {
            status = kvist_error_set_errno(err, errno, "fdatasync", "cannot sync extents");
            atomic_store(&extent->dirty, true);
        }
        kvist_extents_release(extents, &extent);
    }
    if (fsync(extents->directory_fd) != 0 && status == KVIST_OK) {
        status = kvist_error_set_errno(err, errno, "fsync", "cannot sync the extents' directory");
    }
    return status;
}

void kvist_extents_totals(struct kvist_extents *extents, struct kvist_extents_totals *totals_out)
{
    struct kvist_extents_totals totals = {0};
    int64_t blocks = 0;
    int64_t block_bytes = 0;
    kvist_extents_lock(extents);
    totals.extents = extents->extent_count;
    totals.disk_bytes = extents->retired_bytes;
    totals.retired_bytes = extents->retired_bytes;
    for (uint32_t index = 0; index < extents->extent_count; index++) {
        const struct kvist_extent *extent = extents->extents[index];
        blocks += extent->blocks;
        block_bytes += extent->block_bytes;
        totals.disk_bytes += extent->disk_bytes;
        if (extent->state == KVIST_EXTENT_OPEN) {
            totals.unfilled_bytes += extent->file_bytes - extent->append_bytes;
        }
    }
    const struct kvist_extent *spare = extents->spare;
    if (spare != NULL) {
        totals.disk_bytes += spare->disk_bytes;
        totals.spare_tenant = spare->tenant;
        *(spare->loans == 0 ? &totals.spare_bytes : &totals.retired_bytes) += spare->disk_bytes;
    }
    kvist_extents_unlock(extents);
    totals.blocks = blocks > 0 ? (uint64_t)blocks : 0;
    totals.block_bytes = block_bytes > 0 ? (uint64_t)block_bytes : 0;
    *totals_out = totals;
}

uint32_t kvist_extent_number(const struct kvist_extent *extent)
{
    return extent->number;
}

uint32_t kvist_extent_tenant(const struct kvist_extent *extent)
{
    return extent->tenant;
}

uint64_t kvist_extent_filled_bytes(struct kvist_extents *extents, const struct kvist_extent *extent)
{
    kvist_extents_lock(extents);
    uint64_t bytes = extent->append_bytes - PAGE;
    kvist_extents_unlock(extents);
    return bytes;
}

bool kvist_extent_draining(struct kvist_extents *extents, const struct kvist_extent *extent)
{
    kvist_extents_lock(extents);
    bool draining = extent->state == KVIST_EXTENT_DRAINING;
    kvist_extents_unlock(extents);
    return draining;
}

void kvist_extent_hit(struct kvist_extent *extent, uint64_t offset)
{
    uint64_t bit = offset / KVIST_EXTENT_HIT_BYTES;
    atomic_fetch_or(&extent->hits[bit / 64], 1ULL << (bit % 64));
}

bool kvist_extent_was_hit(const struct kvist_extent *extent, uint64_t offset)
{
    uint64_t bit = offset / KVIST_EXTENT_HIT_BYTES;
    return (atomic_load(&extent->hits[bit / 64]) >> (bit % 64) & 1U) != 0;
}

enum kvist_status kvist_extent_write(struct kvist_extent *extent,
                                     const struct kvist_tier_record *record,
                                     const void *source,
                                     uint8_t *pages,
                                     struct kvist_error *err)
{
    enum kvist_status status =
        kvist_record_write(extent->fd, extent->direct, record, source, pages, err);
    atomic_store(&extent->dirty, true);
    return status;
}

enum kvist_status kvist_extent_read(struct kvist_extent *extent,
                                    const struct kvist_tier_record *record,
                                    void *target,
                                    uint8_t *pages,
                                    struct kvist_error *err)
{
    return kvist_record_read(extent->fd, extent->direct, record, target, pages, err);
}
