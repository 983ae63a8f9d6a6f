#include "client/core.h"
#include "proto/base/clock.h"
#include "proto/base/fault.h"
#include "proto/key/key.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define SOCKET_PATH_DEFAULT "/run/kvist/kvist.sock"
#define PUMP_INTERVAL_MS    1000 /* the longest that the library's thread sleeps */
#define AWAKE_US            100U /* the longest that a call of the data path waits awake */

void *kvist_client_alloc(size_t count, size_t bytes)
{
    return kvist_fault_point("client.alloc") ? NULL : calloc(count, bytes);
}

void kvist_client_wake(struct kvist_client *client)
{
    uint64_t one = 1;
    /* A full counter is readable already. */
    ssize_t written = write(client->wake_fd, &one, sizeof(one));
    (void)written;
}

/* --- Create -------------------------------------------------------------------------------- */

static enum kvist_status check_options(const struct kvist_client_options *options,
                                       struct kvist_error *err)
{
    static const uint8_t no_session[16];
    if (options == NULL || options->struct_bytes < sizeof(*options)) {
        return kvist_error_set(
            err, KVIST_INVALID, 0, "client", "options lack KVIST_CLIENT_OPTIONS_INIT");
    }
    if ((unsigned)options->role > KVIST_ROLE_ENGINE) {
        return kvist_error_set(err, KVIST_INVALID, 0, "client", "role %d", (int)options->role);
    }
    if (options->name != NULL && strlen(options->name) > KVIST_NAME_BYTES_MAX) {
        return kvist_error_set(
            err, KVIST_INVALID, 0, "client", "name is over %u bytes", KVIST_NAME_BYTES_MAX);
    }
    if (options->role == KVIST_ROLE_TOOL) {
        return KVIST_OK;
    }
    if (memcmp(options->session_id, no_session, sizeof(no_session)) == 0) {
        return kvist_error_set(
            err, KVIST_INVALID, 0, "client", "session_id is all zero; make a random one");
    }
    if (options->rank_count == 0 || options->rank_count > KVIST_RANKS_MAX ||
        options->rank >= options->rank_count) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "client",
                               "rank %u of %u; 1 to %u ranks are possible",
                               options->rank,
                               options->rank_count,
                               KVIST_RANKS_MAX);
    }
    if (options->role == KVIST_ROLE_ENGINE && options->rank_count != 1) {
        return kvist_error_set(
            err, KVIST_INVALID, 0, "client", "an engine in one process has one rank");
    }
    return KVIST_OK;
}

static enum kvist_status
copy_socket_path(struct kvist_client *client, const char *path, struct kvist_error *err)
{
    if (path == NULL) {
        /* NOLINTNEXTLINE(concurrency-mt-unsafe): races with setenv() alone */
        path = getenv("KVIST_SOCKET");
    }
    if (path == NULL || path[0] == '\0') {
        path = SOCKET_PATH_DEFAULT;
    }
    if (strlen(path) >= sizeof(client->socket_path)) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "client",
                               "socket path is over %zu bytes: %.100s",
                               sizeof(client->socket_path) - 1,
                               path);
    }
    memcpy(client->socket_path, path, strlen(path) + 1);
    return KVIST_OK;
}

static void copy_options(struct kvist_client *client, const struct kvist_client_options *options)
{
    client->magic = KVIST_CLIENT_MAGIC;
    client->role = options->role;
    client->schedules = options->role == KVIST_ROLE_SCHEDULER || options->role == KVIST_ROLE_ENGINE;
    client->maps = options->role == KVIST_ROLE_WORKER || options->role == KVIST_ROLE_ENGINE;
    if (options->role != KVIST_ROLE_TOOL) {
        memcpy(client->session_id, options->session_id, sizeof(client->session_id));
        client->rank = client->maps ? options->rank : 0;
        client->rank_count = options->rank_count;
    }
    client->grace_us =
        options->detach_grace_us != 0 ? options->detach_grace_us : KVIST_GRACE_US_DEFAULT;
    if (options->name != NULL) {
        memcpy(client->name, options->name, strlen(options->name) + 1);
    }
    client->segment_mapped = options->segment_mapped;
    client->segment_unmapping = options->segment_unmapping;
    client->ctx = options->ctx;
    client->socket_fd = -1;
    client->backoff_us = KVIST_BACKOFF_US_MIN;
    if (getrandom(&client->random_state, sizeof(client->random_state), GRND_NONBLOCK) !=
        (ssize_t)sizeof(client->random_state)) {
        client->random_state = kvist_clock_now_ns();
    }
    client->random_state |= 1;
}

