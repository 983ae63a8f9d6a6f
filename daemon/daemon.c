#include "daemon/daemon.h"

#include "daemon/dispatch.h"
#include "daemon/machine.h"
#include "daemon/notify.h"
#include "daemon/places.h"
#include "daemon/watch.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/log.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TICK_US       20000ULL
#define LAG_WINDOW_US 10000000ULL
#define SAVE_LOG_US   1000000ULL
#define STOP_EXTRA_US 30000000ULL /* for closing, after the save */

static const struct timeval at_once = {0, 0};
static const struct timeval soon = {0, 2000};
static const struct timeval tick_time = {0, TICK_US};

/* --- Configuration --------------------------------------------------------------------------- */

static enum kvist_status load(const struct kvist_daemon_options *options,
                              struct kvist_config *config_out,
                              struct kvist_http_address *address_out,
                              struct kvist_error *err)
{
    enum kvist_status status = kvist_config_load(
        options->config_path, options->overrides, options->override_count, config_out, err);
    if (status != KVIST_OK) {
        return status;
    }
    return kvist_http_address_parse(config_out->daemon_metrics_listen,
                                    config_out->daemon_metrics_allow_remote != 0,
                                    address_out,
                                    err);
}

/* Does it fit the machine? Settles arena_bytes: what was passed is memory that we have already. */
static enum kvist_status
fit(struct kvist_config *config, const struct kvist_fdstore *fdstore, struct kvist_error *err)
{
    struct kvist_machine machine;
    enum kvist_status status = kvist_machine_read("", &machine, err);
    if (status == KVIST_OK && fdstore != NULL) {
        machine.available_bytes += kvist_fdstore_passed_bytes(fdstore);
        uint64_t before_bytes = kvist_store_kept_arena(fdstore->passed, fdstore->passed_count);
        if (config->memory_arena_bytes == 0 && before_bytes <= kvist_machine_arena_max(&machine)) {
            config->memory_arena_bytes = before_bytes; /* auto stays what it was */
        }
    }
    if (status == KVIST_OK) {
        status = kvist_machine_fit_memory(&machine, config, err);
    }
    return status == KVIST_OK ? kvist_machine_fit_nvme(config, err) : status;
}

/* Whether this process could have the shared memory that a start begins with. */
static enum kvist_status check_shapes(struct kvist_error *err)
{
    struct kvist_shapes *shapes = NULL;
    int fd = -1;
    enum kvist_status status = kvist_shapes_open(-1, 0, &shapes, &fd, err);
    if (status == KVIST_OK) {
        kvist_shapes_close(&shapes);
        (void)close(fd);
    }
    return status;
}

/* Limits of this process: raised where that is allowed; what is over one is an error, no signal. */
static enum kvist_status take_limits(uint64_t *files_max_out, struct kvist_error *err)
{
    (void)signal(SIGPIPE, SIG_IGN); /* EPIPE says it, */
    (void)signal(SIGXFSZ, SIG_IGN); /* and EFBIG: shared memory is files, too */
    *files_max_out = kvist_machine_raise_files();
    return kvist_machine_check_files(*files_max_out, err);
}

enum kvist_status kvist_daemon_check(const struct kvist_daemon_options *options,
                                     struct kvist_config *config_out,
                                     struct kvist_error *err)
{
    struct kvist_http_address address;
    uint64_t files_max = 0;
    enum kvist_status status = take_limits(&files_max, err);
    if (status == KVIST_OK) {
        status = load(options, config_out, &address, err);
    }
    if (status == KVIST_OK) {
        status = fit(config_out, NULL, err);
    }
    if (status == KVIST_OK) {
        status = kvist_places_check(config_out, &address, false, err);
    }
    if (status == KVIST_OK) {
        status = kvist_http_check(&address, err);
    }
    if (status == KVIST_OK) {
        status = check_shapes(err);
    }
    if (status != KVIST_OK) {
        err->code = 0; /* none of the tier's disk */
    }
    if (status == KVIST_OK && config_out->nvme_path[0] != '\0') {
        status = kvist_tier_check(config_out->nvme_path, err);
    }
    return status == KVIST_OK ? kvist_machine_check_room(config_out, err) : status;
}

static void on_setting_differs(void *ctx, const char *section, const char *name)
{
    (void)ctx;
    kvist_log(KVIST_LOG_WARN,
              "setting differs and needs a restart name=%s.%s action=ignored",
              section,
              name);
}

