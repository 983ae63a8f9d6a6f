/* The tier's directory: made or recognised, locked, measured. */
#include "proto/base/check.h"
#include "proto/base/fault.h"
#include "storage/disk.h"
#include "storage/extent_file.h"
#include "storage/tier_internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define LOCK_NAME     "lock"
#define LOCK_TEXT     "kvist tier 1\n"
#define INDEX_NAME    "index"
#define EXTENTS_NAME  "extents"
#define MANIFEST      "MANIFEST-"
#define LARGEST_SHARE 8U /* a record larger than an eighth of the tier is refused */

static bool is_dots(const char *name)
{
    return strcmp(name, ".") == 0 || strcmp(name, "..") == 0;
}

/* A directory stream of its own on a directory, so that offsets are not shared. */
static DIR *list(int directory_fd, const char *name)
{
    int fd = openat(directory_fd, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
        return NULL;
    }
    DIR *listing = fdopendir(fd);
    if (listing == NULL) {
        (void)close(fd);
    }
    return listing;
}

/* Empty, but for what a new file system brings. */
static enum kvist_status check_empty(int directory_fd, const char *path, struct kvist_error *err)
{
    DIR *listing = list(directory_fd, ".");
    if (listing == NULL) {
        return kvist_error_set_errno(err, errno, "opendir", "cannot list %s", path);
    }
    enum kvist_status status = KVIST_OK;
    while (status == KVIST_OK) {
        errno = kvist_fault_point("tier.list") ? EIO : 0;
        /* NOLINTNEXTLINE(concurrency-mt-unsafe): own DIR */
        const struct dirent *entry = errno == 0 ? readdir(listing) : NULL;
        if (entry == NULL) {
            if (errno != 0) {
                status = kvist_error_set_errno(err, errno, "readdir", "cannot list %s", path);
            }
            break;
        }
        if (!is_dots(entry->d_name) && strcmp(entry->d_name, "lost+found") != 0 &&
            strncmp(entry->d_name, KVIST_TIER_CLEARED_NAME, strlen(KVIST_TIER_CLEARED_NAME)) != 0) {
            status = kvist_error_set(err,
                                     KVIST_INVALID,
                                     0,
                                     "tier",
                                     "%s holds '%.40s', which is not kvist's: give the tier an "
                                     "empty directory",
                                     path,
                                     entry->d_name);
        }
    }
    (void)closedir(listing);
    return status;
}

/* What the lock file says: kvist's, or nothing yet. */
static enum kvist_status
check_lock(int lock_fd, const char *path, bool *new_out, struct kvist_error *err)
{
    char text[sizeof(LOCK_TEXT)] = "";
    ssize_t got =
        kvist_fault_point("tier.lock") ? (errno = EIO, -1) : pread(lock_fd, text, sizeof(text), 0);
    if (got < 0) {
        return kvist_error_set_errno(err, errno, "read", "cannot read %.120s/" LOCK_NAME, path);
    }
    *new_out = got == 0;
    if (got != 0 &&
        (got != (ssize_t)strlen(LOCK_TEXT) || memcmp(text, LOCK_TEXT, strlen(LOCK_TEXT)) != 0)) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "tier",
                               "%s/" LOCK_NAME " is not of this version of kvist: give the tier "
                               "an empty directory",
                               path);
    }
    return KVIST_OK;
}

/* @param found_out  whether it is there at all */
static enum kvist_status check_directory(
    int directory_fd, const char *path, const char *name, bool *found_out, struct kvist_error *err)
{
    struct stat state;
    *found_out = fstatat(directory_fd, name, &state, AT_SYMLINK_NOFOLLOW) == 0;
    if (*found_out && !S_ISDIR(state.st_mode)) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "tier",
                               "%.120s/%s is not a directory: remove it, or give the tier an empty "
                               "directory (to have it elsewhere, set nvme.path)",
                               path,
                               name);
    }
    return KVIST_OK;
}

