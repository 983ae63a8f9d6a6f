/* libkvist and a real kvistd: engines as processes of their own, and a daemon that is stopped,
 * killed, cleared and kept evicting. Usage: client_e2e_test KVISTD KVIST */
#include "client/tool/request.h"
#include "proto/base/clock.h"
#include "tests/support/unit.h"

#include <kvist/client.h>

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define BLOCK_BYTES ((uint64_t)64 << 10)
#define PATIENCE_US 20000000U

static const char *kvistd_path;
static const char *kvist_path;

static struct {
    char directory[64];
    char socket_path[108];
    const char *arena;
    pid_t pid;
} daemon_under_test;

static uint64_t slot_bytes; /* of the pools that engines open */

/* --- Daemon -------------------------------------------------------------------------------- */

static void pause_ms(long ms)
{
    struct timespec pause = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    (void)nanosleep(&pause, NULL);
}

static void in_directory(const char *name, char path_out[108])
{
    (void)snprintf(path_out, 108, "%s/%s", daemon_under_test.directory, name);
}

static int notify_socket(char path_out[108])
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    in_directory("notify", path_out);
    (void)unlink(path_out);
    memcpy(address.sun_path, path_out, strlen(path_out) + 1);
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    KVIST_TEST_FATAL(fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof(address)) == 0);
    return fd;
}

