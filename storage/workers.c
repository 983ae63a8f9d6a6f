#include "storage/workers.h"

#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "storage/busy.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define WORKERS_MAGIC      0x6b77726bU
#define WORKERS_THREAD_MAX 256U
#define THREAD_NAME_BYTES  16
#define IDLE_BATCH         32U /* jobs that idle priority hands over together */
#define WORK_US            1000U /* between two looks whether the host is busy */
#define REST_US            2000U
#define REST_US_MAX        20000U

struct job_list {
    struct kvist_job *first;
    struct kvist_job **last;
};

struct kvist_workers {
    uint32_t magic;
    uint32_t thread_count; /* started */
    uint32_t queue_max;
    uint32_t pending; /* the loop's: submitted and not done */
    int event_fd;
    bool idle_priority;
    _Atomic int busy_fd; /* -1: it makes way for nobody */
    uint32_t processors;
    char name[THREAD_NAME_BYTES];
    pthread_mutex_t lock;
    pthread_cond_t wake;
    _Atomic bool stopping;    /* written under lock, as the two lists */
    struct job_list queued;   /* for the threads */
    struct job_list finished; /* for the loop */
    uint32_t finished_count;
    bool raised; /* the loop has been told, and has not looked since */
    pthread_t threads[];
};

static void list_init(struct job_list *list)
{
    list->first = NULL;
    list->last = &list->first;
}

static void list_push(struct job_list *list, struct kvist_job *job)
{
    job->next = NULL;
    *list->last = job;
    list->last = &job->next;
}

static struct kvist_job *list_pop(struct job_list *list)
{
    struct kvist_job *job = list->first;
    if (job != NULL) {
        list->first = job->next;
        if (list->first == NULL) {
            list->last = &list->first;
        }
        job->next = NULL;
    }
    return job;
}

/* The counter cannot overflow in practice, so a failed write means that it is set already. */
static void event_raise(const struct kvist_workers *workers)
{
    uint64_t one = 1;
    ssize_t written = write(workers->event_fd, &one, sizeof(one));
    (void)written;
}

/* The loop is told at once; of what has time, when no more is queued, or enough has come together:
   many small jobs would wake it for each. */
static void tell_locked(struct kvist_workers *workers)
{
    bool now = !workers->idle_priority || workers->queued.first == NULL ||
               workers->finished_count >= IDLE_BATCH;
    if (now && !workers->raised && workers->finished.first != NULL) {
        workers->raised = true;
        event_raise(workers);
    }
}

static void thread_dress(const struct kvist_workers *workers)
{
    (void)pthread_setname_np(pthread_self(), workers->name);
    if (workers->idle_priority) {
        /* Refused in some containers: the work is then done at normal priority. */
        struct sched_param none = {0};
        (void)sched_setscheduler(0, SCHED_IDLE, &none);
    }
}

/* Rest while the host is busy. @return when to look again */
static uint64_t make_way(const struct kvist_workers *workers)
{
    const struct timespec rest = {.tv_nsec = REST_US * 1000L};
    uint64_t until_us = kvist_clock_now_us() + REST_US_MAX;
    while (!workers->stopping && kvist_clock_now_us() < until_us &&
           kvist_busy_now(workers->busy_fd, workers->processors)) {
        (void)nanosleep(&rest, NULL);
    }
    return kvist_clock_now_us() + WORK_US;
}

static void *thread_main(void *argument)
{
    struct kvist_workers *workers = argument;
    uint64_t look_us = 0;
    thread_dress(workers);
    (void)pthread_mutex_lock(&workers->lock);
    for (;;) {
        struct kvist_job *job = list_pop(&workers->queued);
        if (job == NULL) {
            if (workers->stopping) {
                break;
            }
            (void)pthread_cond_wait(&workers->wake, &workers->lock);
            continue;
        }
        (void)pthread_mutex_unlock(&workers->lock);
        if (workers->busy_fd >= 0 && kvist_clock_now_us() >= look_us) {
            look_us = make_way(workers);
        }
        job->run(job);
        (void)pthread_mutex_lock(&workers->lock);
        list_push(&workers->finished, job);
        workers->finished_count++;
        tell_locked(workers);
    }
    (void)pthread_mutex_unlock(&workers->lock);
    return NULL;
}

/* Threads start with all signals blocked but those that a fault raises: the loop handles them. */
static int thread_start(struct kvist_workers *workers)
{
    sigset_t blocked;
    sigset_t before;
    (void)sigfillset(&blocked);
    (void)sigdelset(&blocked, SIGBUS);
    (void)sigdelset(&blocked, SIGSEGV);
    (void)sigdelset(&blocked, SIGILL);
    (void)sigdelset(&blocked, SIGFPE);
    (void)pthread_sigmask(SIG_SETMASK, &blocked, &before);
    int failure =
        pthread_create(&workers->threads[workers->thread_count], NULL, thread_main, workers);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failure;
}

