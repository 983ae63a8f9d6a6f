#include "daemon/listener.h"

#include "proto/base/log.h"

#include <systemd/sd-daemon.h>

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define BACKLOG         4096 /* the kernel cuts it to net.core.somaxconn */
#define GROUP_BYTES_MAX 16384
#define LOCK_PATH_BYTES (KVIST_SOCKET_PATH_BYTES + 8)

/* --- From systemd ---------------------------------------------------------------------------- */

static void free_names(char **names)
{
    for (size_t index = 0; names != NULL && names[index] != NULL; index++) {
        free(names[index]);
    }
    free(names);
}

static bool is_taken(const struct kvist_fdstore *fdstore, int fd)
{
    size_t index = 0;
    while (index < fdstore->passed_count && fdstore->passed[index].fd != fd) {
        index++;
    }
    return index < fdstore->passed_count;
}

/* Close what is neither the listening socket nor the store's. */
static void let_go(struct kvist_fdstore *fdstore, char **names, int passed, int listening)
{
    int count = 0;
    const char *first = "";
    for (int index = 0; index < passed; index++) {
        int fd = SD_LISTEN_FDS_START + index;
        if (fd != listening && !is_taken(fdstore, fd)) {
            first = count++ == 0 ? names[index] : first;
            kvist_fdstore_let_go(fdstore, names[index], fd);
        }
    }
    if (count > 0) {
        kvist_log(KVIST_LOG_WARN,
                  "passed fds are not used count=%d first=\"%s\" reason=\"%s\" action=closed",
                  count,
                  first,
                  fdstore->max == 0 ? "FDSTORE is not set" : "not kvistd's");
    }
}

/* Of a socket unit, and not some stored end of a connection. */
static bool is_served(int fd)
{
    struct sockaddr_storage peer;
    socklen_t length = sizeof(peer);
    return getpeername(fd, (struct sockaddr *)&peer, &length) != 0 && errno == ENOTCONN;
}

/* @return the listening Unix stream socket among those that were passed, or -1 */
static int sort_passed(struct kvist_fdstore *fdstore, char **names, int passed, int *sockets_out)
{
    int listening = -1;
    *sockets_out = 0;
    for (int index = 0; index < passed; index++) {
        int fd = SD_LISTEN_FDS_START + index;
        *sockets_out += is_served(fd);
        if (!kvist_fdstore_offer(fdstore, names[index], fd) && listening < 0 &&
            sd_is_socket_unix(fd, SOCK_STREAM, 1, NULL, 0) > 0) {
            listening = fd;
        }
    }
    return listening;
}

enum kvist_status kvist_listener_take_passed(struct kvist_listener *listener_out,
                                             struct kvist_fdstore *fdstore,
                                             struct kvist_error *err)
{
    struct kvist_listener listener = KVIST_LISTENER_INIT;
    char **names = NULL;
    int sockets = 0;
    int passed = sd_listen_fds_with_names(1, &names);
    if (passed < 0) {
        kvist_log(
            KVIST_LOG_WARN, "cannot read what systemd passed errno=%d action=ignored", -passed);
    }
    listener.fd = sort_passed(fdstore, names, passed, &sockets);
    let_go(fdstore, names, passed, listener.fd);
    free_names(names);
    if (listener.fd < 0) {
        return sockets == 0 ? KVIST_NOT_FOUND
                            : kvist_error_set(
                                  err,
                                  KVIST_INVALID,
                                  0,
                                  "systemd",
                                  "systemd passed %d sockets and none is a listening Unix stream "
                                  "socket: see ListenStream= of kvistd.socket",
                                  sockets);
    }
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    socklen_t length = sizeof(address);
    if (fcntl(listener.fd, F_SETFL, O_NONBLOCK) != 0 ||
        getsockname(listener.fd, (struct sockaddr *)&address, &length) != 0) {
        int error_number = errno;
        (void)close(listener.fd);
        return kvist_error_set_errno(
            err, error_number, "systemd", "cannot use the socket that systemd passed");
    }
    (void)snprintf(listener.path, sizeof(listener.path), "%.107s", address.sun_path);
    *listener_out = listener;
    return KVIST_OK;
}