static void daemon_start(void)
{
    char notify[108];
    char conf[108];
    int fd = notify_socket(notify);
    in_directory("conf", conf);
    int conf_fd = open(conf, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    KVIST_TEST_FATAL(conf_fd >= 0);
    (void)close(conf_fd);
    daemon_under_test.pid = fork();
    if (daemon_under_test.pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        (void)setenv("NOTIFY_SOCKET", notify, 1);
        (void)execl(kvistd_path,
                    kvistd_path,
                    "--config",
                    conf,
                    "--socket",
                    daemon_under_test.socket_path,
                    "--metrics",
                    "off",
                    "--log-level",
                    "error",
                    "--arena",
                    daemon_under_test.arena,
                    (char *)NULL);
        _exit(127);
    }
    char text[512] = "";
    while (strstr(text, "READY=1") == NULL) {
        struct pollfd ready = {.fd = fd, .events = POLLIN};
        KVIST_TEST_FATAL(poll(&ready, 1, 30000) == 1);
        ssize_t length = recv(fd, text, sizeof(text) - 1, 0);
        text[length > 0 ? length : 0] = '\0';
    }
    (void)close(fd);
}

static void daemon_end(int signal_number)
{
    if (daemon_under_test.pid > 0) {
        (void)kill(daemon_under_test.pid, signal_number);
        (void)kill(daemon_under_test.pid, SIGCONT);
        (void)waitpid(daemon_under_test.pid, NULL, 0);
        daemon_under_test.pid = 0;
    }
}

static void setup(void)
{
    (void)snprintf(
        daemon_under_test.directory, sizeof(daemon_under_test.directory), "/tmp/kvist-e2e-XXXXXX");
    KVIST_TEST_FATAL(mkdtemp(daemon_under_test.directory) != NULL);
    in_directory("kvist.sock", daemon_under_test.socket_path);
    daemon_under_test.arena = "16M";
    slot_bytes = BLOCK_BYTES;
    daemon_start();
}

static void teardown(void)
{
    static const char *const names[] = {"kvist.sock", "kvist.sock.lock", "notify", "conf"};
    daemon_end(SIGTERM);
    for (size_t index = 0; index < sizeof(names) / sizeof(names[0]); index++) {
        char path[108];
        in_directory(names[index], path);
        (void)unlink(path);
    }
    KVIST_TEST_TRUE(rmdir(daemon_under_test.directory) == 0); /* nothing is left behind */
}

/* A figure of the daemon's. */
static double figure(const char *name)
{
    struct kvist_request *request = NULL;
    Kvist__Wire__Envelope *reply = NULL;
    Kvist__Wire__Stat stat;
    Kvist__Wire__Envelope envelope;
    double value = -1;
    kvist__wire__stat__init(&stat);
    kvist__wire__envelope__init(&envelope);
    envelope.body_case = KVIST__WIRE__ENVELOPE__BODY_STAT;
    envelope.stat = &stat;
    KVIST_TEST_FATAL(
        kvist_request_open(daemon_under_test.socket_path, PATIENCE_US, &request, NULL) == KVIST_OK);
    KVIST_TEST_FATAL(kvist_request_call(request,
                                        &envelope,
                                        KVIST__WIRE__ENVELOPE__BODY_STAT_REPLY,
                                        PATIENCE_US,
                                        &reply,
                                        NULL) == KVIST_OK);
    for (size_t index = 0; index < reply->stat_reply->n_metrics; index++) {
        if (strcmp(reply->stat_reply->metrics[index]->name, name) == 0) {
            value = reply->stat_reply->metrics[index]->value;
        }
    }
    kvist_message_free(&reply);
    kvist_request_close(&request);
    return value;
}

/* --- Engines ------------------------------------------------------------------------------- */

struct engine {
    struct kvist_client *client;
    struct kvist_pool *pool;
};

#define EVENTUALLY(condition)                                                                      \
    do {                                                                                           \
        uint64_t deadline_us = kvist_clock_now_us() + PATIENCE_US;                                 \
        bool eventually = (condition); /* once at a time: it may put a block */                    \
        while (!eventually && kvist_clock_now_us() < deadline_us) {                                \
            pause_ms(1);                                                                           \
            eventually = (condition);                                                              \
        }                                                                                          \
        KVIST_TEST_FATAL(eventually);                                                              \
    } while (0)

static void engine_open(struct engine *engine,
                        enum kvist_role role,
                        const uint8_t session_id[16],
                        uint32_t rank,
                        uint32_t rank_count)
{
    struct kvist_error err = KVIST_ERROR_INIT;
    struct kvist_client_options options = KVIST_CLIENT_OPTIONS_INIT;
    options.socket_path = daemon_under_test.socket_path;
    options.role = role;
    options.rank = rank;
    options.rank_count = rank_count;
    options.name = "e2e";
    options.detach_grace_us = 3000000;
    memcpy(options.session_id, session_id, 16);
    const struct kvist_pool_field fields[] = {{"model", "e2e", 3}};
    struct kvist_pool_options pool = KVIST_POOL_OPTIONS_INIT;
    pool.fields = fields;
    pool.field_count = 1;
    pool.slot_bytes = slot_bytes;
    KVIST_TEST_FATAL(kvist_client_create(&options, &engine->client, &err) == KVIST_OK);
    KVIST_TEST_FATAL(kvist_client_thread_start(engine->client, &err) == KVIST_OK);
    KVIST_TEST_FATAL(kvist_pool_open(engine->client, &pool, &engine->pool, &err) == KVIST_OK);
}

static void engine_make(struct engine *engine)
{
    uint8_t session_id[16];
    KVIST_TEST_FATAL(getrandom(session_id, 16, 0) == 16);
    engine_open(engine, KVIST_ROLE_ENGINE, session_id, 0, 1);
    KVIST_TEST_STATUS(kvist_pool_wait(engine->pool, PATIENCE_US, NULL), KVIST_OK);
}

static void key_of(uint64_t number, uint8_t key_out[KVIST_KEY_BYTES])
{
    uint64_t words[4] = {number * 0x9e3779b97f4a7c15ULL, number, 7, 9};
    memcpy(key_out, words, KVIST_KEY_BYTES);
}

/* Bytes that say whose they are, all over the block. */
static void fill(void *slot, uint64_t number)
{
    uint64_t *words = slot;
    for (size_t index = 0; index < BLOCK_BYTES / 8; index++) {
        words[index] = number * 1000003 + index;
    }
}

static bool is_filled(const void *slot, uint64_t number)
{
    const uint64_t *words = slot;
    for (size_t index = 0; index < BLOCK_BYTES / 8; index++) {
        if (words[index] != number * 1000003 + index) {
            return false;
        }
    }
    return true;
}

/* Put one block, posted. @return false when there was no slot */
static bool put(struct engine *engine, uint64_t number)
{
    uint8_t key[KVIST_KEY_BYTES];
    struct kvist_take take;
    size_t count = 0;
    key_of(number, key);
    if (kvist_pool_take(engine->pool, 1, &take, &count) != KVIST_OK || count == 0) {
        return false;
    }
    void *slot = NULL;
    if (kvist_pool_pin(engine->pool, take.instance) == KVIST_OK) {
        slot = kvist_pool_slot_address(engine->pool, take.instance, take.slot);
        if (slot != NULL) {
            fill(slot, number);
        }
        kvist_pool_unpin(engine->pool, take.instance);
    }
    if (slot == NULL || kvist_pool_mark(engine->pool, &take) != KVIST_OK) {
        kvist_pool_untake(engine->pool, &take, 1);
        return false;
    }
    return kvist_pool_commit(engine->pool, &take, key, 1, NULL, BLOCK_BYTES) == KVIST_OK;
}

enum got { GOT_MISS, GOT_RIGHT, GOT_WRONG };

/* Get one block and compare. */
static enum got get(struct engine *engine, uint64_t number)
{
    uint8_t key[KVIST_KEY_BYTES];
    struct kvist_lease lease;
    enum kvist_probe stop;
    size_t count = 0;
    enum got got = GOT_MISS;
    key_of(number, key);
    if (kvist_pool_acquire(engine->pool, key, 1, &lease, &count, &stop) != KVIST_OK || count == 0) {
        return GOT_MISS;
    }
    if (kvist_pool_pin(engine->pool, lease.instance) == KVIST_OK) {
        const void *slot = kvist_pool_slot_address(engine->pool, lease.instance, lease.slot);
        got = slot != NULL && is_filled(slot, number) ? GOT_RIGHT : GOT_WRONG;
        kvist_pool_unpin(engine->pool, lease.instance);
    } else {
        got = GOT_WRONG; /* a hit must be readable */
    }
    kvist_pool_release(engine->pool, &lease, 1);
    return got;
}

/* Run a body as a process of its own. @return its pid; it exits 0 when body() is true */
static pid_t spawn(bool (*body)(void))
{
    pid_t pid = fork();
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        _exit(body() ? 0 : 1);
    }
    KVIST_TEST_FATAL(pid > 0);
    return pid;
}

