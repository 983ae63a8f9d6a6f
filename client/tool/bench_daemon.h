/*
 * bench_daemon - a kvistd of the benchmark's own.
 *
 * Role        starts kvistd in a temporary directory, waits until it says that it is ready, stops
 *             it and removes the directory. It dies with the benchmark, however that ends.
 * Units       bytes
 * Threads     one
 */
#ifndef KVIST_TOOL_BENCH_DAEMON_H
#define KVIST_TOOL_BENCH_DAEMON_H

#include <kvist/error.h>
#include <kvist/limits.h>

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct kvist_bench_daemon {
    pid_t pid;
    int notify_fd;
    char directory[64];
    char socket_path[KVIST_SOCKET_PATH_BYTES];
};

/**
 * Find kvistd: beside the tool, in the build tree, in the sbin next to the tool's bin, in PATH.
 *
 * @param given  a path that was asked for, or NULL
 * @return false when there is none that can be run
 */
bool kvist_bench_daemon_find(const char *given, char path_out[4096]);

/** Start it and wait until it is ready. */
KVIST_MUST_USE enum kvist_status kvist_bench_daemon_start(const char *path,
                                                          uint64_t arena_bytes,
                                                          struct kvist_bench_daemon *daemon_out,
                                                          struct kvist_error *err);

/** Stop it; a daemon that was never started (pid 0) is fine. */
void kvist_bench_daemon_stop(struct kvist_bench_daemon *daemon);

#endif
