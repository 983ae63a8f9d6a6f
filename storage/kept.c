#include "storage/kept.h"

#include "proto/shm/memfd.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static struct kvist_kept_place parse_name(const char *name)
{
    struct kvist_kept_place place = {.kind = 0};
    char *end = NULL;
    unsigned long serial = strtoul(name + 1, &end, 16);
    if (strchr("mspdr", name[0]) != NULL && name[0] != '\0' && name[1] != '\0' && *end == '\0' &&
        serial <= UINT32_MAX) {
        place.kind = name[0];
        place.serial = (uint32_t)serial;
    }
    return place;
}

bool kvist_kept_init(struct kvist_kept *kept, const struct kvist_store_options *options)
{
    *kept = (struct kvist_kept){.fds = options->kept, .count = options->kept_count};
    kept->places = calloc(kept->count, sizeof(kept->places[0]));
    for (size_t place = 0; kept->places != NULL && place < kept->count; place++) {
        kept->places[place] = parse_name(kept->fds[place].name);
    }
    return kept->places != NULL;
}

void kvist_kept_fini(struct kvist_kept *kept)
{
    free(kept->places);
    kept->places = NULL;
}

/* Pidfds say whose they are when their process is known; the roster has its instance within. */
uint32_t kvist_kept_check(struct kvist_kept *kept, uint64_t arena)
{
    uint32_t mistaken = 0;
    for (size_t index = 0; index < kept->count; index++) {
        struct kvist_kept_place *place = &kept->places[index];
        char name[KVIST_MEMFD_NAME_BYTES + 1];
        kvist_memfd_name(place->kind, place->serial, arena, name);
        if (place->kind != 0 && place->kind != KVIST_KEPT_PIDFD &&
            place->kind != KVIST_KEPT_ROSTER &&
            !kvist_memfd_is_named(kept->fds[index].fd, name)) {
            place->kind = 0;
            mistaken++;
        }
    }
    return mistaken;
}

static size_t
place_of(const struct kvist_kept *kept, enum kvist_kept_kind kind, uint32_t serial, size_t first)
{
    size_t place = first;
    while (place < kept->count && (kept->places[place].kind != (char)kind ||
                                   kept->places[place].serial != serial)) {
        place++;
    }
    return place;
}

int kvist_kept_look(const struct kvist_kept *kept, enum kvist_kept_kind kind, uint32_t serial)
{
    size_t place = place_of(kept, kind, serial, 0);
    return place < kept->count && place_of(kept, kind, serial, place + 1) == kept->count
               ? kept->fds[place].fd
               : -1;
}

void kvist_kept_take(struct kvist_kept *kept, enum kvist_kept_kind kind, uint32_t serial)
{
    size_t place = place_of(kept, kind, serial, 0);
    kept->places[place].taken = true;
    kept->fds[place].fd = -1;
}

bool kvist_kept_is_pidfd(int fd, uint32_t pid, uint64_t inode)
{
    struct stat info;
    char path[48];
    char line[128];
    long of = 0; /* -1: it has ended */
    bool found = false;
    (void)snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", fd);
    FILE *file = fd >= 0 ? fopen(path, "re") : NULL;
    while (file != NULL && !found && fgets(line, sizeof(line), file) != NULL) {
        found = strncmp(line, "Pid:", 4) == 0;
        of = found ? strtol(line + 4, NULL, 10) : 0;
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    /* 0: its number is not visible from here, or was not when it was kept. */
    return found && fstat(fd, &info) == 0 && info.st_ino == inode &&
           (of <= 0 || pid == 0 || of == (long)pid);
}

static uint64_t segment_bytes(const struct kvist_kept_fd *fd)
{
    struct stat info;
    return fd->name[0] == KVIST_KEPT_SEGMENT && fd->fd >= 0 && fstat(fd->fd, &info) == 0
               ? (uint64_t)info.st_blocks * 512
               : 0;
}

uint64_t kvist_kept_segment_bytes(const struct kvist_kept *kept)
{
    uint64_t bytes = 0;
    for (size_t place = 0; place < kept->count; place++) {
        bytes += segment_bytes(&kept->fds[place]);
    }
    return bytes;
}

void kvist_kept_untake(struct kvist_kept *kept)
{
    for (size_t place = 0; place < kept->count; place++) {
        kept->places[place].taken = false;
    }
}

/* To forget a name is to forget all that is kept under it. */
static bool is_in_use(const struct kvist_kept *kept, const char *name)
{
    for (size_t place = 0; place < kept->count; place++) {
        if (kept->places[place].taken && strcmp(kept->fds[place].name, name) == 0) {
            return true;
        }
    }
    return false;
}

uint64_t kvist_kept_release(struct kvist_kept *kept, const struct kvist_store_options *options)
{
    uint64_t bytes = 0;
    for (size_t place = 0; place < kept->count; place++) {
        struct kvist_kept_fd *fd = &kept->fds[place];
        bytes += segment_bytes(fd);
        if (fd->fd >= 0) {
            (void)close(fd->fd);
            fd->fd = -1;
        }
        if (!kept->places[place].taken && !is_in_use(kept, fd->name) &&
            options->keeper.forget != NULL) {
            options->keeper.forget(options->ctx, fd->name);
        }
    }
    return bytes;
}
