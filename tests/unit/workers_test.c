/* workers: order, limits, hand-back, destroy with work left. */
#include "storage/busy.h"
#include "storage/workers.h"
#include "tests/support/unit.h"

#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define JOBS 1000U

struct counted {
    struct kvist_job job;
    pthread_t thread;
    uint32_t order;
    bool ran;
    bool done;
};

static _Atomic uint32_t running_order;
static uint32_t done_count;

static void counted_run(struct kvist_job *job)
{
    struct counted *counted = (struct counted *)job;
    counted->thread = pthread_self();
    counted->order = atomic_fetch_add(&running_order, 1);
    counted->ran = true;
}

static void counted_done(struct kvist_job *job)
{
    struct counted *counted = (struct counted *)job;
    KVIST_TEST_TRUE(counted->ran && !counted->done);
    counted->done = true;
    done_count++;
}

static void counted_init(struct counted *counted)
{
    memset(counted, 0, sizeof(*counted));
    counted->job.run = counted_run;
    counted->job.done = counted_done;
}

static struct kvist_workers *make(uint32_t threads, bool idle, uint32_t queue_max)
{
    struct kvist_workers *workers = NULL;
    struct kvist_error err = KVIST_ERROR_INIT;
    KVIST_TEST_STATUS(kvist_workers_create("test", threads, idle, queue_max, &workers, &err),
                      KVIST_OK);
    KVIST_TEST_FATAL(workers != NULL);
    return workers;
}

static void setup(void)
{
    atomic_store(&running_order, 0);
    done_count = 0;
}

static void create_refuses_nonsense(void)
{
    struct kvist_workers *workers = NULL;
    struct kvist_error err = KVIST_ERROR_INIT;
    KVIST_TEST_STATUS(kvist_workers_create("test", 0, false, 1, &workers, &err), KVIST_INVALID);
    KVIST_TEST_STATUS(kvist_workers_create("test", 1, false, 0, &workers, &err), KVIST_INVALID);
    KVIST_TEST_STATUS(kvist_workers_create("test", 257, false, 1, &workers, &err), KVIST_INVALID);
    KVIST_TEST_STATUS(kvist_workers_create("a name that is too long", 1, false, 1, &workers, &err),
                      KVIST_INVALID);
    KVIST_TEST_TRUE(workers == NULL);
    kvist_workers_destroy(&workers);
}

static void all_jobs_come_back(void)
{
    static struct counted jobs[JOBS];
    struct kvist_workers *workers = make(4, true, 64);
    uint32_t submitted = 0;
    while (done_count < JOBS) {
        while (submitted < JOBS) {
            counted_init(&jobs[submitted]);
            if (kvist_workers_submit(workers, &jobs[submitted].job) != KVIST_OK) {
                KVIST_TEST_EQUAL(kvist_workers_pending(workers), 64);
                break;
            }
            submitted++;
        }
        struct pollfd waited = {.fd = kvist_workers_fd(workers), .events = POLLIN};
        KVIST_TEST_FATAL(poll(&waited, 1, 10000) == 1);
        (void)kvist_workers_turn(workers, 7);
    }
    for (uint32_t index = 0; index < JOBS; index++) {
        KVIST_TEST_TRUE(jobs[index].done && !pthread_equal(jobs[index].thread, pthread_self()));
    }
    KVIST_TEST_EQUAL(kvist_workers_pending(workers), 0);
    kvist_workers_destroy(&workers);
    KVIST_TEST_TRUE(workers == NULL);
}

static void one_thread_keeps_the_order(void)
{
    static struct counted jobs[JOBS];
    struct kvist_workers *workers = make(1, false, JOBS);
    for (uint32_t index = 0; index < JOBS; index++) {
        counted_init(&jobs[index]);
        KVIST_TEST_STATUS(kvist_workers_submit(workers, &jobs[index].job), KVIST_OK);
    }
    struct counted one_more;
    counted_init(&one_more);
    KVIST_TEST_STATUS(kvist_workers_submit(workers, &one_more.job), KVIST_BUSY);
    kvist_workers_destroy(&workers);
    KVIST_TEST_EQUAL(done_count, JOBS);
    for (uint32_t index = 0; index < JOBS; index++) {
        KVIST_TEST_EQUAL(jobs[index].order, index);
    }
}

