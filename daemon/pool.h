/*
 * pool - from an engine's OpenPool to the store's pool.
 *
 * Role        hashes the identity with the peer's tenant, describes it for people, and remembers
 *             which tensors each rank of a pool has, so that two engines never read each other's
 *             blocks with other eyes.
 * Threads     loop
 * Limits      KVIST_SHAPES_MAX; the least recently used one is forgotten
 * Errors      INVALID: identity beyond the limits, or another shape than before
 */
#ifndef KVIST_DAEMON_POOL_H
#define KVIST_DAEMON_POOL_H

#include "proto/wire/message.h"
#include "storage/store.h"

#define KVIST_SHAPES_NAME "h0" /* of their memory, with the service manager */
#define KVIST_SHAPES_MAX ((size_t)2 * KVIST_POOLS_MAX * KVIST_RANKS_MAX)

struct kvist_shape {
    uint8_t pool_id[KVIST_KEY_BYTES];
    uint8_t shape[KVIST_KEY_BYTES];
    uint32_t shape_bytes; /* 0: free */
    uint32_t rank;
    uint64_t used; /* larger: later */
};

/* Written by one daemon at a time; what one has left the next one goes on with. */
struct kvist_shapes {
    uint64_t magic;
    uint64_t uses;
    struct kvist_shape entries[KVIST_SHAPES_MAX];
};

/** Fill what the store needs to know of a pool; generation is left 0. */
KVIST_MUST_USE enum kvist_status kvist_pool_describe(const Kvist__Wire__OpenPool *open,
                                                     const char *tenant,
                                                     struct kvist_tier_pool *pool_out,
                                                     struct kvist_error *err);

/**
 * Map what an earlier kvistd has left, or begin anew.
 *
 * @param arena  its instance: what another has left is not believed
 * @param fd  taken over; -1: nothing was left. *fd_out: shared memory that is to outlive this
 *            kvistd, the caller's; -1 when it was fd, whose memory goes on
 */
KVIST_MUST_USE enum kvist_status kvist_shapes_open(
    int fd, uint64_t arena, struct kvist_shapes **shapes_out, int *fd_out, struct kvist_error *err);
void kvist_shapes_close(struct kvist_shapes **shapes);

/** Remember, or compare, what a rank's tensors look like. An empty shape says nothing. */
KVIST_MUST_USE enum kvist_status kvist_shapes_check(struct kvist_shapes *shapes,
                                                    const uint8_t pool_id[KVIST_KEY_BYTES],
                                                    uint32_t rank,
                                                    const ProtobufCBinaryData *shape,
                                                    struct kvist_error *err);

#endif