static void set_tenants(struct kvist_daemon *daemon)
{
    const struct kvist_config *config = &daemon->config;
    struct kvist_store_tenant_limits limits[KVIST_CONFIG_TENANTS_MAX + 1];
    size_t count = 0;
    for (size_t index = 0; index < config->limits_count; index++) {
        const struct kvist_tenant_limits *from = &config->limits[index];
        limits[count] = (struct kvist_store_tenant_limits){
            .memory_bytes_max = from->dram_bytes,
            .nvme_bytes_max = from->nvme_bytes,
            .weight = from->weight,
        };
        memcpy(limits[count++].name, from->tenant, sizeof(from->tenant));
    }
    if (kvist_config_limits(config, KVIST_TENANT_DEFAULT) == NULL) {
        limits[count++] =
            (struct kvist_store_tenant_limits){.name = KVIST_TENANT_DEFAULT, .weight = 1};
    }
    kvist_store_set_tenants(daemon->store, limits, count);
}

enum kvist_status kvist_daemon_reload(struct kvist_daemon *daemon, struct kvist_error *err)
{
    struct kvist_config *fresh = calloc(1, sizeof(*fresh));
    if (fresh == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, ENOMEM, "config", "no memory to reload");
    }
    struct kvist_http_address address;
    enum kvist_status status = load(&daemon->options, fresh, &address, err);
    if (status == KVIST_OK) {
        bool trusted = daemon->config.daemon_privileged_peers == 0;
        kvist_config_reload(&daemon->config, fresh, on_setting_differs, NULL);
        if (trusted && daemon->config.daemon_privileged_peers != 0) {
            kvist_sessions_judge(&daemon->sessions);
        }
        set_tenants(daemon);
        kvist_log_set_level((enum kvist_log_level)daemon->config.daemon_log_level);
        daemon->counters.reloads_total++;
        kvist_log(KVIST_LOG_INFO, "configuration reloaded");
    } else {
        daemon->counters.reload_failures_total++;
        kvist_log(
            KVIST_LOG_ERROR, "reload failed, the old configuration stays error=\"%s\"", err->text);
    }
    free(fresh);
    return status;
}

/* --- The loop -------------------------------------------------------------------------------- */

static void turn_store(struct kvist_daemon *daemon)
{
    daemon->counters.turns_total++;
    if (kvist_store_turn(daemon->store, kvist_clock_now_us())) {
        (void)event_add(daemon->turn, &at_once);
    }
    kvist_fdstore_turn(&daemon->fdstore);
    kvist_notify_turn(&daemon->notify);
    if (daemon->notify.waiting > 0 && event_pending(daemon->turn, EV_TIMEOUT, NULL) == 0) {
        (void)event_add(daemon->turn, &soon); /* what is not stored yet, a kill would lose */
    }
    daemon->counters.stored_files = daemon->fdstore.count;
    daemon->counters.stored_files_max = daemon->fdstore.max;
    daemon->counters.notices_waiting = daemon->notify.waiting;
    daemon->counters.notices_dropped_total = daemon->notify.dropped_total;
}

static void on_store_event(evutil_socket_t fd, short what, void *ctx)
{
    (void)fd;
    (void)what;
    turn_store(ctx);
}

/* Hear of what the store's threads have done; a tier that was away comes later. */
static bool watch_store(struct kvist_daemon *daemon)
{
    int fds[4];
    size_t fd_count = kvist_store_fds(daemon->store, fds);
    for (size_t index = 0; index < fd_count; index++) {
        struct event **event = &daemon->store_events[index];
        if (*event == NULL) {
            *event =
                event_new(daemon->base, fds[index], EV_READ | EV_PERSIST, on_store_event, daemon);
            if (*event == NULL || event_add(*event, NULL) != 0) {
                return false;
            }
        }
    }
    return true;
}

static void on_turn_ended(void *ctx)
{
    struct kvist_daemon *daemon = ctx;
    (void)event_add(daemon->turn, &at_once);
}

static void on_refused(void *ctx, const char *tenant)
{
    struct kvist_daemon *daemon = ctx;
    kvist_store_tenant_refused(daemon->store, tenant);
}

static void on_connection_gone(void *ctx, struct kvist_connection *connection)
{
    (void)ctx;
    kvist_dispatch_forget(connection);
    kvist_sessions_detach(connection);
}

