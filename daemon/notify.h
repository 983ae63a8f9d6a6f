/*
 * notify - what kvistd tells the service manager.
 *
 * Role        sends sd_notify(3)'s messages, fds with them, and never waits for the manager to
 *             read. Without $NOTIFY_SOCKET every call does nothing.
 * Waiting     what the manager's socket does not take waits here, in the order in which it was
 *             said, and is tried again every 2 ms. Fds wait as duplicates.
 * Ownership   owns the socket and what waits
 * Threads     loop
 * Limits      KVIST_NOTIFY_WAITING_MAX messages wait, KVIST_NOTIFY_WORDS_MAX of them mere words;
 *             what is beyond that is dropped, and counted
 * Source      sd_notify(3), sd_watchdog_enabled(3), unix(7)
 */
#ifndef KVIST_DAEMON_NOTIFY_H
#define KVIST_DAEMON_NOTIFY_H

#include <kvist/error.h>

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/un.h>

#define KVIST_NOTIFY_WAITING_MAX 4096U /* each stored fd comes once and goes once */
#define KVIST_NOTIFY_WORDS_MAX   64U
#define KVIST_NOTIFY_TEXT_BYTES  512U

struct kvist_notify {
    struct sockaddr_un address;
    socklen_t address_bytes; /* 0: there is no manager */
    int fd;                  /* -1: could not be made yet */
    struct kvist_notice *first;
    struct kvist_notice **end;
    uint32_t waiting;
    uint32_t words_waiting;
    uint64_t waiting_since_us; /* nothing that waits has gone since */
    bool complained;
    uint64_t dropped_total;
};

/** Find out whether there is a manager. Safe to call again after kvist_notify_fini(). */
void kvist_notify_init(struct kvist_notify *notify);

/** Try once more to send what waits, and close. Also of one that is all zero. */
void kvist_notify_fini(struct kvist_notify *notify);

static inline bool kvist_notify_has_manager(const struct kvist_notify *notify)
{
    return notify->address_bytes > 0;
}

/**
 * Send a message as it stands, after all that were sent before.
 *
 * @param text  up to KVIST_NOTIFY_TEXT_BYTES - 1 bytes
 * @param fd    borrowed; -1: none
 * @return OK: sent, or it waits; NO_SPACE: neither, it is dropped
 */
KVIST_MUST_USE enum kvist_status
kvist_notify_send(struct kvist_notify *notify, const char *text, int fd);

/** Take back the first waiting message that begins so. @return whether there was one */
bool kvist_notify_withdraw(struct kvist_notify *notify, const char *beginning);

/** Send what waits. To be called again soon while something does. */
void kvist_notify_turn(struct kvist_notify *notify);

void kvist_notify_ready(struct kvist_notify *notify, const char *status);
void kvist_notify_status(struct kvist_notify *notify, const char *status);
void kvist_notify_reloading(struct kvist_notify *notify);
/** @param extend_us  what the stop may take from now on */
void kvist_notify_stopping(struct kvist_notify *notify, const char *status, uint64_t extend_us);

/** Feed the watchdog; this never waits behind others. @return whether it was sent */
bool kvist_notify_alive(struct kvist_notify *notify);

/** How often kvist_notify_alive() must succeed; 0: no watchdog. */
uint64_t kvist_notify_interval_us(void);

#endif
