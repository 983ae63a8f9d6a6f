/*
 * busy - whether all processors of the host have something to run.
 *
 * Role        lets work that has time make way: SCHED_IDLE does so only within a scheduling group,
 *             and kvistd has one of its own, as a service or a session.
 * Source      proc(5), /proc/loadavg: the fourth field counts what is running or could run now
 */
#ifndef KVIST_STORAGE_BUSY_H
#define KVIST_STORAGE_BUSY_H

#include <stdbool.h>
#include <stdint.h>

/** @return an fd that the caller owns; -1: the host does not say */
int kvist_busy_open(void);

/**
 * Whether more could run than there are processors, the caller counted.
 *
 * @param fd  of kvist_busy_open(), or any file like it; -1: never
 */
bool kvist_busy_now(int fd, uint32_t processors);

#endif