static void measure_lag(struct kvist_daemon *daemon, uint64_t now_us)
{
    struct kvist_counters *counters = &daemon->counters;
    uint64_t lag_us = now_us > daemon->tick_due_us ? now_us - daemon->tick_due_us : 0;
    daemon->tick_due_us = now_us + TICK_US;
    counters->loop_lag_us = lag_us;
    if (now_us - counters->lag_window_us >= LAG_WINDOW_US) {
        counters->loop_lag_us_max[1] = counters->loop_lag_us_max[0];
        counters->loop_lag_us_max[0] = 0;
        counters->lag_window_us = now_us;
    }
    if (lag_us > counters->loop_lag_us_max[0]) {
        counters->loop_lag_us_max[0] = lag_us;
    }
}

static void watch_save(struct kvist_daemon *daemon, uint64_t now_us);

static void on_tick(evutil_socket_t fd, short what, void *ctx)
{
    (void)fd;
    (void)what;
    struct kvist_daemon *daemon = ctx;
    uint64_t now_us = kvist_clock_now_us();
    measure_lag(daemon, now_us);
    turn_store(daemon);
    (void)watch_store(daemon);
    kvist_server_tick(&daemon->server, now_us);
    if (daemon->alive_interval_us != 0 && now_us - daemon->alive_us >= daemon->alive_interval_us &&
        kvist_notify_alive(&daemon->notify)) {
        daemon->alive_us = now_us;
    }
    if (daemon->save_deadline_us != 0) {
        watch_save(daemon, now_us);
    } else {
        kvist_watch_health(daemon, now_us);
    }
    (void)event_add(daemon->tick, &tick_time);
}

/* --- Stop ------------------------------------------------------------------------------------ */

static void leave_loop(struct kvist_daemon *daemon)
{
    daemon->save_deadline_us = 0;
    kvist_watch_clears(daemon); /* else the next start would drop what was just saved */
    (void)event_base_loopbreak(daemon->base);
}

static void on_saved(void *ctx, const struct kvist_store_saved *saved)
{
    struct kvist_daemon *daemon = ctx;
    if (daemon->save_deadline_us == 0) {
        return; /* it took too long, or a second signal came */
    }
    if (saved->status == KVIST_OK) {
        kvist_log(KVIST_LOG_INFO,
                  "hot set saved status=OK blocks=%llu bytes=%llu",
                  (unsigned long long)saved->blocks,
                  (unsigned long long)saved->bytes);
    } else {
        kvist_log(KVIST_LOG_WARN,
                  "hot set not saved in full status=%s blocks=%llu bytes=%llu unsaved_blocks=%llu "
                  "unsaved_bytes=%llu error=\"%s\"",
                  kvist_status_name(saved->status),
                  (unsigned long long)saved->blocks,
                  (unsigned long long)saved->bytes,
                  (unsigned long long)saved->unsaved_blocks,
                  (unsigned long long)saved->unsaved_bytes,
                  saved->why);
    }
    leave_loop(daemon);
}

static void watch_save(struct kvist_daemon *daemon, uint64_t now_us)
{
    if (now_us >= daemon->save_deadline_us) {
        kvist_log(KVIST_LOG_WARN,
                  "saving the hot set took longer than daemon.stop_save_s=%llu, the rest is lost",
                  (unsigned long long)daemon->config.daemon_stop_save_s);
        leave_loop(daemon);
        return;
    }
    if (now_us - daemon->save_logged_us < SAVE_LOG_US) {
        return;
    }
    daemon->save_logged_us = now_us;
    struct kvist_store_stats stats;
    kvist_store_stats(daemon->store, &stats);
    kvist_log(KVIST_LOG_INFO,
              "saving the hot set blocks_on_nvme=%llu blocks_in_memory=%llu left_s=%llu",
              (unsigned long long)stats.tier.blocks,
              (unsigned long long)stats.slots_ready,
              (unsigned long long)((daemon->save_deadline_us - now_us) / 1000000));
}

