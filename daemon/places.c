#include "daemon/places.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#define NVME_KEY   "nvme.path"
#define PLACES_MAX (KVIST_CONFIG_SOCKETS_MAX + 3) /* daemon.socket, metrics, nvme.path */

/* A directory, whatever it was called, and a name in it. */
struct place {
    const char *key;
    const char *path; /* as configured */
    struct stat directory;
    char name[KVIST_CONFIG_TEXT_BYTES];
};

struct places {
    struct place at[PLACES_MAX];
    size_t count;
};

/* What cannot be looked at is no place: whoever uses it says why. */
static void add(struct places *places, const char *key, const char *path)
{
    struct place *place = &places->at[places->count];
    char directory[KVIST_CONFIG_TEXT_BYTES];
    (void)snprintf(directory, sizeof(directory), "%s", path);
    size_t length = strlen(directory);
    while (length > 1 && directory[length - 1] == '/') {
        directory[--length] = '\0';
    }
    char *slash = strrchr(directory, '/');
    if (slash == NULL) {
        return;
    }
    (void)snprintf(place->name, sizeof(place->name), "%s", slash + 1);
    slash[slash == directory ? 1 : 0] = '\0';
    if (stat(directory, &place->directory) == 0) {
        place->key = key;
        place->path = path;
        places->count++;
    }
}

static bool is_same_file(const struct stat *one, const struct stat *other)
{
    return one->st_dev == other->st_dev && one->st_ino == other->st_ino;
}

/* Whether a name is another's, or its lock's. */
static bool is_lock_of(const char *name, const char *of)
{
    size_t length = strlen(of);
    return strncmp(name, of, length) == 0 &&
           (name[length] == '\0' || strcmp(name + length, KVIST_LISTENER_LOCK) == 0);
}

static enum kvist_status
check_pair(const struct place *one, const struct place *other, struct kvist_error *err)
{
    if (!is_same_file(&one->directory, &other->directory) ||
        (!is_lock_of(one->name, other->name) && !is_lock_of(other->name, one->name))) {
        return KVIST_OK;
    }
    return kvist_error_set(
        err,
        KVIST_INVALID,
        0,
        "config",
        "%s = %.107s is where %s is, or the lock beside it (PATH" KVIST_LISTENER_LOCK
        "): name another path",
        other->key,
        other->path,
        one->key);
}

/* A tier's directory is the tier's alone. */
static enum kvist_status
check_tier(const struct place *place, const struct stat *tier, struct kvist_error *err)
{
    return is_same_file(&place->directory, tier)
               ? kvist_error_set(err,
                                 KVIST_INVALID,
                                 0,
                                 "config",
                                 "%s = %.107s is in the directory of " NVME_KEY
                                 ", which must be the NVMe tier's own: name another path",
                                 place->key,
                                 place->path)
               : KVIST_OK;
}

static enum kvist_status
check_places(const struct places *places, const char *nvme_path, struct kvist_error *err)
{
    struct stat tier;
    bool has_tier = nvme_path[0] != '\0' && stat(nvme_path, &tier) == 0;
    enum kvist_status status = KVIST_OK;
    for (size_t index = 0; index < places->count && status == KVIST_OK; index++) {
        const struct place *at = &places->at[index];
        for (size_t first = 0; first < index && status == KVIST_OK; first++) {
            status = check_pair(&places->at[first], at, err);
        }
        if (status == KVIST_OK && has_tier && at->path != nvme_path) {
            status = check_tier(at, &tier, err);
        }
    }
    return status;
}

enum kvist_status kvist_places_check(const struct kvist_config *config,
                                     const struct kvist_http_address *address,
                                     bool passed,
                                     struct kvist_error *err)
{
    struct places places = {.count = 0};
    const char *group = config->daemon_socket_group;
    enum kvist_status status = KVIST_OK;
    if (config->nvme_path[0] != '\0') {
        add(&places, NVME_KEY, config->nvme_path);
    }
    if (!passed) {
        status = kvist_listener_check("daemon.socket", config->daemon_socket, group, err);
        add(&places, "daemon.socket", config->daemon_socket);
    }
    for (size_t index = 0; index < config->limits_count && status == KVIST_OK; index++) {
        const char *path = config->limits[index].socket;
        if (path[0] != '\0') {
            status = kvist_listener_check(KVIST_PLACE_TENANT, path, group, err);
            add(&places, KVIST_PLACE_TENANT, path);
        }
    }
    if (status == KVIST_OK && address->kind == KVIST_HTTP_UNIX) {
        status = kvist_listener_check(KVIST_HTTP_KEY, address->path, "", err);
        add(&places, KVIST_HTTP_KEY, address->path);
    }
    return status == KVIST_OK ? check_places(&places, config->nvme_path, err) : status;
}
