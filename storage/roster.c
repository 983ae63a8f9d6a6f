#include "storage/roster.h"

#include "proto/shm/memfd.h"
#include "storage/internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define RANDOM_ID_SHIFT 2U /* leaves room to count up */

/* --- Life ------------------------------------------------------------------------------------ */

static enum kvist_status fill_header(struct kvist_store *store, struct kvist_error *err)
{
    uint64_t random[2];
    if (getrandom(random, sizeof(random), 0) != (ssize_t)sizeof(random)) {
        return kvist_error_set_errno(err, errno, "getrandom", "no randomness for the store");
    }
    struct kvist_roster *roster = store->roster;
    roster->version = KVIST_ROSTER_VERSION;
    roster->layout_version = KVIST_LAYOUT_VERSION;
    roster->roster_bytes = sizeof(*roster);
    roster->instance = random[0] != 0 ? random[0] : 1;
    roster->arena_bytes = store->options.arena_bytes;
    roster->reservation_first = (random[1] >> RANDOM_ID_SHIFT) + 1;
    roster->reservation_next = roster->reservation_first;
    roster->serial_next = 1;
    roster->magic = KVIST_ROSTER_MAGIC;
    return KVIST_OK;
}

enum kvist_status kvist_roster_create(struct kvist_store *store, struct kvist_error *err)
{
    const uint64_t bytes = sizeof(*store->roster);
    if (store->options.keeper.keep == NULL) {
        store->roster = calloc(1, bytes);
        return store->roster != NULL
                   ? fill_header(store, err)
                   : kvist_error_set(err, KVIST_NO_MEMORY, 0, "store", "no memory");
    }
    void *map = NULL;
    enum kvist_status status = kvist_memfd_create("r0", bytes, &store->roster_fd, err);
    if (status == KVIST_OK) {
        status = kvist_memfd_map(store->roster_fd, bytes, KVIST_MEMFD_WRITE, &map, err);
    }
    if (status == KVIST_OK) {
        store->roster = map;
        status = fill_header(store, err);
    }
    if (status == KVIST_OK &&
        kvist_roster_keep(store, KVIST_KEPT_ROSTER, 0, store->roster_fd) != KVIST_OK) {
        status = kvist_error_set(err, KVIST_NO_SPACE, 0, "store", "no fd can be kept");
    }
    return status;
}

bool kvist_roster_fits(const struct kvist_roster *roster)
{
    return roster->magic == KVIST_ROSTER_MAGIC && roster->version == KVIST_ROSTER_VERSION &&
           roster->layout_version == KVIST_LAYOUT_VERSION &&
           roster->roster_bytes == sizeof(*roster) && roster->instance != 0 &&
           roster->serial_next != 0 && roster->cleared_count <= KVIST_ROSTER_CLEARED_MAX &&
           roster->reservation_first != 0 && roster->reservation_next >= roster->reservation_first;
}

enum kvist_status kvist_roster_adopt(struct kvist_store *store, int fd, struct kvist_error *err)
{
    const uint64_t bytes = sizeof(*store->roster);
    void *map = NULL;
    enum kvist_status status = kvist_memfd_check_own(fd, bytes, err);
    if (status == KVIST_OK) {
        status = kvist_memfd_map(fd, bytes, KVIST_MEMFD_WRITE, &map, err);
    }
    if (status != KVIST_OK) {
        return status;
    }
    if (!kvist_roster_fits(map)) {
        kvist_memfd_unmap(&map, bytes);
        return kvist_error_set(
            err, KVIST_VERSION, 0, "store", "what was kept is of another version of kvistd");
    }
    store->roster = map;
    store->roster_fd = fd;
    return KVIST_OK;
}

enum kvist_status kvist_roster_leave(struct kvist_store *store, struct kvist_error *err)
{
    return store->roster_fd >= 0 ? kvist_memfd_make_private(
                                       store->roster_fd, store->roster, sizeof(*store->roster), err)
                                 : KVIST_OK;
}

void kvist_roster_fini(struct kvist_store *store)
{
    if (store->roster_fd < 0) {
        free(store->roster);
        store->roster = NULL;
        return;
    }
    void *map = store->roster;
    store->roster = NULL;
    kvist_memfd_unmap(&map, sizeof(*store->roster));
    (void)close(store->roster_fd);
    store->roster_fd = -1;
}

/* --- Numbers --------------------------------------------------------------------------------- */

uint32_t kvist_roster_serial(struct kvist_store *store)
{
    uint32_t serial = atomic_load_explicit(&store->roster->serial_next, memory_order_relaxed);
    atomic_store_explicit(&store->roster->serial_next, serial + 1, memory_order_release);
    return serial;
}