static bool ended_well(pid_t pid)
{
    int status = -1;
    return waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/* --- Sharing ------------------------------------------------------------------------------- */

static bool put_twenty(void)
{
    struct engine engine;
    engine_make(&engine);
    bool done = true;
    for (uint64_t number = 1; number <= 20; number++) {
        uint64_t deadline_us = kvist_clock_now_us() + PATIENCE_US;
        bool was_put = false;
        while (!was_put && kvist_clock_now_us() < deadline_us) {
            was_put = put(&engine, number);
            pause_ms(was_put ? 0 : 1);
        }
        done = done && was_put;
    }
    while (done && get(&engine, 20) == GOT_MISS) {
        pause_ms(1);
    }
    kvist_client_destroy(&engine.client);
    return done;
}

static void blocks_outlive_the_engine_that_put_them(void)
{
    struct engine engine;
    KVIST_TEST_TRUE(ended_well(spawn(put_twenty)));
    engine_make(&engine);
    for (uint64_t number = 1; number <= 20; number++) {
        KVIST_TEST_EQUAL(get(&engine, number), GOT_RIGHT);
    }
    KVIST_TEST_EQUAL(get(&engine, 21), GOT_MISS);
    kvist_client_destroy(&engine.client);
}

static void a_block_is_stored_once(void)
{
    struct engine one;
    struct engine other;
    engine_make(&one);
    engine_make(&other);
    EVENTUALLY(put(&one, 1));
    EVENTUALLY(get(&other, 1) == GOT_RIGHT);
    EVENTUALLY(put(&other, 1));
    EVENTUALLY(figure("commits_duplicate_total") >= 1);
    KVIST_TEST_EQUAL(figure("slots_ready"), 1);
    kvist_client_destroy(&one.client);
    kvist_client_destroy(&other.client);
}

static uint64_t grants_held(const struct engine *engine)
{
    struct kvist_client_stats stats;
    kvist_client_stats(engine->client, &stats);
    return stats.grants_held;
}

/* An empty arena, large blocks, and an engine that has stored nothing yet. */
static void a_new_engine_can_store_whole_prompts(void)
{
    enum { CHUNKS = 31 };
    struct engine engine;
    daemon_end(SIGTERM);
    daemon_under_test.arena = "2G";
    slot_bytes = 16ULL << 20;
    daemon_start();
    engine_make(&engine);
    EVENTUALLY(grants_held(&engine) >= CHUNKS);
    for (uint64_t number = 1; number <= CHUNKS; number++) {
        KVIST_TEST_TRUE(put(&engine, number));
    }
    for (uint64_t number = 1; number <= CHUNKS; number++) {
        EVENTUALLY(get(&engine, number) == GOT_RIGHT);
    }
    kvist_client_destroy(&engine.client);
}

/* --- Ranks --------------------------------------------------------------------------------- */

static uint8_t shared_session[16];
static int order_pipes[2][2];
static int answer_pipes[2][2];
static uint32_t spawned_rank;

struct order {
    struct kvist_take take; /* reservation 0: read `lease` instead */
    struct kvist_lease lease;
    uint64_t number;
};

/* A rank: does what the scheduler orders, its half of each block. */
static bool serve_rank(void)
{
    uint32_t rank = spawned_rank;
    struct engine engine;
    struct order order;
    engine_open(&engine, KVIST_ROLE_WORKER, shared_session, rank, 2);
    (void)close(order_pipes[rank][1]); /* else the end of the other side is not seen */
    while (read(order_pipes[rank][0], &order, sizeof(order)) == (ssize_t)sizeof(order)) {
        bool stores = order.take.reservation != 0;
        uint64_t instance = stores ? order.take.instance : order.lease.instance;
        uint32_t slot = stores ? order.take.slot : order.lease.slot;
        uint8_t answer = 0;
        if (kvist_pool_pin(engine.pool, instance) == KVIST_OK) {
            uint8_t *address = kvist_pool_slot_address(engine.pool, instance, slot);
            uint8_t *half = address != NULL ? address + rank * BLOCK_BYTES / 2 : NULL;
            if (half != NULL && stores) {
                memset(half, (int)(order.number + rank), BLOCK_BYTES / 2);
                answer = kvist_pool_mark(engine.pool, &order.take) == KVIST_OK;
            } else if (half != NULL) {
                answer = half[0] == order.number + rank &&
                         half[BLOCK_BYTES / 2 - 1] == order.number + rank;
            }
            kvist_pool_unpin(engine.pool, instance);
        }
        if (write(answer_pipes[rank][1], &answer, 1) != 1) {
            return false;
        }
    }
    kvist_client_destroy(&engine.client);
    return true;
}

static bool give_order(uint32_t rank, const struct order *order)
{
    uint8_t answer = 0;
    return write(order_pipes[rank][1], order, sizeof(*order)) == (ssize_t)sizeof(*order) &&
           read(answer_pipes[rank][0], &answer, 1) == 1 && answer == 1;
}

static void two_ranks_fill_and_read_their_halves(void)
{
    pid_t pids[2];
    struct engine scheduler;
    uint8_t key[KVIST_KEY_BYTES];
    size_t count = 0;
    KVIST_TEST_FATAL(getrandom(shared_session, 16, 0) == 16);
    for (spawned_rank = 0; spawned_rank < 2; spawned_rank++) {
        KVIST_TEST_FATAL(pipe2(order_pipes[spawned_rank], O_CLOEXEC) == 0);
        KVIST_TEST_FATAL(pipe2(answer_pipes[spawned_rank], O_CLOEXEC) == 0);
        pids[spawned_rank] = spawn(serve_rank);
        (void)close(order_pipes[spawned_rank][0]);
    }
    engine_open(&scheduler, KVIST_ROLE_SCHEDULER, shared_session, 0, 2);
    KVIST_TEST_STATUS(kvist_pool_wait(scheduler.pool, PATIENCE_US, NULL), KVIST_OK);
    struct order order = {.number = 100};
    key_of(1, key);
    EVENTUALLY(kvist_pool_take(scheduler.pool, 1, &order.take, &count) == KVIST_OK && count == 1);
    KVIST_TEST_TRUE(give_order(0, &order));
    KVIST_TEST_TRUE(give_order(1, &order));
    KVIST_TEST_STATUS(kvist_pool_commit(scheduler.pool, &order.take, key, 1, NULL, BLOCK_BYTES),
                      KVIST_OK);
    order.take.reservation = 0;
    enum kvist_probe stop;
    EVENTUALLY(kvist_pool_acquire(scheduler.pool, key, 1, &order.lease, &count, &stop) ==
                   KVIST_OK &&
               count == 1);
    KVIST_TEST_TRUE(give_order(0, &order));
    KVIST_TEST_TRUE(give_order(1, &order));
    kvist_pool_release(scheduler.pool, &order.lease, 1);

    /* One rank does not fill: nothing is published, and the slot comes back. */
    key_of(2, key);
    order.number = 50;
    EVENTUALLY(kvist_pool_take(scheduler.pool, 1, &order.take, &count) == KVIST_OK && count == 1);
    KVIST_TEST_TRUE(give_order(0, &order));
    KVIST_TEST_STATUS(kvist_pool_commit(scheduler.pool, &order.take, key, 1, NULL, BLOCK_BYTES),
                      KVIST_OK);
    EVENTUALLY(figure("commits_unmarked_total") >= 1);
    KVIST_TEST_EQUAL(get(&scheduler, 2), GOT_MISS);
    kvist_client_destroy(&scheduler.client);
    for (uint32_t rank = 0; rank < 2; rank++) {
        (void)close(order_pipes[rank][1]);
    }
    KVIST_TEST_TRUE(ended_well(pids[0]));
    KVIST_TEST_TRUE(ended_well(pids[1]));
    for (uint32_t rank = 0; rank < 2; rank++) {
        (void)close(answer_pipes[rank][0]);
        (void)close(answer_pipes[rank][1]);
    }
}

/* --- Losing each other --------------------------------------------------------------------- */

static void hits_go_on_when_the_daemon_is_killed(void)
{
    struct engine engine;
    struct kvist_take take;
    uint8_t key[KVIST_KEY_BYTES];
    size_t count = 0;
    engine_make(&engine);
    EVENTUALLY(put(&engine, 1));
    EVENTUALLY(get(&engine, 1) == GOT_RIGHT);
    EVENTUALLY(kvist_pool_take(engine.pool, 1, &take, &count) == KVIST_OK && count == 1);
    daemon_end(SIGKILL);
    for (uint32_t round = 0; round < 200; round++) {
        KVIST_TEST_EQUAL(get(&engine, 1), GOT_RIGHT);
        pause_ms(1);
    }
    EVENTUALLY(!kvist_client_connected(engine.client));
    KVIST_TEST_TRUE(!put(&engine, 2));
    daemon_start(); /* without its memory: another arena */
    EVENTUALLY(kvist_client_connected(engine.client));
    EVENTUALLY(kvist_pool_instance(engine.pool) != take.instance);
    key_of(2, key);
    KVIST_TEST_STATUS(kvist_pool_commit(engine.pool, &take, key, 1, NULL, BLOCK_BYTES),
                      KVIST_STALE);
    KVIST_TEST_EQUAL(get(&engine, 1), GOT_MISS);
    EVENTUALLY(put(&engine, 1));
    EVENTUALLY(get(&engine, 1) == GOT_RIGHT);
    KVIST_TEST_EQUAL(get(&engine, 2), GOT_MISS);
    kvist_client_destroy(&engine.client);
}

static void it_may_die_again_and_again(void)
{
    struct engine engine;
    engine_make(&engine);
    for (uint32_t round = 0; round < 5; round++) {
        EVENTUALLY(put(&engine, round));
        EVENTUALLY(get(&engine, round) == GOT_RIGHT);
        daemon_end(SIGKILL);
        KVIST_TEST_EQUAL(get(&engine, round), GOT_RIGHT);
        daemon_start();
        EVENTUALLY(get(&engine, round) == GOT_MISS);
    }
    kvist_client_destroy(&engine.client);
}

static void the_grace_ends_when_nobody_comes_back(void)
{
    struct engine engine;
    struct kvist_client_stats stats;
    engine_make(&engine);
    EVENTUALLY(put(&engine, 1));
    EVENTUALLY(get(&engine, 1) == GOT_RIGHT);
    daemon_end(SIGKILL);
    pause_ms(1000);
    KVIST_TEST_EQUAL(get(&engine, 1), GOT_RIGHT);
    EVENTUALLY(get(&engine, 1) == GOT_MISS);
    EVENTUALLY((kvist_client_stats(engine.client, &stats), stats.mapped_bytes == 0));
    kvist_client_destroy(&engine.client);
    daemon_start();
}

/* How often this thread has waited for something; being preempted does not count. */
static long waits(void)
{
    struct rusage usage;
    KVIST_TEST_FATAL(getrusage(RUSAGE_THREAD, &usage) == 0);
    return usage.ru_nvcsw;
}

static void a_stopped_daemon_stops_nobody(void)
{
    struct engine engine;
    uint32_t puts = 0;
    long rounds = 0;
    engine_make(&engine);
    EVENTUALLY(put(&engine, 1));
    EVENTUALLY(get(&engine, 1) == GOT_RIGHT);
    (void)kill(daemon_under_test.pid, SIGSTOP);
    long waits_before = waits();
    for (uint64_t end_us = kvist_clock_now_us() + 1000000; kvist_clock_now_us() < end_us;) {
        KVIST_TEST_EQUAL(get(&engine, 1), GOT_RIGHT);
        puts += put(&engine, 1000 + puts);
        rounds++;
    }
    KVIST_TEST_TRUE(puts > 0 && puts < 256);                 /* what was granted, then no more */
    KVIST_TEST_TRUE(waits() - waits_before <= rounds / 100); /* the pump holds the lock at times */
    (void)kill(daemon_under_test.pid, SIGCONT);
    EVENTUALLY(get(&engine, 1000) == GOT_RIGHT);
    KVIST_TEST_TRUE(kvist_client_connected(engine.client));
    kvist_client_destroy(&engine.client);
}

static bool lease_and_hang(void)
{
    struct engine engine;
    struct kvist_lease leases[8];
    struct kvist_take take;
    enum kvist_probe stop;
    size_t count = 0;
    engine_make(&engine);
    while (!put(&engine, 1) || get(&engine, 1) != GOT_RIGHT) {
        pause_ms(1);
    }
    for (uint32_t index = 0; index < 8; index++) {
        uint8_t key[KVIST_KEY_BYTES];
        key_of(1, key);
        if (kvist_pool_acquire(engine.pool, key, 1, &leases[index], &count, &stop) != KVIST_OK) {
            return false;
        }
    }
    if (kvist_pool_take(engine.pool, 1, &take, &count) != KVIST_OK) {
        return false;
    }
    for (;;) {
        pause_ms(1000);
    }
}

static void a_killed_engine_leaves_nothing_behind(void)
{
    pid_t pid = spawn(lease_and_hang);
    EVENTUALLY(figure("leased_slots") >= 1);
    KVIST_TEST_TRUE(figure("slots_granted") >= 1);
    (void)kill(pid, SIGKILL);
    (void)waitpid(pid, NULL, 0);
    uint64_t start_us = kvist_clock_now_us();
    EVENTUALLY(figure("leased_slots") == 0 && figure("slots_granted") == 0 &&
               figure("sessions") == 0);
    KVIST_TEST_TRUE(kvist_clock_now_us() - start_us < 1000000);
}

/* --- Evicting and clearing ----------------------------------------------------------------- */

static bool put_for_two_seconds(void)
{
    struct engine engine;
    engine_make(&engine);
    uint64_t number = 1;
    for (uint64_t end_us = kvist_clock_now_us() + 2000000; kvist_clock_now_us() < end_us;) {
        if (put(&engine, number)) {
            number = number % 1000 + 1;
        } else {
            struct timespec pause = {.tv_nsec = 50000};
            (void)nanosleep(&pause, NULL);
        }
    }
    kvist_client_destroy(&engine.client);
    return true;
}

/* A quarter of the blocks fit: whoever reads meets evictions all the time. */
static bool get_for_two_seconds(void)
{
    struct engine engine;
    uint64_t right = 0;
    uint64_t wrong = 0;
    uint64_t number = (uint64_t)getpid();
    engine_make(&engine);
    for (uint64_t end_us = kvist_clock_now_us() + 2000000; kvist_clock_now_us() < end_us;) {
        number = number * 6364136223846793005ULL + 1442695040888963407ULL;
        enum got got = get(&engine, (number >> 33) % 1000 + 1);
        right += got == GOT_RIGHT;
        wrong += got == GOT_WRONG;
    }
    kvist_client_destroy(&engine.client);
    return right > 0 && wrong == 0;
}

static void evicting_never_shows_a_wrong_byte(void)
{
    pid_t writers[2] = {spawn(put_for_two_seconds), spawn(put_for_two_seconds)};
    pid_t readers[2] = {spawn(get_for_two_seconds), spawn(get_for_two_seconds)};
    for (uint32_t index = 0; index < 2; index++) {
        KVIST_TEST_TRUE(ended_well(writers[index]));
        KVIST_TEST_TRUE(ended_well(readers[index]));
    }
    KVIST_TEST_TRUE(figure("evictions_total") > 100);
    EVENTUALLY(figure("leased_slots") == 0);
}

static int run_tool(const char *first, const char *second, const char *third)
{
    pid_t pid = fork();
    if (pid == 0) {
        int null = open("/dev/null", O_RDWR | O_CLOEXEC);
        (void)dup2(null, STDIN_FILENO);
        (void)dup2(null, STDOUT_FILENO);
        (void)setenv("KVIST_SOCKET", daemon_under_test.socket_path, 1);
        (void)execl(kvist_path, kvist_path, first, second, third, (char *)NULL);
        _exit(127);
    }
    int status = -1;
    KVIST_TEST_FATAL(pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void a_clear_drops_what_is_there_and_what_is_under_way(void)
{
    struct engine engine;
    struct kvist_take take;
    uint8_t key[KVIST_KEY_BYTES];
    size_t count = 0;
    engine_make(&engine);
    EVENTUALLY(put(&engine, 1));
    EVENTUALLY(get(&engine, 1) == GOT_RIGHT);
    EVENTUALLY(kvist_pool_take(engine.pool, 1, &take, &count) == KVIST_OK && count == 1);
    KVIST_TEST_EQUAL(run_tool("clear", "--all", NULL), 2); /* not without --yes */
    KVIST_TEST_EQUAL(get(&engine, 1), GOT_RIGHT);
    KVIST_TEST_EQUAL(run_tool("clear", "--all", "--yes"), 0);
    KVIST_TEST_EQUAL(get(&engine, 1), GOT_MISS);
    key_of(2, key);
    fill(kvist_pool_slot_address(engine.pool, take.instance, take.slot), 2);
    KVIST_TEST_STATUS(kvist_pool_mark(engine.pool, &take), KVIST_OK);
    KVIST_TEST_STATUS(kvist_pool_commit(engine.pool, &take, key, 1, NULL, BLOCK_BYTES), KVIST_OK);
    EVENTUALLY(figure("commits_stale_total") >= 1);
    KVIST_TEST_EQUAL(get(&engine, 2), GOT_MISS);
    EVENTUALLY(put(&engine, 2));
    EVENTUALLY(get(&engine, 2) == GOT_RIGHT);
    KVIST_TEST_TRUE(kvist_client_connected(engine.client));
    kvist_client_destroy(&engine.client);
}

/* In a process of its own: block 1 is found, which block 2 tells the other one; then it is gone. */
static bool sees_the_first_go(void)
{
    struct engine engine;
    engine_make(&engine);
    EVENTUALLY(get(&engine, 1) == GOT_RIGHT);
    EVENTUALLY(put(&engine, 2));
    EVENTUALLY(get(&engine, 1) == GOT_MISS);
    bool other_is_there = get(&engine, 2) == GOT_RIGHT;
    kvist_client_destroy(&engine.client);
    return other_is_there;
}

static void verifying_finds_a_changed_byte(void)
{
    struct engine engine;
    uint8_t key[KVIST_KEY_BYTES];
    struct kvist_lease lease;
    enum kvist_probe stop;
    size_t count = 0;
    pid_t other = spawn(sees_the_first_go); /* before this process has threads */
    engine_make(&engine);
    key_of(1, key);
    EVENTUALLY(put(&engine, 1));
    EVENTUALLY(kvist_pool_acquire(engine.pool, key, 1, &lease, &count, &stop) == KVIST_OK &&
               count == 1);
    uint8_t *slot = kvist_pool_slot_address(engine.pool, lease.instance, lease.slot);
    KVIST_TEST_FATAL(slot != NULL);
    EVENTUALLY(kvist_pool_verify(engine.pool, key, lease.instance, lease.slot, slot, BLOCK_BYTES) ==
               KVIST_OK);
    EVENTUALLY(get(&engine, 2) == GOT_RIGHT);
    slot[12345] ^= 1;
    KVIST_TEST_STATUS(
        kvist_pool_verify(engine.pool, key, lease.instance, lease.slot, slot, BLOCK_BYTES),
        KVIST_CORRUPT);
    /* The daemon was told, looked for itself, and nobody finds it any more. */
    EVENTUALLY(figure("suspects_confirmed_total") == 1);
    KVIST_TEST_EQUAL(figure("suspects_total"), 1);
    KVIST_TEST_EQUAL(figure("checksum_mismatch_total"), 1);
    KVIST_TEST_TRUE(ended_well(other));
    kvist_pool_release(engine.pool, &lease, 1);
    EVENTUALLY(put(&engine, 1)); /* the place is free for a right one */
    EVENTUALLY(get(&engine, 1) == GOT_RIGHT);
    kvist_client_destroy(&engine.client);
}

static void the_tool_tells_how_it_went_by_its_exit_status(void)
{
    KVIST_TEST_EQUAL(run_tool("status", "--json", NULL), 0);
    KVIST_TEST_EQUAL(run_tool("stat", NULL, NULL), 0);
    KVIST_TEST_EQUAL(run_tool("pools", "--json", NULL), 0);
    KVIST_TEST_EQUAL(run_tool("inspect", "no-key", NULL), 2);
    KVIST_TEST_EQUAL(run_tool("frobnicate", NULL, NULL), 2);
    KVIST_TEST_EQUAL(run_tool("save", NULL, NULL), 1); /* there is no NVMe tier */
    daemon_end(SIGTERM);
    KVIST_TEST_EQUAL(run_tool("status", NULL, NULL), 3);
    daemon_start();
}

int main(int argc, char **argv)
{
    static const struct kvist_unit_case cases[] = {
        {"blocks outlive the engine that put them", blocks_outlive_the_engine_that_put_them},
        {"a block is stored once", a_block_is_stored_once},
        {"a new engine can store whole prompts", a_new_engine_can_store_whole_prompts},
        {"two ranks fill and read their halves", two_ranks_fill_and_read_their_halves},
        {"hits go on when the daemon is killed", hits_go_on_when_the_daemon_is_killed},
        {"it may die again and again", it_may_die_again_and_again},
        {"the grace ends when nobody comes back", the_grace_ends_when_nobody_comes_back},
        {"a stopped daemon stops nobody", a_stopped_daemon_stops_nobody},
        {"a killed engine leaves nothing behind", a_killed_engine_leaves_nothing_behind},
        {"evicting never shows a wrong byte", evicting_never_shows_a_wrong_byte},
        {"a clear drops what is there and under way",
         a_clear_drops_what_is_there_and_what_is_under_way},
        {"verifying finds a changed byte", verifying_finds_a_changed_byte},
        {"the tool tells how it went", the_tool_tells_how_it_went_by_its_exit_status},
    };
    if (argc != 3) {
        (void)fprintf(stderr, "usage: %s KVISTD KVIST\n", argv[0]);
        return 2;
    }
    kvistd_path = argv[1];
    kvist_path = argv[2];
    return kvist_unit_main("client e2e", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown);
}
