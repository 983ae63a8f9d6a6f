#include "daemon/machine.h"

#include "storage/tier.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define HUGE_PAGE_BYTES (2ULL << 20)
#define AUTO_SHARE      4U /* arena_bytes = auto: one part in so many */
/* What kvistd needs beside its arena, and its cgroup counts as well: code, threads, RocksDB, pages of
   sessions; and of an arena of small blocks one part in so many for the maps. */
#define OWN_BYTES (32ULL << 20)
#define OWN_SHARE 32U
#define OWN_FILES (KVIST_FILES_MIN / 2) /* RocksDB's, extents of a small tier, events, sockets */

/* "1536 MiB" or so: for people, so rounded down. */
static const char *readable(uint64_t bytes, char text_out[32])
{
    (void)snprintf(text_out, 32, "%llu MiB", (unsigned long long)(bytes >> 20));
    return text_out;
}

static enum kvist_status
read_available(const char *root, uint64_t *bytes_out, struct kvist_error *err)
{
    char path[PATH_MAX];
    (void)snprintf(path, sizeof(path), "%s/proc/meminfo", root);
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return kvist_error_set_errno(err, errno, "open", "cannot read %s", path);
    }
    char line[256];
    unsigned long long kib = 0;
    bool found = false;
    while (!found && fgets(line, sizeof(line), file) != NULL) {
        found = sscanf(line, "MemAvailable: %llu kB", &kib) == 1;
    }
    (void)fclose(file);
    if (!found) {
        return kvist_error_set(
            err, KVIST_SYSTEM, 0, "meminfo", "%s does not say MemAvailable", path);
    }
    *bytes_out = (uint64_t)kib << 10;
    return KVIST_OK;
}

/* One limit file; absent, unreadable or "max": none. */
static uint64_t read_limit(const char *path)
{
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return UINT64_MAX;
    }
    unsigned long long bytes = 0;
    bool found = fscanf(file, "%llu", &bytes) == 1;
    (void)fclose(file);
    return found ? bytes : UINT64_MAX;
}

/* The lowest limit of a group and of those above it. */
static uint64_t read_limits(const char *root, const char *mount, char *group, const char *name)
{
    uint64_t least = UINT64_MAX;
    for (;;) {
        char path[2 * PATH_MAX];
        (void)snprintf(path, sizeof(path), "%s%s%s/%s", root, mount, group, name);
        uint64_t limit = read_limit(path);
        least = limit < least ? limit : least;
        char *slash = strrchr(group, '/');
        if (slash == NULL) {
            return least;
        }
        *slash = '\0';
    }
}

/* Whether "cpu,memory" or so names memory: of cgroup v1, where a hierarchy has some controllers. */
static bool has_memory(const char *controllers, size_t length)
{
    while (length > 0) {
        size_t one = strcspn(controllers, ",:");
        if (one == strlen("memory") && strncmp(controllers, "memory", one) == 0) {
            return true;
        }
        size_t step = one < length ? one + 1 : length;
        controllers += step;
        length -= step;
    }
    return false;
}