static enum kvist_status init_sync(struct kvist_client *client)
{
    pthread_condattr_t attributes;
    if (pthread_condattr_init(&attributes) != 0) {
        return KVIST_NO_MEMORY;
    }
    (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    int failed = pthread_cond_init(&client->changed, &attributes);
    (void)pthread_condattr_destroy(&attributes);
    if (failed != 0) {
        return KVIST_NO_MEMORY;
    }
    /* Default mutexes: neither call can fail on Linux. */
    (void)pthread_mutex_init(&client->mutex, NULL);
    (void)pthread_mutex_init(&client->pump_mutex, NULL);
    client->lock = &client->mutex;
    return KVIST_OK;
}

static bool watch(const struct kvist_client *client, int fd)
{
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    return epoll_ctl(client->epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

static enum kvist_status open_fds(struct kvist_client *client, struct kvist_error *err)
{
    client->epoll_fd = -1;
    client->timer_fd = -1;
    client->wake_fd = -1;
    if (kvist_fault_point("client.fds")) {
        errno = EMFILE;
    } else {
        client->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
        client->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
        client->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    }
    if (client->epoll_fd < 0 || client->timer_fd < 0 || client->wake_fd < 0 ||
        !watch(client, client->timer_fd) || !watch(client, client->wake_fd)) {
        return kvist_error_set_errno(err, errno, "client", "cannot open event descriptors");
    }
    return KVIST_OK;
}

static void close_fd(int *fd)
{
    if (*fd >= 0) {
        (void)close(*fd);
        *fd = -1;
    }
}

enum kvist_status kvist_client_create(const struct kvist_client_options *options,
                                      struct kvist_client **client_out,
                                      struct kvist_error *err)
{
    enum kvist_status status = check_options(options, err);
    if (status != KVIST_OK) {
        return status;
    }
    struct kvist_client *client = kvist_client_alloc(1, sizeof(*client));
    if (client == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "client", "no memory for a client");
    }
    copy_options(client, options);
    status = copy_socket_path(client, options->socket_path, err);
    if (status != KVIST_OK) {
        goto free_client;
    }
    status = init_sync(client);
    if (status != KVIST_OK) {
        (void)kvist_error_set(err, status, 0, "client", "no memory for a client");
        goto free_client;
    }
    status = open_fds(client, err);
    if (status != KVIST_OK) {
        goto close_fds;
    }
    kvist_client_wake(client); /* the first pump connects */
    *client_out = client;
    return KVIST_OK;

close_fds:
    close_fd(&client->wake_fd);
    close_fd(&client->timer_fd);
    close_fd(&client->epoll_fd);
    (void)pthread_cond_destroy(&client->changed);
    (void)pthread_mutex_destroy(&client->mutex);
    (void)pthread_mutex_destroy(&client->pump_mutex);
free_client:
    free(client);
    return status;
}

/* --- Lock ---------------------------------------------------------------------------------- */

void kvist_client_lock_soon(const struct kvist_client *client)
{
    uint64_t until_us = 0;
    while (pthread_mutex_trylock(client->lock) != 0) {
        uint64_t now_us = kvist_clock_now_us();
        until_us = until_us == 0 ? now_us + AWAKE_US : until_us;
        if (now_us >= until_us) {
            (void)pthread_mutex_lock(client->lock);
            return;
        }
    }
}

/* --- Destroy ------------------------------------------------------------------------------- */

static void stop_thread(struct kvist_client *client)
{
    (void)pthread_mutex_lock(client->lock);
    bool has_thread = client->has_thread;
    client->stopping = true;
    (void)pthread_mutex_unlock(client->lock);
    if (has_thread) {
        kvist_client_wake(client);
        (void)pthread_join(client->thread, NULL);
    }
}

void kvist_client_destroy(struct kvist_client **client_ref)
{
    if (client_ref == NULL || *client_ref == NULL) {
        return;
    }
    struct kvist_client *client = *client_ref;
    *client_ref = NULL;
    stop_thread(client);
    for (uint32_t index = 0; index < KVIST_SESSION_POOLS_MAX; index++) {
        struct kvist_pool *pool = client->pools[index];
        kvist_pool_close(&pool);
    }
    (void)pthread_mutex_lock(&client->pump_mutex);
    struct kvist_error why = KVIST_ERROR_INIT;
    kvist_link_drop(client, &why);
    (void)pthread_mutex_lock(client->lock);
    kvist_epoch_retire_locked(client);
    struct kvist_epoch *epoch = client->retired;
    client->retired = NULL;
    (void)pthread_mutex_unlock(client->lock);
    while (epoch != NULL) {
        struct kvist_epoch *next = epoch->next;
        kvist_epoch_destroy(client, &epoch);
        epoch = next;
    }
    (void)pthread_mutex_unlock(&client->pump_mutex);
    close_fd(&client->wake_fd);
    close_fd(&client->timer_fd);
    close_fd(&client->epoll_fd);
    (void)pthread_cond_destroy(&client->changed);
    (void)pthread_mutex_destroy(&client->mutex);
    (void)pthread_mutex_destroy(&client->pump_mutex);
    client->magic = 0;
    free(client);
}

/* --- Pump ---------------------------------------------------------------------------------- */

int kvist_client_fd(const struct kvist_client *client)
{
    return client->epoll_fd;
}

static void drain(int fd)
{
    uint64_t count;
    ssize_t got = read(fd, &count, sizeof(count));
    (void)got; /* EAGAIN: it was not this one that woke us */
}

static void set_timer(const struct kvist_client *client, uint64_t deadline_us)
{
    /* 0 would disarm; a moment that has passed fires at once. */
    struct itimerspec when = {.it_value = {.tv_sec = 0, .tv_nsec = 0}};
    if (deadline_us != UINT64_MAX) {
        deadline_us = deadline_us > 0 ? deadline_us : 1;
        when.it_value.tv_sec = (time_t)(deadline_us / 1000000);
        when.it_value.tv_nsec = (long)(deadline_us % 1000000) * 1000;
    }
    (void)timerfd_settime(client->timer_fd, TFD_TIMER_ABSTIME, &when, NULL);
}

static void earlier(uint64_t *deadline_us, uint64_t candidate_us)
{
    *deadline_us = candidate_us < *deadline_us ? candidate_us : *deadline_us;
}

/* Grace that has run out, pools whose refusal may have passed; @return the next deadline. */
static uint64_t keep_time_locked(struct kvist_client *client, uint64_t now_us)
{
    uint64_t deadline_us = UINT64_MAX;
    if (client->link == KVIST_LINK_DOWN) {
        earlier(&deadline_us, client->retry_at_us);
    }
    if (client->link != KVIST_LINK_UP && client->current != NULL) {
        if (now_us - client->down_since_us >= client->grace_us) {
            kvist_epoch_retire_locked(client);
        } else {
            earlier(&deadline_us, client->down_since_us + client->grace_us);
        }
    }
    kvist_link_close_pools_locked(client);
    bool has_returns = client->has_returns;
    client->has_returns = false;
    for (uint32_t index = 0; index < KVIST_SESSION_POOLS_MAX; index++) {
        struct kvist_pool *pool = client->pools[index];
        if (pool != NULL && has_returns) {
            kvist_grant_return_due_locked(client, pool);
        }
        if (client->link != KVIST_LINK_UP || pool == NULL || pool->retry_at_us == 0) {
            continue;
        }
        if (pool->retry_at_us <= now_us) {
            kvist_link_open_pool_locked(client, pool);
        } else {
            earlier(&deadline_us, pool->retry_at_us);
        }
    }
    return deadline_us;
}

/* What the pumping thread does in one go. */
static void pump_once(struct kvist_client *client)
{
    drain(client->wake_fd);
    drain(client->timer_fd);
    uint64_t now_us = kvist_clock_now_us();
    (void)pthread_mutex_lock(client->lock);
    enum kvist_link_state link = client->link;
    bool broken = client->broken;
    bool due = now_us >= client->retry_at_us;
    (void)pthread_mutex_unlock(client->lock);
    if (broken && link != KVIST_LINK_DOWN) {
        struct kvist_error why = KVIST_ERROR_INIT;
        (void)kvist_error_set(&why, KVIST_CLOSED, 0, "peer", "the daemon closed the connection");
        kvist_link_drop(client, &why);
    } else if (link == KVIST_LINK_DOWN && due) {
        kvist_link_connect(client);
    } else if (link != KVIST_LINK_DOWN) {
        kvist_link_turn(client);
    }
    now_us = kvist_clock_now_us();
    (void)pthread_mutex_lock(client->lock);
    uint64_t deadline_us = keep_time_locked(client, now_us);
    (void)pthread_mutex_unlock(client->lock);
    if (kvist_epoch_sweep(client)) {
        earlier(&deadline_us, now_us + KVIST_DRAIN_POLL_US);
    }
    set_timer(client, deadline_us);
    (void)pthread_mutex_lock(client->lock);
    (void)pthread_cond_broadcast(&client->changed);
    (void)pthread_mutex_unlock(client->lock);
}

void kvist_client_pump(struct kvist_client *client)
{
    /* Whoever pumps already does it for us: the fd stays readable until all is handled. */
    if (client != NULL && pthread_mutex_trylock(&client->pump_mutex) == 0) {
        pump_once(client);
        (void)pthread_mutex_unlock(&client->pump_mutex);
    }
}

static void *pump_thread(void *ctx)
{
    struct kvist_client *client = ctx;
    for (;;) {
        (void)pthread_mutex_lock(client->lock);
        bool stopping = client->stopping;
        (void)pthread_mutex_unlock(client->lock);
        if (stopping) {
            return NULL;
        }
        struct pollfd ready = {.fd = client->epoll_fd, .events = POLLIN};
        (void)poll(&ready, 1, PUMP_INTERVAL_MS);
        kvist_client_pump(client);
    }
}

enum kvist_status kvist_client_thread_start(struct kvist_client *client, struct kvist_error *err)
{
    sigset_t all;
    sigset_t before;
    (void)sigfillset(&all);
    (void)pthread_mutex_lock(client->lock);
    if (client->has_thread) {
        (void)pthread_mutex_unlock(client->lock);
        return kvist_error_set(err, KVIST_EXISTS, 0, "client", "the client has a thread already");
    }
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = kvist_fault_point("client.thread")
                     ? EAGAIN
                     : pthread_create(&client->thread, NULL, pump_thread, client);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    client->has_thread = failed == 0;
    (void)pthread_mutex_unlock(client->lock);
    if (failed != 0) {
        return kvist_error_set_errno(err, failed, "pthread_create", "cannot start a thread");
    }
    return KVIST_OK;
}

/* --- Wait ---------------------------------------------------------------------------------- */

static void wait_changed_locked(struct kvist_client *client, uint64_t deadline_us)
{
    struct timespec when = {
        .tv_sec = (time_t)(deadline_us / 1000000),
        .tv_nsec = (long)(deadline_us % 1000000) * 1000,
    };
    (void)pthread_cond_timedwait(&client->changed, client->lock, &when);
}

enum kvist_status kvist_client_wait_for(struct kvist_client *client,
                                        bool (*done_locked)(const void *ctx),
                                        const void *ctx,
                                        uint64_t timeout_us)
{
    uint64_t now_us = kvist_clock_now_us();
    uint64_t deadline_us = timeout_us < UINT64_MAX / 2 ? now_us + timeout_us : UINT64_MAX / 2;
    (void)pthread_mutex_lock(client->lock);
    bool done = done_locked(ctx);
    while (!done && now_us < deadline_us) {
        if (client->has_thread) {
            wait_changed_locked(client, deadline_us);
        } else {
            (void)pthread_mutex_unlock(client->lock);
            uint64_t left_ms = (deadline_us - now_us + 999) / 1000;
            struct pollfd ready = {.fd = client->epoll_fd, .events = POLLIN};
            (void)poll(&ready, 1, left_ms < PUMP_INTERVAL_MS ? (int)left_ms : PUMP_INTERVAL_MS);
            kvist_client_pump(client);
            (void)pthread_mutex_lock(client->lock);
        }
        done = done_locked(ctx);
        now_us = kvist_clock_now_us();
    }
    (void)pthread_mutex_unlock(client->lock);
    return done ? KVIST_OK : KVIST_TIMED_OUT;
}

static bool is_connected_or_refused(const void *ctx)
{
    const struct kvist_client *client = ctx;
    return client->link == KVIST_LINK_UP || client->refused;
}

enum kvist_status
kvist_client_wait(struct kvist_client *client, uint64_t timeout_us, struct kvist_error *err)
{
    enum kvist_status waited =
        kvist_client_wait_for(client, is_connected_or_refused, client, timeout_us);
    (void)pthread_mutex_lock(client->lock);
    bool connected = client->link == KVIST_LINK_UP;
    struct kvist_error last = client->last_error;
    (void)pthread_mutex_unlock(client->lock);
    if (connected) {
        return KVIST_OK;
    }
    if (waited == KVIST_OK && last.status != KVIST_OK) {
        return kvist_error_set(err, last.status, last.code, last.origin, "%s", last.text);
    }
    return kvist_error_set(err,
                           KVIST_TIMED_OUT,
                           last.code,
                           "client",
                           "no daemon at %.100s within %llu ms: %.100s",
                           client->socket_path,
                           (unsigned long long)(timeout_us / 1000),
                           last.status != KVIST_OK ? last.text : "it does not answer");
}

bool kvist_client_connected(const struct kvist_client *client)
{
    (void)pthread_mutex_lock(client->lock);
    bool connected = client->link == KVIST_LINK_UP;
    (void)pthread_mutex_unlock(client->lock);
    return connected;
}

void kvist_client_last_error(const struct kvist_client *client, struct kvist_error *err_out)
{
    (void)pthread_mutex_lock(client->lock);
    *err_out = client->last_error;
    (void)pthread_mutex_unlock(client->lock);
}

/* --- Statistics ---------------------------------------------------------------------------- */

static void add_epoch(const struct kvist_epoch *epoch, struct kvist_client_stats *stats)
{
    for (uint32_t index = 0; index < KVIST_SESSION_POOLS_MAX; index++) {
        const struct kvist_view *view = epoch->views[index];
        if (view != NULL) {
            stats->leases_held += view->leases;
            stats->grants_held += view->held_count;
            stats->mapped_bytes += view->mapped_bytes;
        }
    }
    for (uint32_t ticket = 0; ticket < epoch->page_header.ticket_max; ticket++) {
        stats->takes_held += epoch->tickets[ticket].state == KVIST_TICKET_TAKEN;
    }
}

void kvist_client_stats(const struct kvist_client *client, struct kvist_client_stats *stats_out)
{
    (void)pthread_mutex_lock(client->lock);
    struct kvist_client_stats stats = client->stats;
    if (client->current != NULL) {
        add_epoch(client->current, &stats);
    }
    for (const struct kvist_epoch *epoch = client->retired; epoch != NULL; epoch = epoch->next) {
        add_epoch(epoch, &stats);
    }
    (void)pthread_mutex_unlock(client->lock);
    *stats_out = stats;
}

/* --- Keys ---------------------------------------------------------------------------------- */

enum kvist_status
kvist_client_key(const void *bytes, size_t length, uint8_t key_out[KVIST_KEY_BYTES])
{
    return kvist_key_make(bytes, length, key_out);
}
