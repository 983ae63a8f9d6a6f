/*
 * limits - a bound on everything that a peer can ask for.
 *
 * Role        the numbers that both sides know. A value beyond its limit is refused by the
 *             receiver, whatever the sender meant.
 * Units       in the names
 */
#ifndef KVIST_LIMITS_H
#define KVIST_LIMITS_H

#define KVIST_KEY_BYTES           32
#define KVIST_BLOCK_BYTES_MIN     4096ULL
#define KVIST_BLOCK_BYTES_MAX     (256ULL << 20)
#define KVIST_SLOT_ALIGN_BYTES    4096ULL
#define KVIST_ARENA_BYTES_MIN     (16ULL << 20)
#define KVIST_SEGMENT_BYTES_MAX   (2ULL << 30)
#define KVIST_SEGMENT_SLOTS_MIN   4U     /* fewest slots that a segment is cut into */
#define KVIST_SEGMENTS_MAX        512U   /* of one pool, at a time */
#define KVIST_POOLS_MAX           256U   /* of the daemon */
#define KVIST_SESSIONS_MAX        128U   /* of the daemon */
#define KVIST_CONNECTIONS_MAX     512U   /* of the daemon, Hello seen or not */
#define KVIST_RANKS_MAX           16U    /* worker processes of one session */
#define KVIST_SESSION_POOLS_MAX   8U     /* pools that one session has open */
#define KVIST_LEASES_MAX          32768U /* lease records of one session */
#define KVIST_GRANTS_MAX          4096U  /* slots granted to one session, all its pools */
#define KVIST_TOUCH_RING_COUNT    16384U /* entries of a session's touch ring, a power of two */
#define KVIST_FRAME_BYTES_MAX     (1U << 20)
#define KVIST_FRAME_FDS_MAX       4U
#define KVIST_KEYS_MAX            4096U      /* keys or blocks in one message or one batch call */
#define KVIST_SUSPECT_KEYS_MAX    64U        /* keys that one message calls corrupt */
#define KVIST_PREFETCHES_MAX      8192U      /* promotions that one session waits for */
#define KVIST_OUTPUT_BYTES_MAX    (8U << 20) /* unsent bytes after which a peer is dropped */
#define KVIST_TENANT_BYTES_MAX    63U
#define KVIST_IDENTITY_FIELDS_MAX 256U
#define KVIST_IDENTITY_BYTES_MAX  (256U << 10)
#define KVIST_NAME_BYTES_MAX      127U  /* of a session, a version, a tier */
#define KVIST_TEXT_BYTES_MAX      4095U /* of a sentence or a description */
#define KVIST_METRICS_MAX         4096U /* in one reply */
#define KVIST_SOCKET_PATH_BYTES   108U

#endif
