/*
 * notify - what kvistd tells the service manager.
 *
 * Role        sd_notify(3) in our words. Without $NOTIFY_SOCKET every call does nothing.
 * Threads     loop
 * Source      sd_notify(3), sd_watchdog_enabled(3)
 */
#ifndef KVIST_DAEMON_NOTIFY_H
#define KVIST_DAEMON_NOTIFY_H

#include <stdint.h>

void kvist_notify_ready(const char *status);
void kvist_notify_status(const char *status);
void kvist_notify_reloading(void);
/** @param extend_us  what the stop may take from now on */
void kvist_notify_stopping(const char *status, uint64_t extend_us);
void kvist_notify_alive(void);

/** How often kvist_notify_alive() must be called; 0: no watchdog. */
uint64_t kvist_notify_interval_us(void);

#endif