/* --- Made here ------------------------------------------------------------------------------- */

static enum kvist_status
open_lock(const char *path, int flags, const char *key, int *fd_out, struct kvist_error *err)
{
    *fd_out = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | flags, 0600);
    return *fd_out >= 0
               ? KVIST_OK
               : kvist_error_set_errno(err, errno, key, "%s: cannot make the lock %s", key, path);
}

static void name_lock(const char *path, char lock_out[LOCK_PATH_BYTES])
{
    (void)snprintf(lock_out, LOCK_PATH_BYTES, "%s" KVIST_LISTENER_LOCK, path);
}

static enum kvist_status lock_path(struct kvist_listener *listener, struct kvist_error *err)
{
    char path[LOCK_PATH_BYTES];
    int fd = -1;
    name_lock(listener->path, path);
    enum kvist_status status = open_lock(path, O_CREAT, listener->key, &fd, err);
    if (status != KVIST_OK) {
        return status;
    }
    char pid[16] = "";
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        int error_number = errno;
        ssize_t length = pread(fd, pid, sizeof(pid) - 1, 0);
        pid[length > 0 ? length : 0] = '\0';
        pid[strspn(pid, "0123456789")] = '\0';
        (void)close(fd);
        return error_number != EWOULDBLOCK
                   ? kvist_error_set_errno(err, error_number, "flock", "cannot lock %s", path)
                   : kvist_error_set(err,
                                     KVIST_EXISTS,
                                     0,
                                     listener->key,
                                     "another kvistd (pid %s) serves on %s: stop it, or choose "
                                     "another %s",
                                     pid[0] != '\0' ? pid : "unknown",
                                     listener->path,
                                     listener->key);
    }
    int length = snprintf(pid, sizeof(pid), "%d\n", (int)getpid());
    if (ftruncate(fd, 0) != 0 || pwrite(fd, pid, (size_t)length, 0) != length) {
        kvist_log(KVIST_LOG_WARN, "cannot note the pid path=%s action=ignored", path);
    }
    listener->lock_fd = fd;
    return KVIST_OK;
}

/* 0 when somebody answers there, else the errno of connect(2). */
static int probe(const struct sockaddr_un *address)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return errno;
    }
    int result = connect(fd, (const struct sockaddr *)address, sizeof(*address)) == 0 ? 0 : errno;
    (void)close(fd);
    return result == EAGAIN ? 0 : result; /* its backlog is full: it lives */
}

/* Before anything is made there: what is at the path is a socket, or nothing. */
static enum kvist_status
check_path(const char *path, const char *key, bool *found_out, struct kvist_error *err)
{
    struct stat info;
    *found_out = lstat(path, &info) == 0;
    if (!*found_out) {
        return errno == ENOENT || errno == ENOTDIR
                   ? KVIST_OK
                   : kvist_error_set_errno(err, errno, key, "%s: cannot look at %s", key, path);
    }
    if (!S_ISSOCK(info.st_mode)) {
        return kvist_error_set(err,
                               KVIST_EXISTS,
                               0,
                               key,
                               "%s exists and is not a socket: remove it, or choose another %s",
                               path,
                               key);
    }
    return KVIST_OK;
}