uint64_t kvist_roster_reservation(struct kvist_store *store)
{
    struct kvist_roster *roster = store->roster;
    uint64_t number = atomic_load_explicit(&roster->reservation_next, memory_order_relaxed);
    atomic_store_explicit(&roster->reservation_next, number + 1, memory_order_release);
    return number;
}

bool kvist_roster_reserved(const struct kvist_store *store, uint64_t reservation)
{
    const struct kvist_roster *roster = store->roster;
    return reservation >= roster->reservation_first &&
           reservation < atomic_load_explicit(&roster->reservation_next, memory_order_relaxed);
}

/* --- Records --------------------------------------------------------------------------------- */

static void set_word(_Atomic uint32_t *word, uint32_t value)
{
    atomic_store_explicit(word, value, memory_order_release);
}

void kvist_roster_put_pool(const struct kvist_store_pool *pool)
{
    struct kvist_roster_pool *record = &pool->store->roster->pools[pool->index];
    record->about = pool->about;
    set_word(&record->map_serial, pool->map.serial);
    set_word(&record->next_map_serial, 0);
    set_word(&record->cleared, kvist_roster_rest_cleared(pool->store, pool->about.tenant));
    set_word(&record->serial, pool->serial);
}

void kvist_roster_set_cleared(const struct kvist_store_pool *pool, bool cleared)
{
    set_word(&pool->store->roster->pools[pool->index].cleared, cleared);
}

bool kvist_roster_is_cleared(const struct kvist_store_pool *pool)
{
    return atomic_load_explicit(&pool->store->roster->pools[pool->index].cleared,
                                memory_order_relaxed) != 0;
}

bool kvist_roster_rest_cleared(const struct kvist_store *store, const char *tenant)
{
    const struct kvist_roster *roster = store->roster;
    uint32_t count = atomic_load_explicit(&roster->cleared_count, memory_order_relaxed);
    for (uint32_t index = 0; index < count; index++) {
        const char *cleared = roster->cleared[index];
        if (cleared[0] == '\0' || strncmp(cleared, tenant, KVIST_TENANT_BYTES_MAX + 1) == 0) {
            return true;
        }
    }
    return false;
}

void kvist_roster_clear_rest(struct kvist_store *store, const char *tenant)
{
    struct kvist_roster *roster = store->roster;
    if (kvist_roster_rest_cleared(store, tenant)) {
        return;
    }
    uint32_t count = atomic_load_explicit(&roster->cleared_count, memory_order_relaxed);
    if (tenant[0] == '\0' || count == KVIST_ROSTER_CLEARED_MAX) {
        roster->cleared[0][0] = '\0';
        set_word(&roster->cleared_count, 1);
        return;
    }
    (void)snprintf(roster->cleared[count], sizeof(roster->cleared[count]), "%s", tenant);
    set_word(&roster->cleared_count, count + 1);
}

bool kvist_roster_has_rest(const struct kvist_store *store)
{
    return atomic_load_explicit(&store->roster->cleared_count, memory_order_relaxed) > 0;
}

void kvist_roster_rest_known(struct kvist_store *store)
{
    set_word(&store->roster->cleared_count, 0);
}

void kvist_roster_drop_pool(const struct kvist_store_pool *pool)
{
    set_word(&pool->store->roster->pools[pool->index].serial, 0);
}

void kvist_roster_next_map(const struct kvist_store_pool *pool, uint32_t map_serial)
{
    set_word(&pool->store->roster->pools[pool->index].next_map_serial, map_serial);
}

void kvist_roster_moved(const struct kvist_store_pool *pool)
{
    struct kvist_roster_pool *record = &pool->store->roster->pools[pool->index];
    set_word(&record->map_serial, pool->map.serial);
    set_word(&record->next_map_serial, 0);
}

static struct kvist_roster_session *session_record(const struct kvist_store_session *session)
{
    return &session->store->roster->sessions[session->index];
}

void kvist_roster_put_session(const struct kvist_store_session *session)
{
    struct kvist_roster_session *record = session_record(session);
    record->rank_count = session->page.rank_count;
    record->about = session->about;
    memcpy(record->id, session->id, sizeof(record->id));
    set_word(&record->serial, session->serial);
}

void kvist_roster_drop_session(const struct kvist_store_session *session)
{
    set_word(&session_record(session)->serial, 0);
}

void kvist_roster_put_attachment(const struct kvist_store_session *session, uint32_t ordinal)
{
    const struct kvist_attachment *attachment = &session->attachments[ordinal];
    struct kvist_roster_attachment *record = &session_record(session)->attachments[ordinal];
    record->pool_serial = attachment->pool->serial;
    set_word(&record->writes, attachment->writes);
    set_word(&record->serial, attachment->serial);
}

