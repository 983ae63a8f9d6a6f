/*
 * tier, crashing: a child process writes and is killed at any moment, or loses every write from
 * the n-th on. What is visible after it must be whole blocks of what it was asked to write.
 *
 * The child is this binary again: a process that had RocksDB's threads cannot be forked.
 */
#include "proto/base/clock.h"
#include "proto/base/fault.h"
#include "storage/tier.h"
#include "tests/support/tier_rig.h"
#include "tests/support/unit.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB         (1ULL << 20)
#define DEPTH       8U
#define NUMBERS     400U
#define SLOT_BYTES  65536U
#define GENERATION  1000000U /* version = generation * this + count */
#define CLEAR_EVERY 300U
#define ROUNDS      12U
#define ROUNDS_MAX  200U

#define ACKNOWLEDGED_LEAST 100U

/* What the child tells, one write(2) each. */
struct told {
    char kind; /* 'S' submitted, 'A' acknowledged, 'C' clear submitted, 'D' clear durable */
    uint32_t number;
    uint64_t version;
};

static struct kvist_rig rig;

/* -- the child ------------------------------------------------------------------------------ */

struct place {
    bool busy;
    uint32_t number;
    uint64_t version;
    uint8_t *bytes;
};

static void tell(char kind, uint32_t number, uint64_t version)
{
    struct told told;
    memset(&told, 0, sizeof(told));
    told.kind = kind;
    told.number = number;
    told.version = version;
    if (write(STDOUT_FILENO, &told, sizeof(told)) != sizeof(told)) {
        _exit(3);
    }
}

static void child_written(void *ctx, enum kvist_status status, const struct kvist_tier_block *block)
{
    struct place *place = ctx;
    (void)block;
    if (status == KVIST_OK) {
        tell('A', place->number, place->version);
    }
    place->busy = false;
}

static void child_cleared(void *ctx, enum kvist_status status, const struct kvist_tier_block *block)
{
    bool *clearing = ctx;
    if (status == KVIST_OK) {
        tell('D', 0, block->pool_generation);
    }
    *clearing = false;
}

static void child_write(const struct kvist_tier_pool *pool, struct place *place, uint64_t count)
{
    place->number = (uint32_t)(count % NUMBERS);
    place->version = pool->generation * GENERATION + count;
    uint64_t bytes = 24 + count * 7919 % (SLOT_BYTES - 24);
    struct kvist_tier_block block =
        kvist_rig_block(pool, place->number, place->version, bytes, place->bytes);
    tell('S', place->number, place->version);
    place->busy =
        kvist_tier_write(rig.tier, &block, place->bytes, child_written, place) == KVIST_OK;
}

/* argv: child PATH BYTES_MAX GENERATION COUNT CLEARS WRITES FAULT */
static int child_main(char **argv)
{
    struct place places[DEPTH] = {0};
    bool clearing = false;
    memset(&rig, 0, sizeof(rig));
    kvist_rig_init(&rig, strtoull(argv[3], NULL, 10));
    (void)rmdir(rig.path);
    rig.options.path = argv[2];
    struct kvist_tier_pool pool = kvist_rig_pool(1, SLOT_BYTES, strtoull(argv[4], NULL, 10));
    uint64_t count = strtoull(argv[5], NULL, 10);
    bool clears = argv[6][0] == '1';
    uint64_t left = strtoull(argv[7], NULL, 10);
    if (argv[8][0] != '0') {
        kvist_fault_arm(NULL, strtoull(argv[8], NULL, 10), true);
    }
    if (kvist_rig_open(&rig) != KVIST_OK ||
        kvist_tier_put_pool(rig.tier, &pool, child_cleared, &clearing) != KVIST_OK) {
        return 4;
    }
    for (uint32_t index = 0; index < DEPTH; index++) {
        places[index].bytes = aligned_alloc(4096, SLOT_BYTES);
    }
    for (;;) {
        bool busy = false;
        for (uint32_t index = 0; index < DEPTH; index++) {
            if (!places[index].busy && left > 0 && !clearing) {
                count++;
                left--;
                child_write(&pool, &places[index], count);
            }
            busy = busy || places[index].busy;
            if (clears && !clearing && count % CLEAR_EVERY == 0) {
                count++;
                pool.generation++;
                clearing = true;
                tell('C', 0, pool.generation);
                if (kvist_tier_put_pool(rig.tier, &pool, child_cleared, &clearing) != KVIST_OK) {
                    return 5;
                }
            }
        }
        if (left == 0 && !busy) {
            _exit(0); /* no close: what is not on disk by now is lost */
        }
        kvist_rig_turn(&rig);
    }
}

/* -- the parent ----------------------------------------------------------------------------- */