/* A turn that is cut short must leave the fd readable. */
static void a_short_turn_leaves_the_fd_readable(void)
{
    static struct counted jobs[8];
    struct kvist_workers *workers = make(1, false, 8);
    for (uint32_t index = 0; index < 8; index++) {
        counted_init(&jobs[index]);
        KVIST_TEST_STATUS(kvist_workers_submit(workers, &jobs[index].job), KVIST_OK);
    }
    while (atomic_load(&running_order) < 8) {
    }
    for (uint32_t index = 0; index < 8; index++) {
        struct pollfd waited = {.fd = kvist_workers_fd(workers), .events = POLLIN};
        KVIST_TEST_FATAL(poll(&waited, 1, 10000) == 1);
        KVIST_TEST_EQUAL(kvist_workers_turn(workers, 1), 1);
    }
    struct pollfd waited = {.fd = kvist_workers_fd(workers), .events = POLLIN};
    (void)kvist_workers_turn(workers, 1);
    KVIST_TEST_EQUAL(poll(&waited, 1, 0), 0);
    kvist_workers_destroy(&workers);
}

static struct kvist_workers *chain_workers;
static uint32_t chain_left;

/* A small job that takes its time, so that a loop which looks at once would see it alone. */
static void slow_run(struct kvist_job *job)
{
    struct timespec pause = {.tv_nsec = 1000000};
    counted_run(job);
    (void)nanosleep(&pause, NULL);
}

static sem_t gate;

/* The first of several jobs: none is begun before all are queued. */
static void gate_run(struct kvist_job *job)
{
    counted_run(job);
    (void)sem_wait(&gate);
}

static void close_gate(struct kvist_workers *workers, struct counted *first)
{
    KVIST_TEST_FATAL(sem_init(&gate, 0, 0) == 0);
    counted_init(first);
    first->job.run = gate_run;
    KVIST_TEST_STATUS(kvist_workers_submit(workers, &first->job), KVIST_OK);
}

static void idle_priority_hands_jobs_over_together(void)
{
    enum { SMALL = 20 };
    static struct counted jobs[SMALL];
    static struct counted alone;
    struct kvist_workers *workers = make(1, true, SMALL);
    close_gate(workers, &jobs[0]);
    for (unsigned index = 1; index < SMALL; index++) {
        counted_init(&jobs[index]);
        jobs[index].job.run = slow_run;
        KVIST_TEST_STATUS(kvist_workers_submit(workers, &jobs[index].job), KVIST_OK);
    }
    (void)sem_post(&gate);
    struct pollfd ready = {.fd = kvist_workers_fd(workers), .events = POLLIN};
    KVIST_TEST_EQUAL(poll(&ready, 1, 60000), 1);
    KVIST_TEST_EQUAL(kvist_workers_turn(workers, JOBS), SMALL);
    KVIST_TEST_FATAL(kvist_workers_pending(workers) == 0);
    /* One that comes alone is told of alone. */
    counted_init(&alone);
    KVIST_TEST_STATUS(kvist_workers_submit(workers, &alone.job), KVIST_OK);
    KVIST_TEST_EQUAL(poll(&ready, 1, 60000), 1);
    KVIST_TEST_EQUAL(kvist_workers_turn(workers, JOBS), 1);
    kvist_workers_destroy(&workers);
}

static void say_load(int fd, const char *text)
{
    KVIST_TEST_FATAL(ftruncate(fd, 0) == 0 &&
                     pwrite(fd, text, strlen(text), 0) == (ssize_t)strlen(text));
}

static void a_host_is_busy_when_more_could_run(void)
{
    int fd = memfd_create("load", MFD_CLOEXEC);
    say_load(fd, "9.10 0.01 0.05 2/500 1234\n");
    KVIST_TEST_TRUE(!kvist_busy_now(fd, 2));
    KVIST_TEST_TRUE(kvist_busy_now(fd, 1));
    say_load(fd, "0.00 0.00 0.00 12/500 1234\n");
    KVIST_TEST_TRUE(kvist_busy_now(fd, 11) && !kvist_busy_now(fd, 12));
    say_load(fd, "nonsense");
    KVIST_TEST_TRUE(!kvist_busy_now(fd, 1));
    say_load(fd, "");
    KVIST_TEST_TRUE(!kvist_busy_now(fd, 1) && !kvist_busy_now(-1, 1));
    (void)close(fd);
    fd = kvist_busy_open();
    KVIST_TEST_TRUE(kvist_busy_now(fd, 0)); /* this very thread runs */
    (void)close(fd);
}