/* We hold the lock: what is at the path is a dead daemon's, or not ours to touch. */
static enum kvist_status clear_path(const struct kvist_listener *listener,
                                    const struct sockaddr_un *address,
                                    struct kvist_error *err)
{
    const char *path = listener->path;
    const char *key = listener->key;
    bool found = false;
    enum kvist_status status = check_path(path, key, &found, err);
    if (status != KVIST_OK || !found) {
        return status;
    }
    int answer = probe(address);
    if (answer == 0) {
        return kvist_error_set(err,
                               KVIST_EXISTS,
                               0,
                               key,
                               "somebody listens on %s already (a socket unit of systemd, or "
                               "another program): stop it, or choose another %s",
                               path,
                               key);
    }
    if (answer != ECONNREFUSED) {
        return kvist_error_set_errno(
            err, answer, key, "cannot tell whether somebody listens on %s", path);
    }
    if (unlink(path) != 0) {
        return kvist_error_set_errno(err, errno, key, "cannot remove %s of a dead kvistd", path);
    }
    kvist_log(KVIST_LOG_INFO, "socket of a dead daemon removed path=%s", path);
    return KVIST_OK;
}

/* Whether a file of ours may be given to a group: asked of one that nobody sees. */
static enum kvist_status check_group(const char *name, gid_t group, struct kvist_error *err)
{
    int fd = memfd_create("group", MFD_CLOEXEC);
    int error_number = fd >= 0 && fchown(fd, (uid_t)-1, group) != 0 ? errno : 0;
    if (fd >= 0) {
        (void)close(fd);
    }
    return error_number == 0
               ? KVIST_OK
               : kvist_error_set_errno(err,
                                       error_number,
                                       "config",
                                       "daemon.socket_group = %s: kvistd (uid %u) is not in that "
                                       "group and cannot give it the socket",
                                       name,
                                       (unsigned)geteuid());
}

static enum kvist_status find_group(const char *name, gid_t *group_out, struct kvist_error *err)
{
    *group_out = (gid_t)-1;
    if (name[0] == '\0') {
        return KVIST_OK;
    }
    char *buffer = malloc(GROUP_BYTES_MAX);
    if (buffer == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, ENOMEM, "config", "no memory");
    }
    struct group entry;
    struct group *found = NULL;
    (void)getgrnam_r(name, &entry, buffer, GROUP_BYTES_MAX, &found);
    if (found != NULL) {
        *group_out = found->gr_gid;
    }
    free(buffer);
    return found != NULL ? check_group(name, *group_out, err)
                         : kvist_error_set(err,
                                           KVIST_INVALID,
                                           0,
                                           "config",
                                           "daemon.socket_group = %s: there is no such group",
                                           name);
}

/* One that is there is opened; none is made. */
static enum kvist_status check_lock(const char *path, const char *key, struct kvist_error *err)
{
    char lock[LOCK_PATH_BYTES];
    struct stat info;
    int fd = -1;
    name_lock(path, lock);
    if (lstat(lock, &info) != 0) {
        return KVIST_OK;
    }
    enum kvist_status status = open_lock(lock, 0, key, &fd, err);
    if (status == KVIST_OK) {
        (void)close(fd);
    }
    return status;
}

static enum kvist_status check_directory(const char *path, const char *key, struct kvist_error *err)
{
    char directory[KVIST_SOCKET_PATH_BYTES];
    const char *slash = strrchr(path, '/');
    int length = slash == NULL || slash == path ? 1 : (int)(slash - path);
    (void)snprintf(directory, sizeof(directory), "%.*s", length, slash == NULL ? "." : path);
    struct stat info;
    if (stat(directory, &info) != 0) {
        return errno == ENOENT
                   ? kvist_error_set(
                         err,
                         KVIST_NOT_FOUND,
                         ENOENT,
                         key,
                         "the directory of %s = %s does not exist: create it, or choose "
                         "another path",
                         key,
                         path)
                   : kvist_error_set_errno(
                         err, errno, key, "cannot look at %s of %s", directory, key);
    }
    if (!S_ISDIR(info.st_mode)) {
        return kvist_error_set(
            err, KVIST_INVALID, 0, key, "%s of %s = %s is not a directory", directory, key, path);
    }
    return faccessat(AT_FDCWD, directory, W_OK | X_OK, AT_EACCESS) == 0
               ? KVIST_OK
               : kvist_error_set_errno(err,
                                       errno,
                                       key,
                                       "kvistd (uid %u) cannot write in %s of %s",
                                       (unsigned)geteuid(),
                                       directory,
                                       key);
}