/* Stop accepting and save; the loop ends when that is done. Engines keep what they have mapped. */
static void stop(struct kvist_daemon *daemon, const char *reason)
{
    daemon->stopping = true;
    uint64_t save_us = daemon->config.daemon_stop_save_s * 1000000;
    kvist_log(KVIST_LOG_INFO, "stopping reason=%s", reason);
    kvist_notify_stopping(&daemon->notify, "Saving the hot set", save_us + STOP_EXTRA_US);
    kvist_server_stop_accepting(&daemon->server);
    kvist_listener_silence(&daemon->listener);
    for (size_t index = 0; index < daemon->tenant_socket_count; index++) {
        kvist_listener_silence(&daemon->tenant_sockets[index].listener);
    }
    struct kvist_store_stats stats;
    kvist_store_stats(daemon->store, &stats);
    if (!stats.has_tier || save_us == 0) {
        leave_loop(daemon);
        return;
    }
    daemon->save_deadline_us = kvist_clock_now_us() + save_us;
    enum kvist_status status = kvist_store_save(daemon->store, on_saved, daemon);
    if (status != KVIST_OK) {
        kvist_log(KVIST_LOG_ERROR,
                  "cannot save the hot set status=%s action=ignored",
                  kvist_status_name(status));
        leave_loop(daemon);
    }
}

static void on_stop_signal(evutil_socket_t number, short what, void *ctx)
{
    (void)what;
    struct kvist_daemon *daemon = ctx;
    if (daemon->stopping) {
        /* What is on NVMe survives this as it survives a kill. */
        kvist_log(KVIST_LOG_WARN, "stopping at once, told twice");
        _exit(KVIST_EXIT_OK);
    }
    stop(daemon, number == SIGTERM ? "SIGTERM" : "SIGINT");
}

static void say_ready(struct kvist_daemon *daemon)
{
    char size[32];
    char status[160];
    (void)snprintf(status,
                   sizeof(status),
                   "Serving on %.107s with %s of memory",
                   daemon->listener.path,
                   kvist_size_format(daemon->arena_bytes, size));
    kvist_notify_ready(&daemon->notify, status);
}

static void on_reload_signal(evutil_socket_t number, short what, void *ctx)
{
    (void)number;
    (void)what;
    struct kvist_daemon *daemon = ctx;
    struct kvist_error err = KVIST_ERROR_INIT;
    if (daemon->stopping) {
        return;
    }
    kvist_notify_reloading(&daemon->notify);
    enum kvist_status status = kvist_daemon_reload(daemon, &err);
    say_ready(daemon);
    if (status != KVIST_OK) {
        kvist_notify_status(&daemon->notify, "The last reload failed; see the log");
    }
}

/* --- Start ----------------------------------------------------------------------------------- */

static void print_metrics(void *ctx, FILE *file)
{
    struct kvist_daemon *daemon = ctx;
    kvist_metrics_print(&daemon->metrics, KVIST_RELEASE, file);
}

static void print_health(void *ctx, FILE *file)
{
    const struct kvist_daemon *daemon = ctx;
    char text[KVIST_HEALTH_BYTES];
    kvist_metrics_health(&daemon->metrics, text);
    (void)fputs(text, file);
}

static bool is_ready(void *ctx)
{
    const struct kvist_daemon *daemon = ctx;
    return daemon->ready && !daemon->stopping;
}

/* A socket, and what an earlier kvistd has left with the service manager. */
static enum kvist_status take_passed(struct kvist_daemon *daemon, struct kvist_error *err)
{
    kvist_notify_init(&daemon->notify);
    kvist_fdstore_init(&daemon->fdstore, &daemon->notify);
    enum kvist_status status = kvist_listener_take_passed(&daemon->listener, &daemon->fdstore, err);
    return status == KVIST_NOT_FOUND ? KVIST_OK : status;
}

static enum kvist_status open_listener(const struct kvist_config *config,
                                       const char *key,
                                       const char *path,
                                       struct kvist_listener *listener_out,
                                       struct kvist_error *err)
{
    return kvist_listener_open(key,
                               path,
                               (mode_t)config->daemon_socket_mode,
                               config->daemon_socket_group,
                               listener_out,
                               err);
}

