/*
 * workers - threads that do for the loop what may block.
 *
 * Role        a bounded queue of jobs, threads that run them, and a mailbox that brings each job
 *             back to the loop. Jobs are intrusive: nothing is allocated to submit one.
 * Ownership   a job and all it points to are the worker's from submit until `done` is called
 * Threads     submit, turn, destroy: the loop thread. run: a worker. done: the loop thread.
 * Limits      queue_max jobs submitted and not done; beyond it submit answers BUSY
 * Errors      BUSY, NO_MEMORY, SYSTEM
 */
#ifndef KVIST_STORAGE_WORKERS_H
#define KVIST_STORAGE_WORKERS_H

#include <kvist/error.h>

#include <stdbool.h>
#include <stdint.h>

struct kvist_job {
    void (*run)(struct kvist_job *job);  /* on a worker; must not touch loop state */
    void (*done)(struct kvist_job *job); /* on the loop, in kvist_workers_turn() */
    struct kvist_job *next;              /* the queue's */
};

struct kvist_workers;

/**
 * @param name            at most 15 bytes, names the threads
 * @param idle_priority   run at SCHED_IDLE: work that must not slow engines down; `done` may wait
 *                        for other jobs that are queued
 */
KVIST_MUST_USE enum kvist_status kvist_workers_create(const char *name,
                                                      uint32_t thread_count,
                                                      bool idle_priority,
                                                      uint32_t queue_max,
                                                      struct kvist_workers **workers_out,
                                                      struct kvist_error *err);

/**
 * Have idle priority make way for whatever else the host runs: while it is busy a thread rests, for
 * 20 ms at most; then it works, and looks again after a millisecond, between jobs.
 *
 * @param busy_fd  of kvist_busy_open(); taken over; -1: no host is busy
 */
void kvist_workers_make_way(struct kvist_workers *workers, int busy_fd);

/** Finish all queued jobs, join the threads, run what is left of `done`; NULL is fine. */
void kvist_workers_destroy(struct kvist_workers **workers);

/** Pollable: readable while jobs wait for their `done`, at idle priority in batches. Borrowed. */
int kvist_workers_fd(const struct kvist_workers *workers);

KVIST_MUST_USE enum kvist_status kvist_workers_submit(struct kvist_workers *workers,
                                                      struct kvist_job *job);

/** Run `done` of at most done_max jobs. @return how many ran; done_max: call again soon */
uint32_t kvist_workers_turn(struct kvist_workers *workers, uint32_t done_max);

/** Jobs submitted and not done. */
uint32_t kvist_workers_pending(const struct kvist_workers *workers);

#endif