enum kvist_status kvist_listener_check(const char *key,
                                       const char *path,
                                       const char *group_name,
                                       struct kvist_error *err)
{
    if (strlen(path) >= KVIST_SOCKET_PATH_BYTES) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               key,
                               "%s: a socket's path has at most %u bytes",
                               key,
                               (unsigned)KVIST_SOCKET_PATH_BYTES - 1);
    }
    gid_t group = (gid_t)-1;
    bool found = false;
    enum kvist_status status = check_directory(path, key, err);
    if (status == KVIST_OK) {
        status = check_path(path, key, &found, err);
    }
    if (status == KVIST_OK) {
        status = check_lock(path, key, err);
    }
    return status == KVIST_OK ? find_group(group_name, &group, err) : status;
}

static enum kvist_status bind_path(struct kvist_listener *listener,
                                   const struct sockaddr_un *address,
                                   mode_t mode,
                                   const char *group_name,
                                   struct kvist_error *err)
{
    gid_t group = (gid_t)-1;
    enum kvist_status status = find_group(group_name, &group, err);
    if (status != KVIST_OK) {
        return status;
    }
    listener->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener->fd < 0) {
        return kvist_error_set_errno(err, errno, "socket", "cannot make a Unix socket");
    }
    /* Closed to others until its mode and group are right. */
    mode_t mask = umask(0177);
    int result = bind(listener->fd, (const struct sockaddr *)address, sizeof(*address));
    int error_number = errno;
    (void)umask(mask);
    if (result != 0) {
        return kvist_error_set_errno(
            err, error_number, "bind", "cannot make the socket %s", listener->path);
    }
    struct stat info;
    if (lstat(listener->path, &info) == 0) {
        listener->device = info.st_dev;
        listener->inode = info.st_ino;
    }
    if ((group != (gid_t)-1 && chown(listener->path, (uid_t)-1, group) != 0) ||
        chmod(listener->path, mode) != 0) {
        return kvist_error_set_errno(
            err, errno, listener->key, "cannot set group and mode of %s", listener->path);
    }
    return listen(listener->fd, BACKLOG) == 0
               ? KVIST_OK
               : kvist_error_set_errno(err, errno, "listen", "cannot listen on %s", listener->path);
}

enum kvist_status kvist_listener_open(const char *key,
                                      const char *path,
                                      mode_t mode,
                                      const char *group,
                                      struct kvist_listener *listener_out,
                                      struct kvist_error *err)
{
    struct kvist_listener listener = KVIST_LISTENER_INIT;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    listener.key = key;
    (void)snprintf(listener.path, sizeof(listener.path), "%s", path);
    (void)snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
    enum kvist_status status = kvist_listener_check(key, path, group, err);
    if (status == KVIST_OK) {
        status = lock_path(&listener, err);
    }
    if (status == KVIST_OK) {
        status = clear_path(&listener, &address, err);
    }
    if (status == KVIST_OK) {
        status = bind_path(&listener, &address, mode, group, err);
    }
    if (status != KVIST_OK) {
        kvist_listener_close(&listener);
        return status;
    }
    *listener_out = listener;
    return KVIST_OK;
}

void kvist_listener_silence(struct kvist_listener *listener)
{
    struct stat info;
    if (listener->inode != 0 && lstat(listener->path, &info) == 0 &&
        info.st_dev == listener->device && info.st_ino == listener->inode) {
        (void)unlink(listener->path);
    }
    listener->inode = 0;
    if (listener->fd >= 0) {
        (void)close(listener->fd);
        listener->fd = -1;
    }
}

void kvist_listener_close(struct kvist_listener *listener)
{
    kvist_listener_silence(listener);
    if (listener->lock_fd >= 0) {
        (void)close(listener->lock_fd);
    }
    *listener = (struct kvist_listener)KVIST_LISTENER_INIT;
}