static enum kvist_status open_sockets(struct kvist_daemon *daemon, struct kvist_error *err)
{
    const struct kvist_config *config = &daemon->config;
    enum kvist_status status =
        kvist_places_check(config, &daemon->http_address, daemon->listener.fd >= 0, err);
    if (status == KVIST_OK && daemon->listener.fd < 0) {
        status = open_listener(
            config, "daemon.socket", config->daemon_socket, &daemon->listener, err);
    }
    if (status == KVIST_OK) {
        kvist_server_add_socket(&daemon->server, daemon->listener.fd, NULL);
    }
    for (size_t index = 0; index < config->limits_count && status == KVIST_OK; index++) {
        const struct kvist_tenant_limits *tenant = &config->limits[index];
        if (tenant->socket[0] != '\0') {
            struct kvist_tenant_socket *at = &daemon->tenant_sockets[daemon->tenant_socket_count];
            (void)snprintf(at->tenant, sizeof(at->tenant), "%s", tenant->tenant);
            status = open_listener(config, KVIST_PLACE_TENANT, tenant->socket, &at->listener, err);
            if (status == KVIST_OK) {
                daemon->tenant_socket_count++;
                kvist_server_add_socket(&daemon->server, at->listener.fd, at->tenant);
            }
        }
    }
    return status;
}

static enum kvist_status keep_fd(void *ctx, const char *name, int fd)
{
    struct kvist_daemon *daemon = ctx;
    return kvist_fdstore_keep(&daemon->fdstore, name, fd);
}

static void forget_fd(void *ctx, const char *name)
{
    struct kvist_daemon *daemon = ctx;
    kvist_fdstore_forget(&daemon->fdstore, name);
}

static uint64_t available_bytes(void *ctx)
{
    (void)ctx;
    struct kvist_machine machine;
    return kvist_machine_read("", &machine, NULL) == KVIST_OK ? machine.available_bytes : 0;
}

static void on_kept(void *ctx, uint64_t safe)
{
    struct kvist_daemon *daemon = ctx;
    kvist_store_kept(daemon->store, safe);
    (void)event_add(daemon->turn, &at_once);
}

/* What ranks' tensors look like goes with the blocks that they have written. */
static enum kvist_status
open_shapes(struct kvist_daemon *daemon, int *fd, struct kvist_error *err)
{
    struct kvist_adoption adoption;
    kvist_store_adoption(daemon->store, &adoption);
    bool was_stored = *fd >= 0;
    int passed = -1;
    if (adoption.adopted) {
        passed = *fd;
        *fd = -1;
    }
    int fresh = -1;
    enum kvist_status status = kvist_shapes_open(
        passed, kvist_store_instance(daemon->store), &daemon->shapes, &fresh, err);
    if (fresh < 0) {
        return status;
    }
    if (was_stored) {
        kvist_fdstore_forget(&daemon->fdstore, KVIST_SHAPES_NAME);
    }
    if (daemon->fdstore.max > 0 &&
        kvist_fdstore_put(&daemon->fdstore, KVIST_SHAPES_NAME, fresh) != KVIST_OK) {
        kvist_log(KVIST_LOG_WARN, "the next kvistd will not know ranks' tensors");
    }
    (void)close(fresh);
    return status;
}

static enum kvist_status open_store(struct kvist_daemon *daemon, struct kvist_error *err)
{
    int shapes_fd = kvist_fdstore_take(&daemon->fdstore, KVIST_SHAPES_NAME);
    const struct kvist_config *config = &daemon->config;
    const struct kvist_tier_options tier = {
        .path = config->nvme_path,
        .bytes_max = config->nvme_bytes,
        .extent_bytes = config->nvme_extent_bytes,
        .io_threads = (uint32_t)config->nvme_io_threads,
        .depth_max = (uint32_t)config->nvme_depth_max,
    };
    uint32_t by_files = kvist_machine_segments_max(daemon->metrics.files_max);
    uint32_t by_keeper = kvist_fdstore_segments(&daemon->fdstore);
    const struct kvist_store_options options = {
        .arena_bytes = daemon->arena_bytes,
        .huge_pages = config->memory_huge_pages == 0,
        .populate_ahead = true,
        .make_way = true,
        .checksum_threads = (uint32_t)config->memory_checksum_threads,
        .hold_us = config->limits_hold_ms * 1000,
        .admission = (enum kvist_admission)config->nvme_admission,
        .eviction = (enum kvist_eviction)config->memory_eviction,
        .tier = config->nvme_path[0] != '\0' ? &tier : NULL,
        .events = kvist_push_events,
        .keeper = {.keep = daemon->fdstore.max > 0 ? keep_fd : NULL,
                   .forget = daemon->fdstore.max > 0 ? forget_fd : NULL,
                   .segments_max = by_keeper != 0 && by_keeper < by_files ? by_keeper : by_files},
        .available = available_bytes,
        .let_go_bytes = daemon->fdstore.let_go_bytes,
        .kept = daemon->fdstore.passed,
        .kept_count = daemon->fdstore.passed_count,
        .ctx = daemon,
    };
    enum kvist_status status =
        kvist_fdstore_fit(&daemon->fdstore, kvist_store_segments_max(daemon->arena_bytes), err);
    if (status == KVIST_OK) {
        status = kvist_store_open(&options, &daemon->store, err);
    }
    if (status == KVIST_OK) {
        kvist_cleared_init(&daemon->cleared);
        kvist_cleared_tell(&daemon->cleared, daemon->store);
        kvist_fdstore_start(&daemon->fdstore, daemon->base, on_kept, daemon);
        kvist_watch_adoption(daemon);
        status = open_shapes(daemon, &shapes_fd, err);
    }
    if (shapes_fd >= 0) {
        (void)close(shapes_fd);
    }
    return status;
}

