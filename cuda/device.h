/*
 * device - the `direct` and `staged` kinds: lanes that feed a device.
 *
 * Role        a lane for each direction: a thread, a stream and a staging ring. A job's begin
 *             event is recorded on the caller's stream at submit; the lane's stream waits for
 *             it, then the lane hands over the job's copies: pieces in registered segments as
 *             batches (direct.c), all others through its ring (staged.c). An event behind each
 *             layer tells its end. device.c has the jobs' life, lane.c the threads.
 * Threads     the front's thread, the two lanes' threads, any thread for segments. `mutex`
 *             guards the queues, `stopping`, the free events and the jobs' status,
 *             layers_issued, chunks_pending and issued. A lane does not touch a job that is
 *             settled.
 * States      job: QUEUED -> ISSUING [lane] -> SETTLED (issued, no chunk pending) -> ENDED (the
 *             last layer's event is reached, seen by done() or wait())
 * Errors      a call that fails while a job is issued: the lane's stream is synchronised, so
 *             that nothing of the job moves any more, then the job is settled as SYSTEM
 * Faults      copy.pinned_alloc, copy.event_create, copy.begin_record, copy.stream_wait,
 *             copy.batch, copy.chunk_record, copy.chunk_wait, copy.layer_record,
 *             copy.event_query, copy.event_synchronize, copy.register
 */
#ifndef KVIST_DEVICE_H
#define KVIST_DEVICE_H

#include "cuda/copy_internal.h"
#include "cuda/ring.h"
#include "cuda/runtime.h"
#include "cuda/segments.h"

#define KVIST_DEVICE_EVENTS_MAX 1024U /* free events that are kept */

struct kvist_device;

struct kvist_lane {
    struct kvist_device *owner;
    enum kvist_copy_direction direction;
    void *stream;
    void *pinned; /* the ring's memory */
    struct kvist_ring ring;
    struct kvist_copy_piece *batch; /* [KVIST_RUNTIME_BATCH_MAX] */
    size_t batch_count;
    uint64_t ticket;   /* of the job that is being issued */
    uint64_t failures; /* of the stream, seen when it was synchronised; under the mutex */
    pthread_t thread;
    bool started;
    pthread_cond_t work;         /* a job was queued, or stopping */
    struct kvist_copy_job *head; /* not issued yet */
    struct kvist_copy_job *tail;
};

struct kvist_device {
    const struct kvist_copy_runtime *runtime;
    void *device;
    enum kvist_copy_kind kind;
    struct kvist_copy_counters *counters;
    pthread_mutex_t mutex;
    pthread_cond_t progress; /* a layer was issued, or a job settled */
    bool stopping;
    void *events[KVIST_DEVICE_EVENTS_MAX]; /* free ones */
    size_t event_count;
    struct kvist_segments segments;
    struct kvist_lane lanes[2]; /* by direction */
};

/* lane.c */

/** Stream, ring and thread of a lane. On failure the lane is to be finished all the same. */
KVIST_MUST_USE enum kvist_status kvist_lane_init(struct kvist_lane *lane,
                                                 struct kvist_device *owner,
                                                 enum kvist_copy_direction direction,
                                                 uint64_t staging_bytes,
                                                 struct kvist_error *err);

/** The owner is stopping and no job is left; a zeroed or half-built lane is fine. */
void kvist_lane_fini(struct kvist_lane *lane);

/** Queue a job whose begin event is recorded. */
void kvist_lane_submit(struct kvist_lane *lane, struct kvist_copy_job *job);

/**
 * Wait until nothing is on the lane's stream. A failure that this brings to light is not shown
 * again by events that are recorded later, so it counts against every job that was under way.
 */
void kvist_lane_synchronize(struct kvist_lane *lane);

/** Hand pieces to the device. */
KVIST_MUST_USE enum kvist_status
kvist_lane_copy(struct kvist_lane *lane, const struct kvist_copy_piece *pieces, size_t piece_count);

/* direct.c: pieces between registered memory and the device. */

/** Whether the device can reach a slot's bytes in the lane's direction. */
bool kvist_direct_reaches(struct kvist_lane *lane, const struct kvist_copy_piece *piece);
KVIST_MUST_USE enum kvist_status kvist_direct_add(struct kvist_lane *lane,
                                                  const struct kvist_copy_piece *piece);
KVIST_MUST_USE enum kvist_status kvist_direct_flush(struct kvist_lane *lane);
void kvist_direct_segment_add(struct kvist_device *device, void *base, uint64_t bytes);
void kvist_direct_segment_remove(struct kvist_device *device, void *base);
void kvist_direct_segments_drop(struct kvist_device *device);

/* staged.c: pieces through the ring. */

KVIST_MUST_USE enum kvist_status kvist_staged_add(struct kvist_lane *lane,
                                                  struct kvist_copy_job *job,
                                                  const struct kvist_copy_piece *piece);
KVIST_MUST_USE enum kvist_status kvist_staged_flush(struct kvist_lane *lane,
                                                    struct kvist_copy_job *job);
/**
 * Wait for the oldest chunk, fill its slots (STORE), free it.
 *
 * @return a device error when the chunk is of the job that is being issued, which is to be failed
 *         then. Other jobs see theirs by their chunks and events.
 */
enum kvist_status kvist_staged_drain(struct kvist_lane *lane);

#endif
