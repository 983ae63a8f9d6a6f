/*
 * replay_trace - the requests of a trace, in memory.
 *
 * Role        reads JSON lines, each a request: an object whose member "hash_ids" is the array of
 *             its prompt's blocks in prefix order, unsigned integers, equal ids being equal
 *             prefixes. Other members may be anything; empty lines are skipped.
 * Units       blocks are renumbered from 0, in the order in which they first appear
 * Limits      KVIST_REPLAY_ACCESSES_MAX, as many requests, KVIST_REPLAY_LINE_MAX; 4 bytes a block
 *             of a request, 20 to 40 a distinct block
 * Errors      INVALID names the line
 */
#ifndef KVIST_TOOL_REPLAY_TRACE_H
#define KVIST_TOOL_REPLAY_TRACE_H

#include <kvist/error.h>
#include <kvist/status.h>

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define KVIST_REPLAY_ACCESSES_MAX (1U << 29)
#define KVIST_REPLAY_LINE_MAX     (64U << 20) /* bytes */

struct kvist_replay_trace {
    uint32_t *blocks; /* [access_count] */
    uint32_t access_count;
    uint32_t *ends; /* [request_count] in blocks */
    uint32_t request_count;
    uint32_t block_count; /* distinct */
};

/** Read a stream to its end. The caller owns the trace. INVALID, NO_MEMORY, SYSTEM. */
KVIST_MUST_USE enum kvist_status
kvist_replay_trace_read(FILE *in, struct kvist_replay_trace *trace_out, struct kvist_error *err);
void kvist_replay_trace_free(struct kvist_replay_trace *trace);

/** The blocks of request number `index`. @return how many */
static inline uint32_t kvist_replay_trace_request(const struct kvist_replay_trace *trace,
                                                  uint32_t index,
                                                  const uint32_t **blocks_out)
{
    uint32_t start = index == 0 ? 0 : trace->ends[index - 1];
    *blocks_out = trace->blocks + start;
    return trace->ends[index] - start;
}

#endif
