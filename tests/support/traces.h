/*
 * traces - synthetic workloads of prefix chains, for eviction policies.
 *
 * Role        makes the requests of a workload one after the other, from a seed: the ids of a
 *             request's blocks in prefix order, equal ids being equal prefixes, as in a trace that
 *             `kvist replay` reads. Nothing of it is measured from anywhere.
 * Limits      a request has 1..KVIST_TEST_CHAIN_MAX blocks
 */
#ifndef KVIST_TESTS_TRACES_H
#define KVIST_TESTS_TRACES_H

#include <stddef.h>
#include <stdint.h>

#define KVIST_TEST_CHAIN_MAX 512U

enum kvist_test_workload {
    KVIST_TEST_ZIPF,   /* questions about documents of a few collections, popularity by Zipf */
    KVIST_TEST_LOOP,   /* the same documents over and over, in the same order */
    KVIST_TEST_SCAN,   /* popular documents between ones that are read once */
    KVIST_TEST_CHAT,   /* conversations that grow by turns; what they are about drifts */
    KVIST_TEST_AGENTS, /* tasks of many short steps, which fork and go back */
    KVIST_TEST_RECENT, /* the more recently a document was used, the likelier it is again */
    KVIST_TEST_SHIFT,  /* loop, then chat, then Zipf: no policy suits all of it */
    KVIST_TEST_WORKLOADS,
};

struct kvist_test_trace;

struct kvist_test_trace *
kvist_test_trace_create(enum kvist_test_workload workload, uint64_t seed, uint32_t request_count);
void kvist_test_trace_destroy(struct kvist_test_trace **trace);

/** The next request. @return its blocks, 0 after the last request */
size_t kvist_test_trace_next(struct kvist_test_trace *trace,
                             uint64_t ids_out[KVIST_TEST_CHAIN_MAX]);

/** "zipf", "loop", … */
const char *kvist_test_workload_name(enum kvist_test_workload workload);

#endif
