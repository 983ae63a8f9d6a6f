/*
 * rows - what the benchmark measures with engines of its own, one function a row.
 *
 * Role        tests/bench/run starts a kvistd and this program beside it, reads the lines that it
 *             prints, and judges them. A line is `row=NAME key=value ...`; `limit` and `figure` are
 *             of the same run. No thresholds here.
 * Units       as the keys say; GB/s: 10^9 bytes a second
 */
#ifndef KVIST_TESTS_BENCH_ROWS_H
#define KVIST_TESTS_BENCH_ROWS_H

#include "client/tool/bench_engine.h"
#include "tests/bench/quantile.h"

#include <kvist/error.h>

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define ROWS_RUNS_MAX    64U
#define ROWS_MEMBERS_MAX 64U

struct rows_options {
    char socket_path[KVIST_SOCKET_PATH_BYTES];
    uint64_t block_bytes;
    uint64_t arena_bytes;
    uint64_t count; /* blocks, calls or sessions, as the row says */
    uint64_t salt;  /* of the pool; 0: a random one */
    uint64_t run_count;
    uint64_t seconds_ms; /* of one figure in one run */
    uint64_t daemon_pid;
    uint64_t gated; /* before each run: print `ready` and wait for a line */
    uint64_t one_pool;
};

typedef enum kvist_status (*rows_fn)(const struct rows_options *options, struct kvist_error *err);

enum kvist_status rows_cold(const struct rows_options *options, struct kvist_error *err);
enum kvist_status rows_pair(const struct rows_options *options, struct kvist_error *err);
enum kvist_status rows_sessions(const struct rows_options *options, struct kvist_error *err);
enum kvist_status rows_verify(const struct rows_options *options, struct kvist_error *err);
enum kvist_status rows_fill(const struct rows_options *options, struct kvist_error *err);
enum kvist_status rows_probe(const struct rows_options *options, struct kvist_error *err);
enum kvist_status rows_chain(const struct rows_options *options, struct kvist_error *err);
enum kvist_status rows_found(const struct rows_options *options, struct kvist_error *err);
enum kvist_status rows_caller(const struct rows_options *options, struct kvist_error *err);
enum kvist_status rows_spill(const struct rows_options *options, struct kvist_error *err);
enum kvist_status rows_promote(const struct rows_options *options, struct kvist_error *err);
enum kvist_status rows_flat(const struct rows_options *options, struct kvist_error *err);

/* --- What rows share ------------------------------------------------------------------------ */

double rows_seconds(const struct rows_options *options);

/** An engine of the options' pool, with small buffers where many run at once. */
struct kvist_bench_setup rows_setup(const struct rows_options *options, uint64_t window_bytes);

/** Where the run is gated, wait for the word. false: the reader is gone. */
bool rows_gate(const struct rows_options *options);

/** A metric of the daemon's. */
uint64_t rows_metric(const struct rows_options *options, const char *name);

void rows_pause_us(uint64_t us);

/*
 * Processes that work at once. A member runs in a fork, in memory shared with the others; when one
 * fails, the rest is ended.
 */
struct rows_crew;
typedef enum kvist_status (*rows_member_fn)(struct rows_crew *crew,
                                            unsigned member,
                                            struct kvist_error *err);

struct rows_crew {
    const struct rows_options *options;
    unsigned count;
    _Atomic bool over;    /* members that loop end */
    _Atomic bool working; /* members that work on demand do */
    _Atomic bool ready;
    _Atomic uint64_t asked; /* found: a key's number that the finder looks for */
    _Atomic uint64_t found_ns;
    double figures[ROWS_MEMBERS_MAX][ROWS_RUNS_MAX][4];
    pthread_barrier_t barrier;
    pid_t pids[ROWS_MEMBERS_MAX];
};

/** Shared memory, barrier of `parties`. NULL: no memory. */
struct rows_crew *
rows_crew_create(const struct rows_options *options, unsigned count, unsigned parties);
KVIST_MUST_USE enum kvist_status rows_crew_start(struct rows_crew *crew,
                                                 unsigned member,
                                                 rows_member_fn run,
                                                 struct kvist_error *err);
/** Wait for all members. */
KVIST_MUST_USE enum kvist_status rows_crew_wait(struct rows_crew *crew, struct kvist_error *err);
void rows_crew_meet(struct rows_crew *crew);
/** Ends what still runs. */
void rows_crew_destroy(struct rows_crew **crew);

#endif