static struct {
    uint64_t acknowledged[NUMBERS]; /* newest version, 0: none */
    uint64_t submitted[NUMBERS];    /* newest version */
    uint64_t generation_durable;
    uint64_t generation_asked;
    uint64_t count;
    uint64_t acknowledged_total;
} model;

static void model_hear(const struct told *told)
{
    KVIST_TEST_FATAL(told->number < NUMBERS);
    switch (told->kind) {
    case 'S':
        model.submitted[told->number] = told->version;
        model.count = told->version % GENERATION;
        break;
    case 'A':
        model.acknowledged[told->number] = told->version;
        model.acknowledged_total++;
        break;
    case 'C':
        model.generation_asked = told->version;
        break;
    case 'D':
        model.generation_durable = told->version;
        break;
    default:
        KVIST_TEST_FATAL(false);
    }
}

static pid_t child_start(uint64_t bytes_max, bool clears, uint64_t writes, uint64_t fault, int *out)
{
    char text[5][24];
    int ends[2];
    char self[] = "/proc/self/exe";
    char child[] = "child";
    char yes[] = "1";
    char no[] = "0";
    (void)snprintf(text[0], sizeof(text[0]), "%llu", (unsigned long long)bytes_max);
    (void)snprintf(text[1], sizeof(text[1]), "%llu", (unsigned long long)model.generation_asked);
    (void)snprintf(text[2], sizeof(text[2]), "%llu", (unsigned long long)model.count);
    (void)snprintf(text[3], sizeof(text[3]), "%llu", (unsigned long long)writes);
    (void)snprintf(text[4], sizeof(text[4]), "%llu", (unsigned long long)fault);
    char *arguments[] = {self,
                         child,
                         rig.path,
                         text[0],
                         text[1],
                         text[2],
                         clears ? yes : no,
                         text[3],
                         text[4],
                         NULL};
    KVIST_TEST_FATAL(pipe2(ends, O_CLOEXEC) == 0);
    pid_t pid = fork();
    KVIST_TEST_FATAL(pid >= 0);
    if (pid == 0) {
        (void)dup2(ends[1], STDOUT_FILENO);
        (void)execv(self, arguments);
        _exit(9);
    }
    (void)close(ends[1]);
    *out = ends[0];
    return pid;
}

/* Run a child; kill it kill_us after its first word, or let it end. @return its wait status */
static int
child_run(uint64_t bytes_max, bool clears, uint64_t writes, uint64_t fault, uint64_t kill_us)
{
    int out = -1;
    int state = 0;
    pid_t pid = child_start(bytes_max, clears, writes, fault, &out);
    uint64_t start_us = 0;
    bool killed = kill_us == 0;
    for (;;) {
        struct told told;
        struct pollfd waited = {.fd = out, .events = POLLIN};
        int ready = poll(&waited, 1, 1);
        if (ready > 0) {
            ssize_t got = read(out, &told, sizeof(told));
            if (got != sizeof(told)) {
                break;
            }
            model_hear(&told);
            start_us = start_us == 0 ? kvist_clock_now_us() : start_us;
        }
        if (!killed && start_us != 0 && kvist_clock_now_us() - start_us > kill_us) {
            killed = true;
            KVIST_TEST_EQUAL(kill(pid, SIGKILL), 0);
        }
    }
    (void)close(out);
    KVIST_TEST_EQUAL(waitpid(pid, &state, 0), pid);
    return state;
}

/* Everything that can be read is whole, of the pool's generation, and was asked for. */
static uint64_t verify(bool complete)
{
    kvist_rig_start(&rig);
    /* A pool without blocks is forgotten at the start: right after a clear, or before any write. */
    uint64_t generation =
        rig.pools_loaded > 0 ? rig.last_pool.generation : model.generation_asked;
    KVIST_TEST_TRUE(generation >= model.generation_durable);
    KVIST_TEST_TRUE(generation <= model.generation_asked);
    struct kvist_tier_pool pool = kvist_rig_pool(1, SLOT_BYTES, generation);
    uint64_t visible = 0;
    for (uint32_t number = 0; number < NUMBERS; number++) {
        enum kvist_status status = kvist_rig_read(&rig, &pool, number);
        KVIST_TEST_TRUE(status == KVIST_OK || status == KVIST_NOT_FOUND);
        uint64_t version = 0;
        memcpy(&version, rig.memory + 8, sizeof(version));
        if (status == KVIST_OK) {
            visible++;
            KVIST_TEST_EQUAL(version / GENERATION, generation);
            KVIST_TEST_TRUE(version >= model.acknowledged[number] || !complete);
            KVIST_TEST_TRUE(version <= model.submitted[number]);
        } else if (complete && model.acknowledged[number] / GENERATION == generation) {
            KVIST_TEST_STATUS(status, KVIST_OK); /* acknowledged and lost */
        }
    }
    KVIST_TEST_EQUAL(visible, rig.loaded_count);
    KVIST_TEST_EQUAL(kvist_rig_stats(&rig).corrupt_total, 0);
    kvist_rig_turn_for(&rig, 20000);
    KVIST_TEST_TRUE(kvist_rig_du(rig.path) <= rig.options.bytes_max);
    kvist_rig_close(&rig);
    return visible;
}

