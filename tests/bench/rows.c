/* bench_rows: command line, and what the rows share. */
#include "tests/bench/rows.h"

#include "client/tool/tool.h"
#include "proto/base/check.h"

#include <errno.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define METRIC_TIMEOUT_US 10000000U
#define OVER_S            600U /* no row takes longer */

/* --- Shared -------------------------------------------------------------------------------- */

double rows_seconds(const struct rows_options *options)
{
    return (double)options->seconds_ms / 1e3;
}

struct kvist_bench_setup rows_setup(const struct rows_options *options, uint64_t window_bytes)
{
    return (struct kvist_bench_setup){
        .socket_path = options->socket_path,
        .block_bytes = options->block_bytes,
        .window_bytes = window_bytes,
        .salt = options->salt,
    };
}

bool rows_gate(const struct rows_options *options)
{
    char line[16];
    if (options->gated == 0) {
        return true;
    }
    (void)printf("ready\n");
    (void)fflush(stdout);
    return fgets(line, sizeof(line), stdin) != NULL;
}

uint64_t rows_metric(const struct rows_options *options, const char *name)
{
    return kvist_bench_metric(options->socket_path, METRIC_TIMEOUT_US, name);
}

void rows_pause_us(uint64_t us)
{
    struct timespec pause = {.tv_sec = (time_t)(us / 1000000),
                             .tv_nsec = (long)(us % 1000000) * 1000};
    (void)nanosleep(&pause, NULL);
}

/* --- Crews --------------------------------------------------------------------------------- */

struct rows_crew *
rows_crew_create(const struct rows_options *options, unsigned count, unsigned parties)
{
    struct rows_crew *crew =
        mmap(NULL, sizeof(*crew), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (crew == MAP_FAILED) {
        return NULL;
    }
    pthread_barrierattr_t shared;
    crew->options = options;
    crew->count = count;
    if (pthread_barrierattr_init(&shared) != 0 ||
        pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED) != 0 ||
        pthread_barrier_init(&crew->barrier, &shared, parties) != 0) {
        (void)munmap(crew, sizeof(*crew));
        return NULL;
    }
    return crew;
}

enum kvist_status rows_crew_start(struct rows_crew *crew,
                                  unsigned member,
                                  rows_member_fn run,
                                  struct kvist_error *err)
{
    pid_t parent = getpid();
    pid_t pid = fork();
    if (pid < 0) {
        return kvist_error_set_errno(err, errno, "fork", "cannot start a member");
    }
    if (pid == 0) {
        struct kvist_error failure = KVIST_ERROR_INIT;
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        (void)alarm(OVER_S);
        if (getppid() != parent || run(crew, member, &failure) != KVIST_OK) {
            (void)fprintf(stderr, "bench_rows: member %u: %s\n", member, failure.text);
            _exit(1);
        }
        _exit(0);
    }
    crew->pids[member] = pid;
    return KVIST_OK;
}

enum kvist_status rows_crew_wait(struct rows_crew *crew, struct kvist_error *err)
{
    for (unsigned left = crew->count; left > 0; left--) {
        int how = 0;
        pid_t pid = wait(&how);
        for (unsigned member = 0; member < crew->count; member++) {
            crew->pids[member] = crew->pids[member] == pid ? 0 : crew->pids[member];
        }
        if (pid < 0 || !WIFEXITED(how) || WEXITSTATUS(how) != 0) {
            return kvist_error_set(err, KVIST_SYSTEM, 0, "bench_rows", "a member failed");
        }
    }
    return KVIST_OK;
}

void rows_crew_meet(struct rows_crew *crew)
{
    (void)pthread_barrier_wait(&crew->barrier);
}

void rows_crew_destroy(struct rows_crew **crew)
{
    if (*crew == NULL) {
        return;
    }
    for (unsigned member = 0; member < (*crew)->count; member++) {
        if ((*crew)->pids[member] > 0) {
            (void)kill((*crew)->pids[member], SIGKILL);
            (void)waitpid((*crew)->pids[member], NULL, 0);
        }
    }
    (void)munmap(*crew, sizeof(**crew));
    *crew = NULL;
}

/* --- Command line -------------------------------------------------------------------------- */

static const struct {
    const char *name;
    rows_fn run;
} rows[] = {
    {"cold", rows_cold},
    {"pair", rows_pair},
    {"sessions", rows_sessions},
    {"verify", rows_verify},
    {"fill", rows_fill},
    {"probe", rows_probe},
    {"chain", rows_chain},
    {"found", rows_found},
    {"caller", rows_caller},
    {"spill", rows_spill},
    {"promote", rows_promote},
    {"flat", rows_flat},
};

static const struct {
    const char *name;
    size_t offset;
} numbers[] = {
    {"block=", offsetof(struct rows_options, block_bytes)},
    {"arena=", offsetof(struct rows_options, arena_bytes)},
    {"count=", offsetof(struct rows_options, count)},
    {"salt=", offsetof(struct rows_options, salt)},
    {"runs=", offsetof(struct rows_options, run_count)},
    {"ms=", offsetof(struct rows_options, seconds_ms)},
    {"pid=", offsetof(struct rows_options, daemon_pid)},
    {"gated=", offsetof(struct rows_options, gated)},
    {"one_pool=", offsetof(struct rows_options, one_pool)},
};

static bool parse_argument(const char *text, struct rows_options *options)
{
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(numbers); index++) {
        size_t length = strlen(numbers[index].name);
        if (strncmp(text, numbers[index].name, length) == 0) {
            uint64_t value = 0;
            bool ok = kvist_tool_parse_size(text + length, &value);
            memcpy((char *)options + numbers[index].offset, &value, sizeof(value));
            return ok;
        }
    }
    return false;
}

int main(int argc, char **argv)
{
    static struct rows_options options = {
        .block_bytes = 2U << 20,
        .arena_bytes = 512U << 20,
        .run_count = 5,
        .seconds_ms = 500,
    };
    rows_fn run = NULL;
    for (size_t index = 0; argc > 2 && index < KVIST_ARRAY_COUNT(rows); index++) {
        run = strcmp(argv[1], rows[index].name) == 0 ? rows[index].run : run;
    }
    bool right = run != NULL && strlen(argv[2]) < sizeof(options.socket_path);
    for (int index = 3; right && index < argc; index++) {
        right = parse_argument(argv[index], &options);
    }
    if (!right || options.run_count > ROWS_RUNS_MAX) {
        (void)fprintf(stderr, "usage: bench_rows ROW SOCKET [name=number ...]; see rows.c\n");
        return 2;
    }
    (void)strcpy(options.socket_path, argv[2]);
    (void)alarm(OVER_S);
    struct kvist_error err = KVIST_ERROR_INIT;
    if (run(&options, &err) != KVIST_OK) {
        (void)fprintf(stderr, "bench_rows: %s: %s\n", argv[1], err.text);
        return 1;
    }
    return 0;
}