static enum kvist_status watch(struct kvist_daemon *daemon, struct kvist_error *err)
{
    static const int numbers[] = {SIGTERM, SIGINT, SIGHUP};
    bool good = true;
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(numbers); index++) {
        daemon->signals[index] =
            evsignal_new(daemon->base,
                         numbers[index],
                         numbers[index] == SIGHUP ? on_reload_signal : on_stop_signal,
                         daemon);
        good =
            good && daemon->signals[index] != NULL && event_add(daemon->signals[index], NULL) == 0;
    }
    good = watch_store(daemon) && good;
    daemon->turn = evtimer_new(daemon->base, on_store_event, daemon);
    daemon->tick = evtimer_new(daemon->base, on_tick, daemon);
    daemon->tick_due_us = kvist_clock_now_us() + TICK_US;
    good = good && daemon->turn != NULL && daemon->tick != NULL &&
           event_add(daemon->tick, &tick_time) == 0;
    return good ? KVIST_OK
                : kvist_error_set(err, KVIST_NO_MEMORY, 0, "libevent", "cannot start the loop");
}

static enum kvist_status start_serving(struct kvist_daemon *daemon, struct kvist_error *err)
{
    daemon->sessions.base = daemon->base;
    daemon->sessions.store = daemon->store;
    daemon->sessions.counters = &daemon->counters;
    daemon->metrics.store = daemon->store;
    daemon->metrics.counters = &daemon->counters;
    daemon->metrics.connection_count = &daemon->server.connection_count;
    daemon->metrics.started_us = kvist_clock_now_us();
    const struct kvist_server_handler handler = {
        .message = kvist_dispatch_message,
        .turn_ended = on_turn_ended,
        .refused = on_refused,
        .connection_gone = on_connection_gone,
        .ctx = daemon,
    };
    enum kvist_status status = kvist_sessions_adopt(&daemon->sessions, err);
    if (status != KVIST_OK) {
        return status;
    }
    status = kvist_server_start(&daemon->server,
                                daemon->base,
                                &daemon->config,
                                &daemon->counters,
                                &handler,
                                err);
    const struct kvist_http_pages pages = {
        .metrics = print_metrics,
        .health = print_health,
        .ready = is_ready,
        .ctx = daemon,
    };
    if (status == KVIST_OK) {
        status = kvist_http_start(
            &daemon->http, daemon->base, &daemon->http_address, &daemon->counters, &pages, err);
    }
    return status;
}

static enum kvist_status start(struct kvist_daemon *daemon, struct kvist_error *err)
{
    daemon->base = event_base_new();
    if (daemon->base == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "libevent", "cannot make an event loop");
    }
    enum kvist_status status = open_sockets(daemon, err);
    if (status == KVIST_OK) {
        status = open_store(daemon, err);
    }
    if (status == KVIST_OK) {
        set_tenants(daemon);
    }
    if (status == KVIST_OK) {
        status = watch(daemon, err);
    }
    if (status == KVIST_OK) {
        status = start_serving(daemon, err);
    }
    if (status != KVIST_OK) {
        return status;
    }
    char size[32];
    kvist_log(KVIST_LOG_INFO,
              "serving version=%s socket=%s arena=%s nvme=%s files_max=%llu",
              KVIST_RELEASE,
              daemon->listener.path,
              kvist_size_format(daemon->arena_bytes, size),
              daemon->config.nvme_path[0] != '\0' ? daemon->config.nvme_path : "off",
              (unsigned long long)daemon->metrics.files_max);
    if (daemon->config.memory_huge_pages == 0 && !kvist_machine_has_huge_pages("")) {
        kvist_log(KVIST_LOG_INFO,
                  "the system offers no huge pages for shared memory, first writes by engines are "
                  "slower; echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled");
    }
    if (kvist_machine_file_bytes_max() < daemon->arena_bytes) {
        kvist_log(KVIST_LOG_WARN,
                  "files may have no more than %s here, and shared memory is files: raise "
                  "LimitFSIZE= or ulimit -f",
                  kvist_size_format(kvist_machine_file_bytes_max(), size));
    }
    daemon->ready = true;
    daemon->alive_interval_us = kvist_notify_interval_us();
    say_ready(daemon);
    return KVIST_OK;
}

