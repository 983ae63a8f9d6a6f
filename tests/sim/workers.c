/* workers - storage/workers.h, with a hand in place of the threads: a job runs when it is told to,
   in any order. */
#include "storage/workers.h"

#include "proto/base/check.h"
#include "tests/sim/sim.h"

#include <unistd.h>

#define WORKERS_MAX  8U
#define BUSY_PERCENT 1U

struct job_list {
    struct kvist_job *first;
    struct kvist_job **last;
    uint32_t count;
};

struct kvist_workers {
    uint32_t queue_max;
    uint32_t pending;
    struct job_list queued;
    struct job_list finished;
};

static struct kvist_workers *all[WORKERS_MAX];

static void push(struct job_list *list, struct kvist_job *job)
{
    job->next = NULL;
    *list->last = job;
    list->last = &job->next;
    list->count++;
}

static struct kvist_job *take(struct job_list *list, uint32_t place)
{
    struct kvist_job **link = &list->first;
    for (; place > 0; place--) {
        link = &(*link)->next;
    }
    struct kvist_job *job = *link;
    *link = job->next;
    if (*link == NULL) {
        list->last = link;
    }
    list->count--;
    return job;
}

enum kvist_status kvist_workers_create(const char *name,
                                       uint32_t thread_count,
                                       bool idle_priority,
                                       uint32_t queue_max,
                                       struct kvist_workers **workers_out,
                                       struct kvist_error *err)
{
    (void)name;
    (void)thread_count;
    (void)idle_priority;
    uint32_t place = 0;
    while (all[place] != NULL) {
        place++;
        KVIST_SIM_REQUIRE(place < WORKERS_MAX);
    }
    struct kvist_workers *workers = calloc(1, sizeof(*workers));
    if (workers == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "workers", "no memory");
    }
    workers->queue_max = queue_max;
    workers->queued.last = &workers->queued.first;
    workers->finished.last = &workers->finished.first;
    all[place] = workers;
    *workers_out = workers;
    return KVIST_OK;
}

static void run_one(struct kvist_workers *workers, uint32_t place)
{
    struct kvist_job *job = take(&workers->queued, place);
    job->run(job);
    push(&workers->finished, job);
}

void kvist_workers_destroy(struct kvist_workers **workers_inout)
{
    struct kvist_workers *workers = *workers_inout;
    if (workers == NULL) {
        return;
    }
    for (uint32_t place = 0; place < WORKERS_MAX; place++) {
        all[place] = all[place] == workers ? NULL : all[place];
    }
    while (workers->queued.count > 0) {
        run_one(workers, 0);
    }
    while (kvist_workers_turn(workers, UINT32_MAX) > 0) {
    }
    KVIST_SIM_REQUIRE(workers->pending == 0);
    free(workers);
    *workers_inout = NULL;
}

void kvist_workers_make_way(struct kvist_workers *workers, int busy_fd)
{
    (void)workers; /* what a step runs is the simulation's choice */
    if (busy_fd >= 0) {
        (void)close(busy_fd);
    }
}

int kvist_workers_fd(const struct kvist_workers *workers)
{
    (void)workers;
    return -1;
}

enum kvist_status kvist_workers_submit(struct kvist_workers *workers, struct kvist_job *job)
{
    bool open = false;
    for (uint32_t place = 0; place < WORKERS_MAX; place++) {
        open = open || all[place] == workers;
    }
    if (!open || workers->pending >= workers->queue_max || kvist_sim_chance(BUSY_PERCENT)) {
        return KVIST_BUSY;
    }
    push(&workers->queued, job);
    workers->pending++;
    return KVIST_OK;
}

uint32_t kvist_workers_turn(struct kvist_workers *workers, uint32_t done_max)
{
    uint32_t done = 0;
    for (; done < done_max && workers->finished.count > 0; done++) {
        struct kvist_job *job = take(&workers->finished, 0);
        workers->pending--;
        job->done(job);
    }
    return done;
}

uint32_t kvist_workers_pending(const struct kvist_workers *workers)
{
    return workers->pending;
}

bool kvist_sim_workers_step(void)
{
    uint32_t start = kvist_sim_below(WORKERS_MAX);
    for (uint32_t step = 0; step < WORKERS_MAX; step++) {
        struct kvist_workers *workers = all[(start + step) % WORKERS_MAX];
        if (workers != NULL && workers->queued.count > 0) {
            run_one(workers, kvist_sim_below(workers->queued.count));
            return true;
        }
    }
    return false;
}