void kvist_roster_drop_attachment(const struct kvist_store_session *session, uint32_t ordinal)
{
    set_word(&session_record(session)->attachments[ordinal].serial, 0);
}

static struct kvist_roster_process *process_record(const struct kvist_store_process *process)
{
    return &session_record(process->session)->processes[process->index];
}

void kvist_roster_put_process(const struct kvist_store_process *process, uint32_t pid, int pidfd)
{
    struct stat info;
    struct kvist_roster_process *record = process_record(process);
    record->pid = pid;
    record->inode = fstat(pidfd, &info) == 0 ? info.st_ino : 0;
    record->rank = process->rank;
    record->schedules = process->schedules;
    record->maps_segments = process->maps_segments;
    set_word(&record->loans, 0);
    set_word(&record->lent, 0);
    set_word(&record->serial, process->serial);
}

void kvist_roster_drop_process(const struct kvist_store_process *process)
{
    set_word(&process_record(process)->serial, 0);
}

void kvist_roster_set_loan(const struct kvist_store_process *process,
                           uint32_t ordinal,
                           bool attached)
{
    struct kvist_roster_process *record = process_record(process);
    uint32_t loans = atomic_load_explicit(&record->loans, memory_order_relaxed);
    uint32_t bit = 1U << ordinal;
    set_word(&record->loans, attached ? loans | bit : loans & ~bit);
    if (!attached) {
        set_word(&record->lent, atomic_load_explicit(&record->lent, memory_order_relaxed) & ~bit);
    }
}

void kvist_roster_set_lent(const struct kvist_store_process *process, uint32_t ordinal)
{
    struct kvist_roster_process *record = process_record(process);
    set_word(&record->lent,
             atomic_load_explicit(&record->lent, memory_order_relaxed) | 1U << ordinal);
}

/* --- Keeping --------------------------------------------------------------------------------- */

static const char *name_of(enum kvist_kept_kind kind, uint32_t serial, char name_out[16])
{
    (void)snprintf(name_out, 16, "%c%x", (char)kind, serial);
    return name_out;
}

enum kvist_status
kvist_roster_keep(struct kvist_store *store, enum kvist_kept_kind kind, uint32_t serial, int fd)
{
    const struct kvist_store_keeper *keeper = &store->options.keeper;
    char name[16];
    if (keeper->keep == NULL) {
        return KVIST_OK;
    }
    if (store->closing) {
        return KVIST_CLOSED;
    }
    enum kvist_status status = keeper->keep(store->options.ctx, name_of(kind, serial, name), fd);
    store->keep_count += status == KVIST_OK;
    return status;
}

void kvist_roster_forget(struct kvist_store *store, enum kvist_kept_kind kind, uint32_t serial)
{
    const struct kvist_store_keeper *keeper = &store->options.keeper;
    char name[16];
    if (keeper->forget != NULL && !store->left) {
        keeper->forget(store->options.ctx, name_of(kind, serial, name));
    }
}

/* --- What the daemon asks -------------------------------------------------------------------- */

uint64_t kvist_store_kept_arena(const struct kvist_kept_fd *kept, size_t kept_count)
{
    const ssize_t bytes = offsetof(struct kvist_roster, pools);
    for (size_t place = 0; place < kept_count; place++) {
        struct kvist_roster header;
        if (kept[place].name[0] == KVIST_KEPT_ROSTER &&
            pread(kept[place].fd, &header, (size_t)bytes, 0) == bytes &&
            kvist_roster_fits(&header)) {
            return header.arena_bytes;
        }
    }
    return 0;
}

bool kvist_store_adopted(const struct kvist_store *store,
                         uint32_t place,
                         struct kvist_store_adopted *adopted_out)
{
    struct kvist_store_session *session = store->sessions[place];
    if (session == NULL || !session->adopted) {
        return false;
    }
    struct kvist_store_adopted adopted = {
        .session = session, .rank_count = session->page.rank_count, .about = session->about};
    memcpy(adopted.id, session->id, sizeof(adopted.id));
    for (uint32_t index = 0; index < KVIST_PROCESSES_MAX; index++) {
        struct kvist_store_process *process = session->processes[index];
        if (process == NULL) {
            continue;
        }
        size_t at = adopted.process_count++;
        adopted.processes[at].process = process;
        adopted.processes[at].schedules = process->schedules;
        adopted.processes[at].maps_segments = process->maps_segments;
        adopted.processes[at].rank = process->rank;
        adopted.processes[at].pid = store->roster->sessions[place].processes[index].pid;
        adopted.processes[at].pidfd = process->pidfd;
    }
    *adopted_out = adopted;
    return true;
}
