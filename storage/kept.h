/*
 * kept - the fds that an earlier store has left, by what they are.
 *
 * Role        finds each by kind and serial. Their names are the keeper's word; what a memfd is says
 *             its own name, which nobody can change, and of which process a pidfd is, the kernel. An
 *             fd that is not what it was kept as is as good as lost: its bytes are somebody else's.
 * Ownership   borrows the fds; one that was taken is the taker's, the rest are closed and forgotten
 * Threads     loop
 */
#ifndef KVIST_STORAGE_KEPT_H
#define KVIST_STORAGE_KEPT_H

#include "storage/roster.h"
#include "storage/store.h"

struct kvist_kept_place {
    char kind; /* 0: no name of ours, or not what it is called */
    uint32_t serial;
    bool taken;
};

struct kvist_kept {
    struct kvist_kept_fd *fds;       /* [count] */
    struct kvist_kept_place *places; /* [count] */
    size_t count;
};

/** @return false: no memory */
bool kvist_kept_init(struct kvist_kept *kept, const struct kvist_store_options *options);
void kvist_kept_fini(struct kvist_kept *kept);

/** Have nobody find what does not belong to this arena under its name. @return how many such */
uint32_t kvist_kept_check(struct kvist_kept *kept, uint64_t arena);

/** The fd, which stays where it is, or -1: it was not kept, or twice. */
int kvist_kept_look(const struct kvist_kept *kept, enum kvist_kept_kind kind, uint32_t serial);

/** It is the caller's now. */
void kvist_kept_take(struct kvist_kept *kept, enum kvist_kept_kind kind, uint32_t serial);

/** Whether an fd is a process's pidfd: by inode; and, while it lives, by number (0: not known). */
bool kvist_kept_is_pidfd(int fd, uint32_t pid, uint64_t inode);

/** Bytes of memory in segments that are here. */
uint64_t kvist_kept_segment_bytes(const struct kvist_kept *kept);

/** What was taken is to be forgotten after all; its fds are closed. */
void kvist_kept_untake(struct kvist_kept *kept);

/** Close, and have forgotten, what was not taken. @return bytes of segments among it */
uint64_t kvist_kept_release(struct kvist_kept *kept, const struct kvist_store_options *options);

#endif