static void begin(uint64_t bytes_max)
{
    rig.options.bytes_max = bytes_max;
    memset(&model, 0, sizeof(model));
    model.generation_asked = 1;
    model.generation_durable = 1;
    srand(20260731U);
}

static void killed_again_and_again(uint64_t bytes_max, bool clears, bool complete)
{
    begin(bytes_max);
    uint64_t visible = 0;
    /* On until enough was written to lose some of it, however slow the disk. */
    for (uint32_t round = 0;
         round < ROUNDS || (model.acknowledged_total <= ACKNOWLEDGED_LEAST && round < ROUNDS_MAX);
         round++) {
        uint64_t kill_us = 1 + (uint64_t)rand() % 120000; /* NOLINT(cert-msc30-c): any moment */
        int state = child_run(bytes_max, clears, UINT64_MAX, 0, kill_us);
        KVIST_TEST_TRUE(WIFSIGNALED(state) && WTERMSIG(state) == SIGKILL);
        visible = verify(complete);
    }
    (void)printf("\n    %llu acknowledged, %llu visible at the end\n",
                 (unsigned long long)model.acknowledged_total,
                 (unsigned long long)visible);
    KVIST_TEST_TRUE(model.acknowledged_total > ACKNOWLEDGED_LEAST);
}

static void a_kill_loses_nothing_acknowledged(void)
{
    killed_again_and_again(2048 * MIB, false, true);
}

static void a_kill_while_clearing_brings_nothing_back(void)
{
    killed_again_and_again(2048 * MIB, true, true);
}

static void a_kill_while_extents_go_leaves_whole_blocks(void)
{
    killed_again_and_again(64 * MIB, false, false);
}

/* From the n-th point on nothing reaches the disk, at any n; the next start shows whole blocks. How
   many points a write takes goes by the machine's pace: on until all writes have been seen. */
static void every_write_may_be_the_last(void)
{
    enum { WRITES = 15, POINTS_LEAST = 80, POINTS_MAX = 2000 };
    uint64_t first = 0;
    uint64_t most = 0;
    uint64_t fault = 1;
    for (; fault < POINTS_LEAST || (most < WRITES && fault < POINTS_MAX); fault++) {
        begin(64 * MIB);
        int state = child_run(64 * MIB, true, WRITES, fault, 0);
        KVIST_TEST_TRUE(WIFEXITED(state) && (WEXITSTATUS(state) == 0 || WEXITSTATUS(state) == 4));
        uint64_t visible = verify(true);
        first = first == 0 && visible > 0 ? fault : first;
        most = visible > most ? visible : most;
        kvist_unit_remove_tree(rig.path);
    }
    (void)printf("\n    blocks visible from the %llu. on, all %d by the %llu.\n",
                 (unsigned long long)first,
                 WRITES,
                 (unsigned long long)fault - 1);
    KVIST_TEST_TRUE(first > 3 && most == WRITES);
}

/* The log of the index in a directory. */
static void log_path(const char *directory, char path_out[KVIST_RIG_PATH_BYTES * 2])
{
    char index[KVIST_RIG_PATH_BYTES + 8];
    off_t most = -1;
    (void)snprintf(index, sizeof(index), "%s/index", directory);
    DIR *listing = opendir(index);
    KVIST_TEST_FATAL(listing != NULL);
    const struct dirent *entry = NULL;
    while ((entry = readdir(listing)) != NULL) { /* NOLINT(concurrency-mt-unsafe): own DIR */
        char name[KVIST_RIG_PATH_BYTES * 2];
        struct stat state;
        size_t length = strlen(entry->d_name);
        (void)snprintf(name, sizeof(name), "%s/%.64s", index, entry->d_name);
        if (length > 4 && strcmp(entry->d_name + length - 4, ".log") == 0 &&
            stat(name, &state) == 0 && state.st_size > most) {
            most = state.st_size;
            (void)snprintf(path_out, KVIST_RIG_PATH_BYTES * 2, "%s", name);
        }
    }
    (void)closedir(listing);
    KVIST_TEST_FATAL(most > 0);
}

/* Pages of extents that were never written, as after a power cut: every other one from here on. */
static void lose_pages(const char *directory, uint64_t first)
{
    static const uint8_t zeros[4096];
    for (uint32_t number = 1; number < 64; number++) {
        char path[KVIST_RIG_PATH_BYTES + 32];
        (void)snprintf(path, sizeof(path), "%s/extents/%08u", directory, number);
        int fd = open(path, O_WRONLY | O_CLOEXEC);
        if (fd < 0) {
            continue;
        }
        off_t end = lseek(fd, 0, SEEK_END);
        for (off_t at = 4096 * (off_t)(1 + first); at < end; at += 2 * 4096) {
            KVIST_TEST_FATAL(pwrite(fd, zeros, sizeof(zeros), at) == (ssize_t)sizeof(zeros));
        }
        (void)close(fd);
    }
}

