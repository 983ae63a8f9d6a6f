/*
 * machine - does the configuration fit this machine?
 *
 * Role        reads what memory there is, for the host and for kvistd's cgroup; settles
 *             arena_bytes = auto; refuses what cannot work before anything is made.
 * Units       bytes
 * Threads     any
 * Errors      INVALID: a setting does not fit, the text says which and what would; NOT_FOUND,
 *             DENIED: nvme.path
 * Source      proc(5) MemAvailable, cgroups(7) memory.max of the cgroup and those above it, of
 *             version 1 memory.limit_in_bytes
 */
#ifndef KVIST_DAEMON_MACHINE_H
#define KVIST_DAEMON_MACHINE_H

#include "daemon/config.h"

#define KVIST_FILES_MIN    256U  /* kvistd, a small NVMe tier and a few engines */
#define KVIST_FILES_WANTED 4096U /* connections, pidfds, segments and extents of a busy host */

struct kvist_machine {
    uint64_t available_bytes; /* MemAvailable */
    uint64_t cgroup_bytes;    /* its lowest memory limit; UINT64_MAX: none */
};

/** @param root  "" for this machine; tests put a tree of their own there */
KVIST_MUST_USE enum kvist_status
kvist_machine_read(const char *root, struct kvist_machine *machine_out, struct kvist_error *err);

/** The largest arena that fits. */
uint64_t kvist_machine_arena_max(const struct kvist_machine *machine);

/** Check the memory settings, and replace arena_bytes = auto by a number. */
KVIST_MUST_USE enum kvist_status kvist_machine_fit_memory(const struct kvist_machine *machine,
                                                          struct kvist_config *config,
                                                          struct kvist_error *err);

/** Check nvme's sizes, and path and bytes against the file system; nothing is made. A device that is in
 *  trouble is none of the configuration's. */
KVIST_MUST_USE enum kvist_status kvist_machine_fit_nvme(const struct kvist_config *config,
                                                        struct kvist_error *err);

/**
 * Whether the disk of nvme.path has room for a tier's index now. NO_SPACE: it has not; kvistd does
 * not start then, or without its tier (kvist_tier_may_pass()).
 */
KVIST_MUST_USE enum kvist_status kvist_machine_check_room(const struct kvist_config *config,
                                                          struct kvist_error *err);

/** Whether the system gives huge pages to shared memory that asks for them. */
bool kvist_machine_has_huge_pages(const char *root);

/** Raise the limit of open files as far as allowed. @return the limit now */
uint64_t kvist_machine_raise_files(void);

/** Whether so many open files are enough to serve anybody at all. */
KVIST_MUST_USE enum kvist_status kvist_machine_check_files(uint64_t files_max,
                                                           struct kvist_error *err);

/** Segments that so many open files leave room for: half of what is beside kvistd's own. */
uint32_t kvist_machine_segments_max(uint64_t files_max);

/** Bytes that a file may have, and so shared memory; UINT64_MAX: any number. */
uint64_t kvist_machine_file_bytes_max(void);

#endif