/* Lines are NUMBER:CONTROLLERS:GROUP, of v2 without controllers. */
static uint64_t read_cgroup(const char *root)
{
    char path[PATH_MAX];
    (void)snprintf(path, sizeof(path), "%s/proc/self/cgroup", root);
    FILE *file = fopen(path, "re");
    char line[PATH_MAX] = "";
    uint64_t least = UINT64_MAX;
    while (file != NULL && fgets(line, sizeof(line), file) != NULL) {
        uint64_t limit = UINT64_MAX;
        const char *controllers = strchr(line, ':');
        char *group = controllers != NULL ? strchr(++controllers, ':') : NULL;
        if (group == NULL) {
            continue;
        }
        size_t length = (size_t)(group - controllers);
        *strchrnul(++group, '\n') = '\0';
        if (length == 0) {
            limit = read_limits(root, "/sys/fs/cgroup", group, "memory.max");
        } else if (has_memory(controllers, length)) {
            limit = read_limits(root, "/sys/fs/cgroup/memory", group, "memory.limit_in_bytes");
        }
        least = limit < least ? limit : least;
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    return least;
}

enum kvist_status
kvist_machine_read(const char *root, struct kvist_machine *machine_out, struct kvist_error *err)
{
    struct kvist_machine machine = {.cgroup_bytes = read_cgroup(root)};
    enum kvist_status status = read_available(root, &machine.available_bytes, err);
    if (status == KVIST_OK) {
        *machine_out = machine;
    }
    return status;
}

/* The arena that a cgroup has room for. Over its limit is no error, but the end of kvistd. */
static uint64_t cgroup_leaves(uint64_t limit_bytes)
{
    uint64_t bytes = limit_bytes > OWN_BYTES ? limit_bytes - OWN_BYTES : 0;
    return limit_bytes == UINT64_MAX ? limit_bytes : bytes - bytes / (OWN_SHARE + 1);
}

uint64_t kvist_machine_arena_max(const struct kvist_machine *machine)
{
    uint64_t bytes = cgroup_leaves(machine->cgroup_bytes);
    return bytes < machine->available_bytes ? bytes : machine->available_bytes;
}

enum kvist_status kvist_machine_fit_memory(const struct kvist_machine *machine,
                                           struct kvist_config *config,
                                           struct kvist_error *err)
{
    uint64_t room = kvist_machine_arena_max(machine);
    const char *bound = room < machine->available_bytes
                            ? "what the memory limit of kvistd's cgroup leaves beside its own needs"
                            : "available memory";
    char wanted[32];
    char there[32];
    uint64_t arena = config->memory_arena_bytes;
    if (arena == 0) {
        arena = room / AUTO_SHARE / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
        arena = arena > KVIST_ARENA_BYTES_MIN ? arena : KVIST_ARENA_BYTES_MIN;
    }
    if (arena > room) {
        return kvist_error_set(
            err,
            KVIST_INVALID,
            0,
            "config",
            "memory.arena_bytes is %s, over %s (%s): set it lower, or make room",
            readable(arena, wanted),
            bound,
            readable(room, there));
    }
    config->memory_arena_bytes = arena;
    return KVIST_OK;
}

/* The directory that a missing nvme.path would be made in. */
static void parent_of(const char *path, char parent_out[KVIST_CONFIG_TEXT_BYTES])
{
    (void)snprintf(parent_out, KVIST_CONFIG_TEXT_BYTES, "%s", path);
    size_t length = strlen(parent_out);
    while (length > 1 && parent_out[length - 1] == '/') {
        parent_out[--length] = '\0';
    }
    char *slash = strrchr(parent_out, '/');
    slash[slash == parent_out ? 1 : 0] = '\0';
}

static enum kvist_status check_directory(const char *path, struct kvist_error *err)
{
    struct stat info;
    if (stat(path, &info) != 0) {
        return errno == ENOENT
                   ? kvist_error_set(err,
                                     KVIST_NOT_FOUND,
                                     ENOENT,
                                     "nvme.path",
                                     "the directory %s of nvme.path does not exist: create it, or "
                                     "correct nvme.path",
                                     path)
                   : kvist_error_set_errno(
                         err, errno, "nvme.path", "cannot look at %s of nvme.path", path);
    }
    if (!S_ISDIR(info.st_mode)) {
        return kvist_error_set(
            err, KVIST_INVALID, 0, "nvme.path", "%s of nvme.path is not a directory", path);
    }
    if (faccessat(AT_FDCWD, path, W_OK | X_OK, AT_EACCESS) != 0) {
        return kvist_error_set_errno(err,
                                     errno,
                                     "nvme.path",
                                     "kvistd (uid %u) cannot write in %s of nvme.path",
                                     (unsigned)geteuid(),
                                     path);
    }
    return KVIST_OK;
}

/* The directory of the tier, or the one that it would be made in; and its file system's figures. */
static enum kvist_status look_at(const struct kvist_config *config,
                                 char path_out[KVIST_CONFIG_TEXT_BYTES],
                                 struct statvfs *disk_out,
                                 struct kvist_error *err)
{
    struct stat info;
    (void)snprintf(path_out, KVIST_CONFIG_TEXT_BYTES, "%s", config->nvme_path);
    if (stat(path_out, &info) != 0 && errno == ENOENT) {
        parent_of(config->nvme_path, path_out);
    }
    enum kvist_status status = check_directory(path_out, err);
    if (status == KVIST_OK && statvfs(path_out, disk_out) != 0) {
        status = kvist_error_set_errno(
            err, errno, "statvfs", "cannot ask for the size of %s", path_out);
    }
    return status;
}

enum kvist_status kvist_machine_fit_nvme(const struct kvist_config *config, struct kvist_error *err)
{
    char path[KVIST_CONFIG_TEXT_BYTES];
    struct statvfs disk;
    if (config->nvme_path[0] == '\0') {
        return KVIST_OK;
    }
    uint64_t extent_bytes_max = config->nvme_bytes / KVIST_TIER_EXTENTS_MIN;
    if (config->nvme_extent_bytes > extent_bytes_max) {
        char most[32];
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "config",
                               "nvme.extent_bytes is over 1/%u of nvme.bytes, %s: set it lower, or "
                               "leave it at auto",
                               KVIST_TIER_EXTENTS_MIN,
                               readable(extent_bytes_max, most));
    }
    enum kvist_status status = look_at(config, path, &disk, err);
    if (status != KVIST_OK) {
        return kvist_tier_may_pass(config->nvme_path, err->code) ? KVIST_OK : status;
    }
    uint64_t disk_bytes = (uint64_t)disk.f_blocks * disk.f_frsize;
    if (config->nvme_bytes > disk_bytes) {
        char wanted[32];
        char there[32];
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "config",
                               "nvme.bytes is %s, but the file system of %s has %s in all: set it "
                               "lower, or use a larger one",
                               readable(config->nvme_bytes, wanted),
                               path,
                               readable(disk_bytes, there));
    }
    return KVIST_OK;
}