static void free_event(struct event **event)
{
    if (*event != NULL) {
        event_free(*event);
        *event = NULL;
    }
}

/* Everything in reverse; what was not opened is zero. */
static void finish(struct kvist_daemon *daemon)
{
    kvist_store_leave(daemon->store); /* for the next kvistd, if the service manager wants one */
    kvist_http_stop(&daemon->http);
    kvist_server_stop(&daemon->server);
    kvist_sessions_clear(&daemon->sessions);
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(daemon->signals); index++) {
        free_event(&daemon->signals[index]);
    }
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(daemon->store_events); index++) {
        free_event(&daemon->store_events[index]);
    }
    free_event(&daemon->turn);
    free_event(&daemon->tick);
    kvist_store_close(&daemon->store);
    kvist_shapes_close(&daemon->shapes);
    kvist_fdstore_fini(&daemon->fdstore);
    kvist_notify_fini(&daemon->notify);
    kvist_listener_close(&daemon->listener);
    for (size_t index = 0; index < daemon->tenant_socket_count; index++) {
        kvist_listener_close(&daemon->tenant_sockets[index].listener);
    }
    if (daemon->base != NULL) {
        event_base_free(daemon->base);
    }
}

/* What the configuration is to blame for, or the machine that it is made for; not the moment. */
int kvist_daemon_exit_code(enum kvist_status status)
{
    switch ((int)status) {
    case KVIST_OK:
        return KVIST_EXIT_OK;
    case KVIST_INVALID:
    case KVIST_NOT_FOUND:
    case KVIST_DENIED:
        return KVIST_EXIT_CONFIG;
    default:
        return KVIST_EXIT_FAILURE;
    }
}

int kvist_daemon_run(const struct kvist_daemon_options *options)
{
    struct kvist_daemon *daemon = calloc(1, sizeof(*daemon));
    if (daemon == NULL) {
        kvist_log(KVIST_LOG_ERROR, "out of memory");
        return KVIST_EXIT_FAILURE;
    }
    daemon->listener = (struct kvist_listener)KVIST_LISTENER_INIT;
    daemon->fdstore.barrier_fd = -1;
    daemon->options = *options;
    struct kvist_error err = KVIST_ERROR_INIT;
    enum kvist_status status = take_limits(&daemon->metrics.files_max, &err);
    if (status == KVIST_OK) {
        status = load(options, &daemon->config, &daemon->http_address, &err);
    }
    if (status == KVIST_OK) {
        kvist_log_set_level((enum kvist_log_level)daemon->config.daemon_log_level);
        status = take_passed(daemon, &err);
    }
    if (status == KVIST_OK) {
        struct kvist_config fitted = daemon->config;
        status = fit(&fitted, &daemon->fdstore, &err);
        daemon->arena_bytes = fitted.memory_arena_bytes;
    }
    if (status == KVIST_OK) {
        status = start(daemon, &err);
    }
    int exit_code = kvist_daemon_exit_code(status);
    if (status != KVIST_OK) {
        kvist_log(KVIST_LOG_ERROR, "kvistd cannot start: %s", err.text);
    } else if (event_base_dispatch(daemon->base) < 0) {
        kvist_log(KVIST_LOG_ERROR, "the event loop failed errno=%d", errno);
        exit_code = KVIST_EXIT_FAILURE;
    }
    bool served = daemon->ready;
    finish(daemon);
    free(daemon);
    if (served) {
        kvist_log(KVIST_LOG_INFO, "stopped");
    }
    return exit_code;
}