/* What can be read is whole and newest of what the log still tells; @return how many blocks */
static uint64_t verify_rest(uint64_t *corrupt_out)
{
    struct kvist_tier_pool pool = kvist_rig_pool(1, SLOT_BYTES, 1);
    uint64_t visible = 0;
    kvist_rig_start(&rig);
    for (uint32_t number = 0; number < NUMBERS; number++) {
        enum kvist_status status = kvist_rig_read(&rig, &pool, number);
        uint64_t version = 0;
        memcpy(&version, rig.memory + 8, sizeof(version));
        if (status == KVIST_OK) {
            visible++;
            KVIST_TEST_TRUE(version > 0 && version <= model.submitted[number]);
        } else {
            KVIST_TEST_TRUE(status == KVIST_NOT_FOUND || status == KVIST_CORRUPT);
        }
    }
    *corrupt_out = kvist_rig_stats(&rig).corrupt_total;
    KVIST_TEST_EQUAL(visible + *corrupt_out, rig.loaded_count);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    KVIST_TEST_STATUS(kvist_rig_write(&rig, &pool, 1, 2 * GENERATION, 4096), KVIST_OK);
    KVIST_TEST_STATUS(kvist_rig_read(&rig, &pool, 1), KVIST_OK);
    kvist_rig_close(&rig);
    return visible;
}

/* The power goes after any byte of the log, with all of the extents, or some of their pages. */
static void any_part_of_the_log_may_be_what_is_left(void)
{
    char copy[KVIST_RIG_PATH_BYTES + 8];
    char command[KVIST_RIG_PATH_BYTES * 3];
    char path[KVIST_RIG_PATH_BYTES * 2];
    struct stat state;
    uint64_t visible_before = 0;
    uint64_t corrupt_total = 0;
    begin(64 * MIB);
    int ended = child_run(64 * MIB, false, 60, 0, 0);
    KVIST_TEST_TRUE(WIFEXITED(ended) && WEXITSTATUS(ended) == 0);
    log_path(rig.path, path);
    KVIST_TEST_FATAL(stat(path, &state) == 0);
    (void)snprintf(copy, sizeof(copy), "%s-copy", rig.path);
    (void)snprintf(command, sizeof(command), "cp -r '%s' '%s'", rig.path, copy);
    rig.options.path = copy;
    for (off_t left = 0; left <= state.st_size; left += state.st_size / 30 + 1) {
        uint64_t corrupt = 0;
        KVIST_TEST_FATAL(system(command) == 0); /* NOLINT(cert-env33-c): our own paths */
        log_path(copy, path);
        KVIST_TEST_FATAL(truncate(path, left) == 0);
        uint64_t visible = verify_rest(&corrupt);
        KVIST_TEST_EQUAL(corrupt, 0);
        KVIST_TEST_TRUE(visible >= visible_before);
        visible_before = visible;
        kvist_unit_remove_tree(copy);
        KVIST_TEST_FATAL(system(command) == 0); /* NOLINT(cert-env33-c): our own paths */
        log_path(copy, path);
        KVIST_TEST_FATAL(truncate(path, left) == 0);
        lose_pages(copy, (uint64_t)left % 200);
        KVIST_TEST_TRUE(verify_rest(&corrupt) <= visible);
        corrupt_total += corrupt;
        kvist_unit_remove_tree(copy);
    }
    rig.options.path = rig.path;
    (void)printf("\n    at most %llu visible; %llu lost pages found\n",
                 (unsigned long long)visible_before,
                 (unsigned long long)corrupt_total);
    KVIST_TEST_TRUE(visible_before > 50 && corrupt_total > 150);
}

static void setup(void)
{
    kvist_rig_init(&rig, 64 * MIB);
}

static void teardown(void)
{
    kvist_rig_fini(&rig);
}

int main(int argc, char **argv)
{
    static const struct kvist_unit_case cases[] = {
        {"a kill loses nothing acknowledged", a_kill_loses_nothing_acknowledged},
        {"a kill while clearing brings nothing back", a_kill_while_clearing_brings_nothing_back},
        {"a kill while extents go leaves whole blocks",
         a_kill_while_extents_go_leaves_whole_blocks},
        {"every write may be the last", every_write_may_be_the_last},
        {"any part of the log may be what is left", any_part_of_the_log_may_be_what_is_left},
    };
    if (argc == 9) {
        return child_main(argv);
    }
    return kvist_unit_main("tier_crash", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown);
}