/* Files that would be opened by their names alone: others may lie there, and are left alone. */
static bool is_opened(const char *folder, const char *name)
{
    static const char *const of_index[] = {"CURRENT", "IDENTITY", "LOCK"}; /* RocksDB's */
    if (strcmp(folder, EXTENTS_NAME) == 0) {
        return kvist_extent_file_number(name) != 0;
    }
    bool found = strncmp(name, MANIFEST, strlen(MANIFEST)) == 0;
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(of_index); index++) {
        found = found || strcmp(name, of_index[index]) == 0;
    }
    return found;
}

/* What is in a directory of the tier and is called like its files is one. */
static enum kvist_status
check_files(int directory_fd, const char *path, const char *folder, struct kvist_error *err)
{
    DIR *listing = list(directory_fd, folder);
    if (listing == NULL) {
        return errno == ENOENT ? KVIST_OK /* it is made */
                               : kvist_error_set_errno(
                                     err, errno, "opendir", "cannot list %.120s/%s", path, folder);
    }
    enum kvist_status status = KVIST_OK;
    const struct dirent *entry = NULL;
    /* NOLINTNEXTLINE(concurrency-mt-unsafe): own DIR */
    while (status == KVIST_OK && (entry = readdir(listing)) != NULL) {
        struct stat state;
        if (is_opened(folder, entry->d_name) &&
            fstatat(dirfd(listing), entry->d_name, &state, AT_SYMLINK_NOFOLLOW) == 0 &&
            !S_ISREG(state.st_mode)) {
            status =
                kvist_error_set(err,
                                KVIST_INVALID,
                                0,
                                "tier",
                                "%.120s/%s/%.40s is no file of kvist's: remove it, or give the "
                                "tier an empty directory",
                                path,
                                folder,
                                entry->d_name);
        }
    }
    (void)closedir(listing);
    return status;
}

static enum kvist_status check_folders(int directory_fd, const char *path, struct kvist_error *err)
{
    static const char *const folders[] = {INDEX_NAME, EXTENTS_NAME};
    enum kvist_status status = KVIST_OK;
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(folders) && status == KVIST_OK; index++) {
        bool found = false;
        status = check_directory(directory_fd, path, folders[index], &found, err);
        if (status == KVIST_OK) {
            status = check_files(directory_fd, path, folders[index], err);
        }
    }
    return status;
}

static enum kvist_status check_all(int directory_fd, const char *path, struct kvist_error *err)
{
    bool found = false;
    int lock_fd = openat(directory_fd, LOCK_NAME, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (lock_fd < 0) {
        return errno == ENOENT ? check_empty(directory_fd, path, err)
                               : kvist_error_set_errno(
                                     err, errno, "open", "cannot open %.120s/" LOCK_NAME, path);
    }
    enum kvist_status status = check_lock(lock_fd, path, &found, err);
    (void)close(lock_fd);
    return status == KVIST_OK ? check_folders(directory_fd, path, err) : status;
}

enum kvist_status kvist_tier_check(const char *path, struct kvist_error *err)
{
    int directory_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory_fd < 0) {
        return errno == ENOENT ? KVIST_OK /* it is made */
                               : kvist_error_set_errno(err, errno, "open", "cannot open %s", path);
    }
    enum kvist_status status = check_all(directory_fd, path, err);
    (void)close(directory_fd);
    return status;
}