struct resting {
    struct counted counted;
    long began_switches; /* of its thread */
    long ended_switches;
};

/* How often this thread has given its processor up: whatever else runs takes it, and is not counted. */
static long count_switches(void)
{
    struct rusage usage;
    KVIST_TEST_FATAL(getrusage(RUSAGE_THREAD, &usage) == 0);
    return usage.ru_nvcsw;
}

static void resting_run(struct kvist_job *job)
{
    struct resting *resting = (struct resting *)job;
    resting->began_switches = count_switches();
    slow_run(job);
    resting->ended_switches = count_switches();
}

enum { RESTING = 4 };

/* After how many of so many jobs that are queued, each longer than a look lasts, the thread rests. */
static uint32_t count_rests(struct kvist_workers *workers)
{
    static struct counted first;
    static struct resting jobs[RESTING + 1];
    close_gate(workers, &first);
    for (unsigned index = 0; index <= RESTING; index++) {
        counted_init(&jobs[index].counted);
        jobs[index].counted.job.run = resting_run;
        KVIST_TEST_STATUS(kvist_workers_submit(workers, &jobs[index].counted.job), KVIST_OK);
    }
    (void)sem_post(&gate);
    struct pollfd ready = {.fd = kvist_workers_fd(workers), .events = POLLIN};
    while (kvist_workers_pending(workers) > 0) {
        KVIST_TEST_FATAL(poll(&ready, 1, 60000) == 1);
        (void)kvist_workers_turn(workers, JOBS);
    }
    uint32_t rests = 0;
    for (unsigned index = 0; index < RESTING; index++) {
        rests += jobs[index + 1].began_switches > jobs[index].ended_switches;
    }
    return rests;
}

static void idle_priority_makes_way(void)
{
    int fd = memfd_create("load", MFD_CLOEXEC);
    int load = dup(fd);
    struct kvist_workers *workers = make(1, true, RESTING + 2);
    kvist_workers_make_way(workers, fd);
    say_load(load, "1.0 1.0 1.0 100000/100000 9\n");
    KVIST_TEST_EQUAL(count_rests(workers), RESTING); /* it goes on all the same, after a while */
    say_load(load, "1.0 1.0 1.0 0/9 9\n");
    KVIST_TEST_EQUAL(count_rests(workers), 0);
    say_load(load, "1.0 1.0 1.0 100000/100000 9\n");
    static struct counted last;
    counted_init(&last);
    KVIST_TEST_STATUS(kvist_workers_submit(workers, &last.job), KVIST_OK);
    kvist_workers_destroy(&workers);
    KVIST_TEST_TRUE(last.done);
    (void)close(load);
}

static void chain_done(struct kvist_job *job)
{
    done_count++;
    if (chain_left > 0) {
        chain_left--;
        KVIST_TEST_STATUS(kvist_workers_submit(chain_workers, job), KVIST_OK);
    }
}

static void done_may_submit_again(void)
{
    struct counted job;
    counted_init(&job);
    job.job.done = chain_done;
    chain_workers = make(2, false, 1);
    chain_left = 50;
    KVIST_TEST_STATUS(kvist_workers_submit(chain_workers, &job.job), KVIST_OK);
    while (done_count < 51) {
        struct pollfd waited = {.fd = kvist_workers_fd(chain_workers), .events = POLLIN};
        KVIST_TEST_FATAL(poll(&waited, 1, 10000) == 1);
        (void)kvist_workers_turn(chain_workers, 1);
    }
    kvist_workers_destroy(&chain_workers);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"create refuses nonsense", create_refuses_nonsense},
        {"all jobs come back", all_jobs_come_back},
        {"one thread keeps the order", one_thread_keeps_the_order},
        {"a short turn leaves the fd readable", a_short_turn_leaves_the_fd_readable},
        {"idle priority hands jobs over together", idle_priority_hands_jobs_over_together},
        {"a host is busy when more could run", a_host_is_busy_when_more_could_run},
        {"idle priority makes way", idle_priority_makes_way},
        {"done may submit again", done_may_submit_again},
    };
    return kvist_unit_main("workers", cases, sizeof(cases) / sizeof(cases[0]), setup, NULL);
}
