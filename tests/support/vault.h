/*
 * vault - a keeper of fds for the store, as the daemon's fd store is one; and the end of a store as a
 * kill would be one.
 *
 * Threads     one
 */
#ifndef KVIST_TESTS_VAULT_H
#define KVIST_TESTS_VAULT_H

#include "storage/store.h"

#define KVIST_VAULT_MAX 1024U

struct kvist_test_vault {
    struct kvist_kept_fd entries[KVIST_VAULT_MAX]; /* fd -1: none */
    uint64_t numbers[KVIST_VAULT_MAX]; /* which keep of the store's it came with; 0: of an earlier
                                          store's */
    uint64_t keeps;                    /* of the present store */
    uint32_t count;                    /* of entries in use */
    uint32_t max;                      /* NO_SPACE beyond */
    struct kvist_kept_fd passed[KVIST_VAULT_MAX];
};

void kvist_test_vault_init(struct kvist_test_vault *vault);
/** Close what it holds. */
void kvist_test_vault_fini(struct kvist_test_vault *vault);

/** Have a store that is opened with these options keep its fds here, and adopt what is here. */
void kvist_test_vault_options(struct kvist_test_vault *vault, struct kvist_store_options *options);
/** The same, and open one. A fatal failure when it cannot be opened. */
struct kvist_store *kvist_test_vault_open(struct kvist_test_vault *vault,
                                          struct kvist_store_options *options);

/** The fd under a name; -1: there is none. */
int kvist_test_vault_find(const struct kvist_test_vault *vault, char kind, uint32_t serial);
/** Drop one, as if it had never been kept; or put another one in its place (taken over), which may
    be empty. */
void kvist_test_vault_replace(struct kvist_test_vault *vault, char kind, uint32_t serial, int fd);

/** Drop what came after so many keeps of the present store, as if it had been under way. */
void kvist_test_vault_lose(struct kvist_test_vault *vault, uint64_t keeps);

/** End a store at once: nothing more is written to what it shares, nothing is forgotten. */
void kvist_test_vault_kill(struct kvist_store **store);

/** A pidfd of a process that has ended. */
int kvist_test_dead_pidfd(void);

#endif
