#include "tests/support/traces.h"

#include "tests/support/unit.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define DOCUMENTS       1500U /* that a workload goes back to */
#define DOCUMENT_BLOCKS 32U   /* at most */
#define ROOTS           12U   /* system prompts, of ROOT_BLOCKS blocks each */
#define ROOT_BLOCKS     4U
#define CHATS           400U /* open at a time */
#define TASKS           24U
#define TASK_STEP_MAX   48U

struct chain {
    uint32_t count;
    uint32_t due; /* chats: the request before which nothing is said */
    uint64_t ids[KVIST_TEST_CHAIN_MAX];
};

struct kvist_test_trace {
    enum kvist_test_workload workload;
    uint32_t request_count;
    uint32_t made;
    uint64_t random;
    uint64_t id_next;
    uint64_t roots[ROOTS][ROOT_BLOCKS];
    uint32_t order[DOCUMENTS]; /* RECENT: most recently used first */
    struct chain documents[DOCUMENTS];
    struct chain chats[CHATS];
    struct chain tasks[TASKS];
};

/* SplitMix64 (Steele, Lea, Flood, 2014). */
static uint64_t draw(struct kvist_test_trace *trace)
{
    uint64_t value = (trace->random += 0x9e3779b97f4a7c15ULL);
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
    return value ^ (value >> 31);
}

static uint32_t below(struct kvist_test_trace *trace, uint32_t limit)
{
    return (uint32_t)(draw(trace) % limit);
}

static double unit(struct kvist_test_trace *trace)
{
    return (double)(draw(trace) >> 11) * 0x1p-53;
}

/* 0..limit-1; rank r with a probability of about 1 / (r + 1): Zipf's law with exponent 1. */
static uint32_t ranked(struct kvist_test_trace *trace, uint32_t limit)
{
    uint32_t rank = (uint32_t)pow((double)limit + 1.0, unit(trace)) - 1;
    return rank < limit ? rank : limit - 1;
}

static void grow(struct kvist_test_trace *trace, struct chain *chain, uint32_t blocks)
{
    for (; blocks > 0 && chain->count < KVIST_TEST_CHAIN_MAX; blocks--) {
        chain->ids[chain->count++] = trace->id_next++;
    }
}

static void start(struct kvist_test_trace *trace, struct chain *chain, uint32_t root)
{
    chain->count = ROOT_BLOCKS;
    memcpy(chain->ids, trace->roots[root], sizeof(trace->roots[root]));
}

static size_t say(const struct chain *chain, uint64_t *ids_out)
{
    memcpy(ids_out, chain->ids, chain->count * sizeof(ids_out[0]));
    return chain->count;
}

/* A question of a few blocks that nobody asks again. */
static size_t ask(struct kvist_test_trace *trace, const struct chain *about, uint64_t *ids_out)
{
    struct chain chain = *about;
    grow(trace, &chain, 1 + below(trace, 4));
    return say(&chain, ids_out);
}

static size_t next_scan(struct kvist_test_trace *trace, uint64_t *ids_out)
{
    if (below(trace, 10) < 4) {
        return ask(trace, &trace->documents[ranked(trace, DOCUMENTS / 4)], ids_out);
    }
    struct chain once;
    start(trace, &once, below(trace, ROOTS));
    grow(trace, &once, 8 + below(trace, 48));
    return say(&once, ids_out);
}

static size_t next_chat(struct kvist_test_trace *trace, uint64_t *ids_out)
{
    /* Of a few conversations the one that has waited longest: thinking times that vary, with a
       mode. New ones are about what is popular now. */
    struct chain *chat = &trace->chats[below(trace, CHATS)];
    for (uint32_t other = 0; other < 3; other++) {
        struct chain *rival = &trace->chats[below(trace, CHATS)];
        chat = rival->due < chat->due ? rival : chat;
    }
    if (chat->count == 0 || chat->count > 200 || below(trace, 100) < 35) {
        uint32_t drift = trace->made / (trace->request_count / 8 + 1);
        start(trace, chat, (ranked(trace, ROOTS) + drift) % ROOTS);
    }
    chat->due = trace->made;
    grow(trace, chat, 1 + below(trace, 6) * below(trace, 6) / 2);
    return say(chat, ids_out);
}

