/*
 * machine_internal - what machine.c, the memory, and explore.c, the search, share.
 */
#ifndef KVIST_TESTS_MODEL_MACHINE_INTERNAL_H
#define KVIST_TESTS_MODEL_MACHINE_INTERNAL_H

#include "tests/model/machine.h"

#include <setjmp.h>
#include <string.h>

#define THREADS_MAX  KVIST_MODEL_THREADS_MAX
#define SHARED_MAX   60U  /* locations that several threads use and one of them writes */
#define LIST_MAX     24U  /* messages of one location */
#define MESSAGES_MAX 384U /* of all */
#define PLACES_MAX   256U /* locations that threads use at all */
#define DATA_MAX     8U
#define CHANNELS_MAX 8U
#define LOG_MAX      1024U
#define DEPTH_MAX    512U
#define NO_CHOICE    UINT32_MAX
#define PRIVATE      UINT32_MAX

/* Which message of each list has been seen, by its number in that list; and the vector clock. */
struct view {
    uint8_t seen[SHARED_MAX];
    uint8_t clock[THREADS_MAX];
};
_Static_assert(sizeof(struct view) % 8 == 0, "views are hashed by words");

struct message {
    uint64_t value;
    struct view view;
};

/* Messages are numbered as they come; `order` has the numbers in modification order. */
struct list {
    uint32_t count;
    uint8_t order[LIST_MAX];
    uint8_t place[LIST_MAX]; /* the other way round */
    uint16_t message[LIST_MAX];
};

enum step_kind { STEP_NONE, STEP_LOAD, STEP_STORE, STEP_FENCE, STEP_RECEIVE };

struct step {
    enum step_kind kind;
    enum memory_order order;
    uint32_t at; /* shared location or channel */
    uint64_t value;
};

struct thread {
    struct view current;
    struct view acquired;
    struct view released;
    struct step next;
    bool ended;
    uint16_t note;
    uint32_t log_count;
    uint64_t log_hash;
    uint64_t view_hash;
    uint64_t log[LOG_MAX]; /* what its loads and reads gave; last: only what is used is copied */
};

struct datum {
    uint64_t value;
    bool written; /* else its value is what the memory holds */
    uint32_t writer;
    uint8_t write_clock;
    uint8_t read_clock[THREADS_MAX];
};

struct state {
    uint32_t message_count;
    uint64_t memory_hash;
    struct view global; /* of seq_cst fences; its clocks stay 0 */
    bool sent[CHANNELS_MAX];
    struct view mail[CHANNELS_MAX];
    struct list lists[SHARED_MAX];
    uint64_t owned[PLACES_MAX]; /* values of locations that are not shared */
    struct datum data[DATA_MAX];
    struct thread threads[THREADS_MAX];
    struct message messages[MESSAGES_MAX];
};

struct place {
    const void *address;
    uint64_t initial;
    uint32_t readers; /* bits of threads */
    uint32_t writers;
    uint32_t shared; /* number among the shared ones, or PRIVATE */
};

struct trace_step {
    uint32_t thread;
    struct kvist_model_site site;
    enum step_kind kind;
    uint64_t value;
};

struct kvist_machine {
    const struct kvist_model_program *program;
    struct kvist_model_result *result;
    struct state *states; /* [DEPTH_MAX] */
    struct state *now;
    uint32_t depth;
    uint32_t self;
    uint32_t cursor; /* in the log */
    uint32_t choice;
    jmp_buf out;
    bool restart;
    struct place places[PLACES_MAX];
    uint32_t place_count;
    uint32_t shared_count;
    const uint64_t *data[DATA_MAX];
    uint32_t data_count;
    uint64_t *seen; /* hashes of states */
    size_t seen_capacity;
    size_t seen_count;
    struct trace_step trace[DEPTH_MAX];
    struct kvist_model_order orders[KVIST_MODEL_ORDERS_MAX];
    uint32_t order_count;
    uint32_t weakened; /* one of them, UINT32_MAX: none */
    enum memory_order weakened_order;
};

extern struct kvist_machine kvist_machine;

/** Abort with a sentence: a limit of the machine, or a wrong use of it. */
void kvist_machine_require(bool holds, const char *what);

static inline uint64_t kvist_machine_mix(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ULL;
    return hash ^ (hash >> 29);
}

uint64_t kvist_machine_hash_view(uint64_t hash, const struct view *view);

/** Where a message stands in its location's modification order. */
static inline uint32_t
kvist_machine_place(const struct state *state, uint32_t location, uint8_t number)
{
    return state->lists[location].place[number];
}

/** The value at a place in modification order. */
uint64_t kvist_machine_value(const struct state *state, uint32_t location, uint32_t place);

/** Places of the messages that a load can read and that make a difference. @return how many */
uint32_t kvist_machine_readable(const struct state *state,
                                const struct thread *thread,
                                uint32_t location,
                                uint8_t places_out[LIST_MAX]);

/** Put a message at a place in modification order; its view comes to include itself. */
void kvist_machine_insert(struct state *state,
                          uint32_t location,
                          uint32_t place,
                          const struct message *message);

/** The thread that runs. */
static inline struct thread *kvist_machine_self(void)
{
    return &kvist_machine.now->threads[kvist_machine.self];
}

#endif