/* The lock file tells that the directory is kvist's; it is written first, and stays. */
static enum kvist_status lock_take(struct kvist_tier *tier, struct kvist_error *err)
{
    tier->lock_fd = openat(tier->directory_fd, LOCK_NAME, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (tier->lock_fd < 0 && errno == ENOENT) {
        enum kvist_status status = check_empty(tier->directory_fd, tier->path, err);
        if (status == KVIST_OK) {
            status = kvist_disk_check(tier->path, KVIST_TIER_INDEX_FREE_BYTES, err);
        }
        if (status != KVIST_OK) {
            return status;
        }
        tier->lock_fd =
            openat(tier->directory_fd, LOCK_NAME, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    }
    if (tier->lock_fd < 0) {
        return kvist_error_set_errno(
            err, errno, "open", "cannot open %.120s/" LOCK_NAME, tier->path);
    }
    if (flock(tier->lock_fd, LOCK_EX | LOCK_NB) != 0) {
        if (errno == EWOULDBLOCK) {
            return kvist_error_set(err,
                                   KVIST_EXISTS,
                                   0,
                                   "flock",
                                   "%s is in use by another kvistd: stop it, or give this one "
                                   "another directory",
                                   tier->path);
        }
        return kvist_error_set_errno(err, errno, "flock", "cannot lock %s/" LOCK_NAME, tier->path);
    }
    bool is_new = false;
    enum kvist_status status = check_lock(tier->lock_fd, tier->path, &is_new, err);
    if (status == KVIST_OK && is_new) {
        ssize_t written = pwrite(tier->lock_fd, LOCK_TEXT, strlen(LOCK_TEXT), 0);
        if (written != (ssize_t)strlen(LOCK_TEXT)) {
            return kvist_error_set_errno(err,
                                         written < 0 ? errno : ENOSPC,
                                         "write",
                                         "cannot write to %s/" LOCK_NAME,
                                         tier->path);
        }
    }
    return status;
}

static enum kvist_status
make_directory(const struct kvist_tier *tier, const char *name, struct kvist_error *err)
{
    if (mkdirat(tier->directory_fd, name, 0700) == 0) {
        return KVIST_OK;
    }
    int error_number = errno;
    bool found = false;
    enum kvist_status status = check_directory(tier->directory_fd, tier->path, name, &found, err);
    return status == KVIST_OK && !(found && error_number == EEXIST)
               ? kvist_error_set_errno(
                     err, error_number, "mkdir", "cannot make %.120s/%s", tier->path, name)
               : status;
}

enum kvist_status kvist_tier_disk_open(struct kvist_tier *tier, struct kvist_error *err)
{
    if (mkdir(tier->path, 0700) != 0 && errno != EEXIST) {
        return kvist_error_set_errno(err, errno, "mkdir", "cannot make %s", tier->path);
    }
    tier->directory_fd = kvist_fault_point("tier.open")
                             ? (errno = EIO, -1)
                             : open(tier->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (tier->directory_fd < 0) {
        return kvist_error_set_errno(err, errno, "open", "cannot open %s", tier->path);
    }
    enum kvist_status status = lock_take(tier, err);
    if (status == KVIST_OK) {
        status = make_directory(tier, INDEX_NAME, err);
    }
    if (status == KVIST_OK) {
        status = make_directory(tier, EXTENTS_NAME, err);
    }
    if (status == KVIST_OK) {
        status = check_folders(tier->directory_fd, tier->path, err);
    }
    tier->index_is_new = faccessat(tier->directory_fd, INDEX_NAME "/CURRENT", F_OK, 0) != 0;
    return status;
}

bool kvist_tier_may_pass(const char *path, int code)
{
    char current[4096]; /* RocksDB's: where it is, there has been a tier */
    switch (code) {
    case EIO:
    case ENXIO:
    case ENODEV:
    case ESTALE:
    case EUCLEAN:
    case ENOTCONN:
    case ETIMEDOUT:
        return true;
    case ENOSPC:
    case EDQUOT:
    case EROFS:
        (void)snprintf(current, sizeof(current), "%s/" INDEX_NAME "/CURRENT", path);
        return access(current, F_OK) == 0;
    default:
        return false;
    }
}

void kvist_tier_disk_close(struct kvist_tier *tier)
{
    if (tier->lock_fd >= 0) {
        (void)close(tier->lock_fd); /* ends the lock */
    }
    if (tier->directory_fd >= 0) {
        (void)close(tier->directory_fd);
    }
}

/* Blocks of a directory's entries; files come and go meanwhile. 0 or errno. */
static int directory_bytes(int directory_fd, const char *name, uint64_t *bytes_inout)
{
    DIR *listing = list(directory_fd, name);
    if (listing == NULL) {
        return errno;
    }
    int failure = 0;
    for (;;) {
        struct stat state;
        errno = 0;
        const struct dirent *entry = readdir(listing); /* NOLINT(concurrency-mt-unsafe): own DIR */
        if (entry == NULL) {
            failure = errno;
            break;
        }
        if (strcmp(entry->d_name, "..") != 0 &&
            fstatat(dirfd(listing), entry->d_name, &state, AT_SYMLINK_NOFOLLOW) == 0) {
            *bytes_inout += (uint64_t)state.st_blocks * 512;
        }
    }
    (void)closedir(listing);
    return failure;
}

/* No other file system was mounted there, and nobody has moved it and made one anew. A path that
   leads nowhere tells nothing: what is open says what is wrong. */
static bool is_in_place(const struct kvist_tier *tier)
{
    struct stat there;
    struct stat open_one;
    return stat(tier->path, &there) != 0 || fstat(tier->directory_fd, &open_one) != 0 ||
           (there.st_dev == open_one.st_dev && there.st_ino == open_one.st_ino);
}

enum kvist_status kvist_tier_disk_sample(const struct kvist_tier *tier,
                                         uint64_t *other_bytes_out,
                                         uint64_t *index_bytes_out,
                                         struct kvist_error *err)
{
    uint64_t index_bytes = 0;
    uint64_t top_bytes = 0; /* the directories themselves and the lock */
    if (!is_in_place(tier)) {
        return kvist_error_set(err,
                               KVIST_NOT_FOUND,
                               0,
                               "tier",
                               "%.120s is another directory than the one that the tier has open: "
                               "restart kvistd to use it",
                               tier->path);
    }
    int failure = directory_bytes(tier->directory_fd, INDEX_NAME, &index_bytes);
    if (failure == 0) {
        failure = directory_bytes(tier->directory_fd, ".", &top_bytes);
    }
    if (failure != 0) {
        return kvist_error_set_errno(err,
                                     failure,
                                     "opendir",
                                     failure == ENOENT
                                         ? "%.120s is gone: restart kvistd to begin anew"
                                         : "cannot look into %.120s",
                                     tier->path);
    }
    *index_bytes_out = index_bytes;
    *other_bytes_out = index_bytes + top_bytes;
    return KVIST_OK;
}

static uint64_t index_reserve(const struct kvist_tier *tier, uint64_t unfilled_bytes)
{
    uint64_t records_more = unfilled_bytes / KVIST_EXTENT_HIT_BYTES + tier->records_since;
    uint64_t tables_bytes = tier->index_bytes;
    uint64_t beside_bytes = tier->other_bytes - tier->index_bytes;
    return beside_bytes +
           kvist_tier_index_reserve(tier->memtable_bytes, tables_bytes, records_more);
}

int64_t kvist_tier_room(const struct kvist_tier *tier, const struct kvist_extents_totals *totals)
{
    uint64_t used = totals->disk_bytes + index_reserve(tier, totals->unfilled_bytes);
    return (int64_t)tier->bytes_max - (int64_t)used;
}

uint64_t kvist_tier_record_bytes_max(const struct kvist_tier *tier)
{
    return tier->bytes_max / LARGEST_SHARE;
}

enum kvist_status kvist_tier_disk_sync(const struct kvist_tier *tier, struct kvist_error *err)
{
    enum kvist_status status = kvist_extents_sync(tier->extents, err);
    return status == KVIST_OK ? kvist_tier_index_sync(tier->index, err) : status;
}