static size_t next_step(struct kvist_test_trace *trace, uint64_t *ids_out)
{
    struct chain *task = &trace->tasks[below(trace, TASKS)];
    if (task->count == 0 || task->due >= TASK_STEP_MAX || below(trace, 40) == 0) {
        start(trace, task, ranked(trace, ROOTS));
        grow(trace, task, 8 + below(trace, 24)); /* the repository that it works on */
        task->due = 0;
    } else if (below(trace, 12) == 0) {
        *task = trace->tasks[below(trace, TASKS)]; /* a fork of another task */
    } else if (below(trace, 8) == 0 && task->count > 16) {
        task->count -= 1 + below(trace, task->count / 4); /* back, and on from there */
    }
    task->due++;
    grow(trace, task, 1 + below(trace, 3));
    return say(task, ids_out);
}

static size_t next_recent(struct kvist_test_trace *trace, uint64_t *ids_out)
{
    uint32_t place = ranked(trace, DOCUMENTS);
    uint32_t document = trace->order[place];
    memmove(&trace->order[1], &trace->order[0], place * sizeof(trace->order[0]));
    trace->order[0] = document;
    return say(&trace->documents[document], ids_out);
}

static size_t
next_of(struct kvist_test_trace *trace, enum kvist_test_workload workload, uint64_t *ids_out)
{
    switch (workload) {
    case KVIST_TEST_ZIPF:
        return ask(trace, &trace->documents[ranked(trace, DOCUMENTS)], ids_out);
    case KVIST_TEST_LOOP:
        return say(&trace->documents[trace->made % DOCUMENTS], ids_out);
    case KVIST_TEST_SCAN:
        return next_scan(trace, ids_out);
    case KVIST_TEST_CHAT:
        return next_chat(trace, ids_out);
    case KVIST_TEST_AGENTS:
        return next_step(trace, ids_out);
    case KVIST_TEST_RECENT:
        return next_recent(trace, ids_out);
    case KVIST_TEST_SHIFT:
        return next_of(trace,
                       trace->made < trace->request_count / 3       ? KVIST_TEST_LOOP
                       : trace->made < trace->request_count / 3 * 2 ? KVIST_TEST_CHAT
                                                                    : KVIST_TEST_ZIPF,
                       ids_out);
    case KVIST_TEST_WORKLOADS:
        break;
    }
    return 0;
}

size_t kvist_test_trace_next(struct kvist_test_trace *trace, uint64_t ids_out[KVIST_TEST_CHAIN_MAX])
{
    if (trace->made == trace->request_count) {
        return 0;
    }
    size_t count = next_of(trace, trace->workload, ids_out);
    trace->made++;
    return count;
}

struct kvist_test_trace *
kvist_test_trace_create(enum kvist_test_workload workload, uint64_t seed, uint32_t request_count)
{
    struct kvist_test_trace *trace = calloc(1, sizeof(*trace));
    KVIST_TEST_FATAL(trace != NULL);
    trace->workload = workload;
    trace->random = seed;
    trace->request_count = request_count;
    for (uint32_t root = 0; root < ROOTS; root++) {
        for (uint32_t block = 0; block < ROOT_BLOCKS; block++) {
            trace->roots[root][block] = trace->id_next++;
        }
    }
    for (uint32_t index = 0; index < DOCUMENTS; index++) {
        trace->order[index] = index;
        start(trace, &trace->documents[index], index % ROOTS);
        grow(trace, &trace->documents[index], 4 + below(trace, DOCUMENT_BLOCKS - 4));
    }
    return trace;
}

void kvist_test_trace_destroy(struct kvist_test_trace **trace)
{
    free(*trace);
    *trace = NULL;
}

const char *kvist_test_workload_name(enum kvist_test_workload workload)
{
    static const char *const names[KVIST_TEST_WORKLOADS] = {
        "zipf", "loop", "scan", "chat", "agents", "recent", "shift"};
    return names[workload];
}
