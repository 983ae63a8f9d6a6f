/*
 * machine - runs a small concurrent program in every way that the C11 memory model has for it.
 *
 * Role        an explorer: threads, the order in which they step, and for every load the message
 *             that it reads. What the threads run is compiled code whose atomics call the machine
 *             (shadow/stdatomic.h), so that the real functions of proto, storage and client are
 *             what is explored.
 * Model       the view machine of Kang et al. without promises, which allows what C11 allows, as
 *             repaired by Lahav et al. (RC11: no values out of thin air, seq_cst fences that work):
 *             - a location is a list of messages in modification order: value, view;
 *             - a view says how far in each list one has to have seen;
 *             - a thread has three views: `current`; `acquired`, what its next acquire fence
 * brings; `released`, what its relaxed stores carry, as of its last release fence;
 *             - a load reads any message that `current` does not lie beyond, the message's view
 * goes into `acquired`, and with acquire order into `current` as well;
 *             - a store goes anywhere behind `current`, and carries `released`, with release order
 *               `current`;
 *             - a seq_cst fence is both fences, and exchanges views with one global view.
 *             A relaxed store does not continue the release sequence of an earlier one of its
 *             thread (C20; C11 would have it so): what is proved holds with and without.
 * Data        bytes that are no atomics. Vector clocks ride on the views: an access that does not
 *             happen after the last conflicting one is reported, whatever it read. Seq_cst fences
 *             alone put nothing in order here, as in C11.
 * Messages    kvist_model_send and kvist_model_receive stand for a socket: what was done before the
 *             send happens before what follows the receive.
 * How         depth first over copies of the machine's state. A thread's body is called from its
 *             start for every step, is given what it read before, and is left by longjmp at its
 * next access: so it must be a function of what it reads, and set its private state up first.
 *             States that were seen are not entered again. What is left out, soundly: steps on
 *             locations that no two threads share; and reading a message where an older one has the
 *             same value and no larger view, since whatever follows may follow that one, too.
 * Limits      KVIST_MODEL_*; going beyond them aborts
 * Source      J. Kang et al., A Promising Semantics for Relaxed-Memory Concurrency, POPL 2017;
 *             O. Lahav et al., Repairing Sequential Consistency in C/C++11, PLDI 2017
 */
#ifndef KVIST_TESTS_MODEL_MACHINE_H
#define KVIST_TESTS_MODEL_MACHINE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVIST_MODEL_THREADS_MAX  4U
#define KVIST_MODEL_OUTCOMES_MAX 256U
#define KVIST_MODEL_REGIONS_MAX  4U
#define KVIST_MODEL_ORDERS_MAX   128U

struct kvist_model_region {
    const void *base;
    size_t bytes;
};

struct kvist_model_program {
    const char *name;
    uint32_t thread_count;
    void (*threads[KVIST_MODEL_THREADS_MAX])(void);
    const char *roles[KVIST_MODEL_THREADS_MAX]; /* whose orders they are, see kvist_model_order */
    /* Shared memory, set up by the caller: what it holds are the initial values. Nothing that runs
       writes it; atomics elsewhere are a thread's own. */
    struct kvist_model_region regions[KVIST_MODEL_REGIONS_MAX];
    /* Called at the end of each execution, may call kvist_model_check() and _last(). May be NULL.
     */
    void (*finished)(void);
};

struct kvist_model_result {
    bool failed;
    char what[256]; /* why, where it failed */
    uint64_t states;
    uint64_t executions;
    bool met[KVIST_MODEL_ORDERS_MAX]; /* which of kvist_model_orders() stood in the way */
    uint32_t outcome_count;
    uint64_t outcomes[KVIST_MODEL_OUTCOMES_MAX]; /* 16 bits a thread: kvist_model_note() */
};

/** Explore a program to the end, or to the first failure. */
void kvist_model_explore(const struct kvist_model_program *program,
                         struct kvist_model_result *result_out);

/** Print the steps that lead to the failure that was found last. */
void kvist_model_print_trace(void);

/* --- For threads ---------------------------------------------------------------------------------
 */

/** Say what this thread has seen: its 16 bits of the outcome. */
void kvist_model_note(uint16_t bits);

/** End this thread, from within whatever it has called. */
_Noreturn void kvist_model_stop(void);

/** Fail this exploration when `holds` is false. */
void kvist_model_check(bool holds, const char *what);

uint64_t kvist_model_data_read(const uint64_t *at);
void kvist_model_data_write(const uint64_t *at, uint64_t value);

/** Send a message, once a channel; receive it: a thread that waits for ever just ends there. */
void kvist_model_send(uint32_t channel);
void kvist_model_receive(uint32_t channel);

/* --- For finished() ------------------------------------------------------------------------------
 */

/** The note of a thread; the last value in modification order; whether a thread came to its end. */
uint16_t kvist_model_noted(uint32_t thread);
uint64_t kvist_model_last(const void *object);
bool kvist_model_ended(uint32_t thread);

/* --- Weakening -----------------------------------------------------------------------------------
 */

/* A place with an order that is more than relaxed, as one role comes by it: the fence that both
 * sides of a lease need is one place, and two of these. */
struct kvist_model_order {
    char file[128];
    char function[64];
    char what[160]; /* the operand; "fence" */
    char role[16];
    uint32_t line;
    enum memory_order order;
};

/** All that were met since the process started. Borrowed; more may come with each exploration. */
uint32_t kvist_model_orders(const struct kvist_model_order **orders_out);

/** Weaken one of them from now on; a relaxed fence is none. @param index  UINT32_MAX: nothing */
void kvist_model_weaken(uint32_t index, enum memory_order order);

#endif
