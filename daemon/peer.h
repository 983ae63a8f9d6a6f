/*
 * peer - what the kernel lets the process at the other end do.
 *
 * Role        tells peers whom memory's permissions bind from those whom they do not: an fd that
 *             may only be read can be opened anew for writing through /proc by its file's owner,
 *             and with the right capability by anybody.
 * Threads     any
 * Source      capabilities(7), proc_pid_status(5)
 */
#ifndef KVIST_DAEMON_PEER_H
#define KVIST_DAEMON_PEER_H

#include <stdbool.h>
#include <sys/types.h>

/**
 * Whether it could write what it may only read: kvistd's own user, or with CAP_DAC_OVERRIDE,
 * CAP_FOWNER, CAP_CHOWN, CAP_SETUID, CAP_SETFCAP, CAP_SYS_PTRACE or CAP_SYS_ADMIN. As of now: a
 * process may gain capabilities later, if its user may. What it has in a user namespace of its own
 * counts, though it is without power here.
 *
 * @param pid  0: in a PID namespace that is not visible from here
 * @return true, too, when it cannot be told
 */
bool kvist_peer_is_privileged(uid_t uid, pid_t pid);

#endif