enum kvist_status kvist_machine_check_room(const struct kvist_config *config,
                                           struct kvist_error *err)
{
    char path[KVIST_CONFIG_TEXT_BYTES];
    struct statvfs disk;
    char there[32];
    if (config->nvme_path[0] == '\0') {
        return KVIST_OK;
    }
    enum kvist_status status = look_at(config, path, &disk, err);
    uint64_t free_bytes = status == KVIST_OK ? (uint64_t)disk.f_bavail * disk.f_frsize : 0;
    if (status == KVIST_OK && free_bytes < KVIST_TIER_INDEX_FREE_BYTES) {
        status = kvist_error_set(err,
                                 KVIST_NO_SPACE,
                                 ENOSPC,
                                 "statvfs",
                                 "the file system of %.100s has %s left, and the NVMe tier needs "
                                 "%u MiB to be opened: free space there",
                                 path,
                                 readable(free_bytes, there),
                                 KVIST_TIER_INDEX_FREE_BYTES >> 20);
    }
    return status;
}

bool kvist_machine_has_huge_pages(const char *root)
{
    char path[PATH_MAX];
    char line[128] = "";
    (void)snprintf(path, sizeof(path), "%s/sys/kernel/mm/transparent_hugepage/shmem_enabled", root);
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return false;
    }
    bool read = fgets(line, sizeof(line), file) != NULL;
    (void)fclose(file);
    return read && strchr(line, '[') != NULL && strstr(line, "[never]") == NULL &&
           strstr(line, "[deny]") == NULL;
}

uint64_t kvist_machine_raise_files(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) {
        return 0;
    }
    if (limit.rlim_cur < limit.rlim_max) {
        rlim_t before = limit.rlim_cur;
        limit.rlim_cur = limit.rlim_max;
        if (setrlimit(RLIMIT_NOFILE, &limit) != 0) {
            return before;
        }
    }
    return limit.rlim_cur;
}

enum kvist_status kvist_machine_check_files(uint64_t files_max, struct kvist_error *err)
{
    return files_max >= KVIST_FILES_MIN
               ? KVIST_OK
               : kvist_error_set(err,
                                 KVIST_INVALID,
                                 0,
                                 "config",
                                 "the limit of open files is %llu, and kvistd needs %u at least, "
                                 "%u on a busy host: raise LimitNOFILE= or ulimit -n",
                                 (unsigned long long)files_max,
                                 KVIST_FILES_MIN,
                                 KVIST_FILES_WANTED);
}

uint32_t kvist_machine_segments_max(uint64_t files_max)
{
    uint64_t segments = (files_max - OWN_FILES) / 2;
    return segments < UINT32_MAX ? (uint32_t)segments : UINT32_MAX;
}

uint64_t kvist_machine_file_bytes_max(void)
{
    struct rlimit limit;
    bool bounded = getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
    return bounded ? limit.rlim_cur : UINT64_MAX;
}