enum kvist_status kvist_workers_create(const char *name,
                                       uint32_t thread_count,
                                       bool idle_priority,
                                       uint32_t queue_max,
                                       struct kvist_workers **workers_out,
                                       struct kvist_error *err)
{
    if (thread_count == 0 || thread_count > WORKERS_THREAD_MAX || queue_max == 0 ||
        strlen(name) >= THREAD_NAME_BYTES) {
        return kvist_error_set(err, KVIST_INVALID, 0, "workers", "1 to 256 threads, a queue");
    }
    struct kvist_workers *workers =
        calloc(1, sizeof(*workers) + thread_count * sizeof(workers->threads[0]));
    if (workers == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "workers", "no memory for %s", name);
    }
    workers->magic = WORKERS_MAGIC;
    workers->queue_max = queue_max;
    workers->idle_priority = idle_priority;
    workers->busy_fd = -1;
    workers->processors = (uint32_t)sysconf(_SC_NPROCESSORS_ONLN);
    (void)snprintf(workers->name, sizeof(workers->name), "%s", name);
    list_init(&workers->queued);
    list_init(&workers->finished);
    (void)pthread_mutex_init(&workers->lock, NULL);
    (void)pthread_cond_init(&workers->wake, NULL);
    workers->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (workers->event_fd < 0) {
        int failure = errno;
        kvist_workers_destroy(&workers);
        return kvist_error_set_errno(err, failure, "eventfd", "cannot make a mailbox for %s", name);
    }
    while (workers->thread_count < thread_count) {
        int failure = thread_start(workers);
        if (failure != 0) {
            kvist_workers_destroy(&workers);
            return kvist_error_set_errno(
                err, failure, "pthread_create", "cannot start %u %s threads", thread_count, name);
        }
        workers->thread_count++;
    }
    *workers_out = workers;
    return KVIST_OK;
}

void kvist_workers_make_way(struct kvist_workers *workers, int busy_fd)
{
    KVIST_CHECK(workers->magic == WORKERS_MAGIC && workers->idle_priority && workers->busy_fd < 0);
    workers->busy_fd = busy_fd;
}

void kvist_workers_destroy(struct kvist_workers **workers_inout)
{
    struct kvist_workers *workers = *workers_inout;
    if (workers == NULL) {
        return;
    }
    KVIST_CHECK(workers->magic == WORKERS_MAGIC);
    (void)pthread_mutex_lock(&workers->lock);
    workers->stopping = true;
    (void)pthread_cond_broadcast(&workers->wake);
    (void)pthread_mutex_unlock(&workers->lock);
    for (uint32_t index = 0; index < workers->thread_count; index++) {
        (void)pthread_join(workers->threads[index], NULL);
    }
    while (kvist_workers_turn(workers, UINT32_MAX) > 0) {
    }
    KVIST_CHECK(workers->pending == 0);
    if (workers->event_fd >= 0) {
        (void)close(workers->event_fd);
    }
    if (workers->busy_fd >= 0) {
        (void)close(workers->busy_fd);
    }
    (void)pthread_cond_destroy(&workers->wake);
    (void)pthread_mutex_destroy(&workers->lock);
    workers->magic = 0;
    free(workers);
    *workers_inout = NULL;
}

int kvist_workers_fd(const struct kvist_workers *workers)
{
    return workers->event_fd;
}

enum kvist_status kvist_workers_submit(struct kvist_workers *workers, struct kvist_job *job)
{
    KVIST_CHECK(workers->magic == WORKERS_MAGIC);
    if (workers->pending >= workers->queue_max) {
        return KVIST_BUSY;
    }
    (void)pthread_mutex_lock(&workers->lock);
    bool stopping = workers->stopping;
    if (!stopping) {
        list_push(&workers->queued, job);
        (void)pthread_cond_signal(&workers->wake);
    }
    (void)pthread_mutex_unlock(&workers->lock);
    if (stopping) {
        return KVIST_BUSY;
    }
    workers->pending++;
    return KVIST_OK;
}

uint32_t kvist_workers_turn(struct kvist_workers *workers, uint32_t done_max)
{
    KVIST_CHECK(workers->magic == WORKERS_MAGIC);
    uint64_t count = 0;
    ssize_t got = read(workers->event_fd, &count, sizeof(count));
    (void)got; /* nothing raised is fine: the list tells */
    uint32_t done = 0;
    for (; done < done_max; done++) {
        (void)pthread_mutex_lock(&workers->lock);
        workers->raised = false;
        struct kvist_job *job = list_pop(&workers->finished);
        workers->finished_count -= job != NULL;
        (void)pthread_mutex_unlock(&workers->lock);
        if (job == NULL) {
            return done;
        }
        workers->pending--;
        job->done(job);
    }
    /* What is left must be told again. */
    (void)pthread_mutex_lock(&workers->lock);
    tell_locked(workers);
    (void)pthread_mutex_unlock(&workers->lock);
    return done;
}

uint32_t kvist_workers_pending(const struct kvist_workers *workers)
{
    return workers->pending;
}
