#include "tests/support/vault.h"

#include "storage/internal.h"
#include "tests/support/engine.h"
#include "tests/support/unit.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

void kvist_test_vault_init(struct kvist_test_vault *vault)
{
    *vault = (struct kvist_test_vault){.max = KVIST_VAULT_MAX};
    for (uint32_t index = 0; index < KVIST_VAULT_MAX; index++) {
        vault->entries[index].fd = -1;
    }
}

static struct kvist_kept_fd *find(struct kvist_test_vault *vault, const char *name)
{
    for (uint32_t index = 0; index < KVIST_VAULT_MAX; index++) {
        if (vault->entries[index].fd >= 0 && strcmp(vault->entries[index].name, name) == 0) {
            return &vault->entries[index];
        }
    }
    return NULL;
}

static enum kvist_status
put(struct kvist_test_vault *vault, const char *name, int fd, uint64_t number)
{
    KVIST_TEST_FATAL(strlen(name) <= 12 && find(vault, name) == NULL);
    if (vault->count >= vault->max) {
        return KVIST_NO_SPACE;
    }
    uint32_t index = 0;
    while (vault->entries[index].fd >= 0) {
        index++;
    }
    struct kvist_kept_fd *entry = &vault->entries[index];
    (void)snprintf(entry->name, sizeof(entry->name), "%s", name);
    entry->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    KVIST_TEST_FATAL(entry->fd >= 0);
    vault->numbers[index] = number;
    vault->count++;
    return KVIST_OK;
}

static enum kvist_status keep(void *ctx, const char *name, int fd)
{
    struct kvist_test_vault *vault = ctx;
    enum kvist_status status = put(vault, name, fd, vault->keeps + 1);
    vault->keeps += status == KVIST_OK;
    return status;
}

static void drop(struct kvist_test_vault *vault, struct kvist_kept_fd *entry)
{
    (void)close(entry->fd);
    entry->fd = -1;
    vault->count--;
}

static void forget(void *ctx, const char *name)
{
    struct kvist_test_vault *vault = ctx;
    struct kvist_kept_fd *entry = find(vault, name);
    KVIST_TEST_FATAL(entry != NULL);
    drop(vault, entry);
}

void kvist_test_vault_fini(struct kvist_test_vault *vault)
{
    for (uint32_t index = 0; index < KVIST_VAULT_MAX; index++) {
        if (vault->entries[index].fd >= 0) {
            drop(vault, &vault->entries[index]);
        }
    }
}

void kvist_test_vault_lose(struct kvist_test_vault *vault, uint64_t keeps)
{
    for (uint32_t index = 0; index < KVIST_VAULT_MAX; index++) {
        if (vault->entries[index].fd >= 0 && vault->numbers[index] > keeps) {
            drop(vault, &vault->entries[index]);
        }
    }
}

void kvist_test_vault_options(struct kvist_test_vault *vault, struct kvist_store_options *options)
{
    memset(vault->numbers, 0, sizeof(vault->numbers));
    vault->keeps = 0;
    options->ctx = vault;
    options->keeper.keep = keep;
    options->keeper.forget = forget;
    options->kept = vault->passed;
    options->kept_count = 0;
    for (uint32_t index = 0; index < KVIST_VAULT_MAX; index++) {
        if (vault->entries[index].fd >= 0) {
            struct kvist_kept_fd *passed = &vault->passed[options->kept_count++];
            *passed = vault->entries[index];
            passed->fd = fcntl(passed->fd, F_DUPFD_CLOEXEC, 0);
            KVIST_TEST_FATAL(passed->fd >= 0);
        }
    }
}

struct kvist_store *kvist_test_vault_open(struct kvist_test_vault *vault,
                                          struct kvist_store_options *options)
{
    kvist_test_vault_options(vault, options);
    return kvist_test_store_open(options);
}

int kvist_test_vault_find(const struct kvist_test_vault *vault, char kind, uint32_t serial)
{
    char name[16];
    (void)snprintf(name, sizeof(name), "%c%x", kind, serial);
    for (uint32_t index = 0; index < KVIST_VAULT_MAX; index++) {
        if (vault->entries[index].fd >= 0 && strcmp(vault->entries[index].name, name) == 0) {
            return vault->entries[index].fd;
        }
    }
    return -1;
}

void kvist_test_vault_replace(struct kvist_test_vault *vault, char kind, uint32_t serial, int fd)
{
    char name[16];
    (void)snprintf(name, sizeof(name), "%c%x", kind, serial);
    struct kvist_kept_fd *entry = find(vault, name);
    KVIST_TEST_FATAL(entry != NULL || fd >= 0);
    if (entry != NULL) {
        drop(vault, entry);
    }
    if (fd >= 0) {
        KVIST_TEST_STATUS(put(vault, name, fd, 0), KVIST_OK);
        (void)close(fd);
    }
}

void kvist_test_vault_kill(struct kvist_store **store)
{
    /* From here on nobody sees what it does; that it ends its threads orderly is unseen too. */
    kvist_store_make_private(*store);
    (*store)->left = true;
    kvist_store_close(store);
}

int kvist_test_dead_pidfd(void)
{
    pid_t pid = fork();
    if (pid == 0) {
        _exit(0);
    }
    int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    KVIST_TEST_FATAL(pid > 0 && pidfd >= 0 && waitpid(pid, NULL, 0) == pid);
    return pidfd;
}
