/*
 * listener - the Unix socket that kvistd listens on.
 *
 * Role        takes the socket that systemd passes, or makes one: with a lock beside it, so that
 *             two daemons never serve one path, and a socket file that a dead daemon left is
 *             replaced. Takes nothing that is not a socket, and nobody else's.
 * Files       PATH, PATH.lock (stays, holds the pid of the last daemon)
 * Ownership   owns the listening fd and the lock
 * Errors      EXISTS: another daemon serves there, or something else is; INVALID, NOT_FOUND,
 *             DENIED: the path
 * Source      unix(7), flock(2), sd_listen_fds(3)
 */
#ifndef KVIST_DAEMON_LISTENER_H
#define KVIST_DAEMON_LISTENER_H

#include "daemon/config.h"
#include "daemon/fdstore.h"

#include <sys/stat.h>

struct kvist_listener {
    int fd;
    int lock_fd;     /* -1: the socket came from systemd */
    const char *key; /* the setting that named it, for messages */
    char path[KVIST_SOCKET_PATH_BYTES];
    dev_t device; /* of the socket file that was made here */
    ino_t inode;
};

#define KVIST_LISTENER_LOCK ".lock" /* beside the socket */

#define KVIST_LISTENER_INIT                                                                        \
    {                                                                                              \
        .fd = -1, .lock_fd = -1, .key = ""                                                         \
    }

/**
 * Take the socket that systemd passed. What it had stored for us goes to fdstore; what else it
 * passed is closed, and removed from the store.
 *
 * @return OK; NOT_FOUND: it passed no socket; INVALID: it passed sockets, and none is such a one
 */
KVIST_MUST_USE enum kvist_status kvist_listener_take_passed(struct kvist_listener *listener_out,
                                                            struct kvist_fdstore *fdstore,
                                                            struct kvist_error *err);

/**
 * Whether a socket could be made there: its directory, what is at its path, its lock, its group. Makes
 * nothing, and does not ask whether another kvistd serves there. As kvist_listener_open() begins.
 */
KVIST_MUST_USE enum kvist_status
kvist_listener_check(const char *key, const char *path, const char *group, struct kvist_error *err);

/**
 * Make a socket and listen on it.
 *
 * @param key           static: the setting that path comes from
 * @param group         "": that of kvistd
 * @param listener_out  owned by the caller; close with kvist_listener_close()
 */
KVIST_MUST_USE enum kvist_status kvist_listener_open(const char *key,
                                                     const char *path,
                                                     mode_t mode,
                                                     const char *group,
                                                     struct kvist_listener *listener_out,
                                                     struct kvist_error *err);

/** Stop listening: removes the socket file if it is still the one made here. Keeps the lock. */
void kvist_listener_silence(struct kvist_listener *listener);

/** Stop listening and give up the lock. */
void kvist_listener_close(struct kvist_listener *listener);

#endif
