/*
 * status - the one result type of every fallible kvist function.
 *
 * Role        names, wire numbers, retry classes and texts of all statuses, in one table.
 * Errors      a miss is not an error; foreign codes are translated where they arise.
 */
#ifndef KVIST_STATUS_H
#define KVIST_STATUS_H

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define KVIST_MUST_USE __attribute__((warn_unused_result))
#define KVIST_API      __attribute__((visibility("default")))
#else
#define KVIST_MUST_USE
#define KVIST_API
#endif

/* X(name, wire number, retry class, text). Wire numbers never change. */
#define KVIST_STATUS_TABLE(X)                                                                      \
    X(OK, 0, NEVER, "ok")                                                                          \
    X(INVALID, 1, NEVER, "invalid argument")                                                       \
    X(NO_MEMORY, 2, BACKOFF, "out of memory")                                                      \
    X(NO_SPACE, 3, EVICTION, "no space left")                                                      \
    X(NOT_FOUND, 4, NEVER, "not found")                                                            \
    X(EXISTS, 5, NEVER, "exists already")                                                          \
    X(BUSY, 6, BACKOFF, "busy, or a limit is reached")                                             \
    X(DENIED, 7, NEVER, "not allowed")                                                             \
    X(UNAVAILABLE, 8, RECONNECT, "the daemon is away")                                             \
    X(TIMED_OUT, 9, BACKOFF, "timed out")                                                          \
    X(CLOSED, 10, RECONNECT, "the connection is closed")                                           \
    X(PROTOCOL, 11, NEVER, "malformed or unexpected message")                                      \
    X(VERSION, 12, NEVER, "incompatible version")                                                  \
    X(CORRUPT, 13, NEVER, "checksum or structure is wrong")                                        \
    X(STALE, 14, NEVER, "from an earlier generation")                                              \
    X(UNSUPPORTED, 15, NEVER, "not supported here")                                                \
    X(SYSTEM, 16, BACKOFF, "system call failed")                                                   \
    X(BUG, 17, NEVER, "internal error")

/* When it makes sense to try again. */
enum kvist_retry {
    KVIST_RETRY_NEVER,
    KVIST_RETRY_EVICTION,  /* after something was evicted or released */
    KVIST_RETRY_RECONNECT, /* after the connection is back */
    KVIST_RETRY_BACKOFF    /* after a while */
};

enum kvist_status {
#define KVIST_STATUS_ENUM(name, number, retry, text) KVIST_##name = (number),
    KVIST_STATUS_TABLE(KVIST_STATUS_ENUM)
#undef KVIST_STATUS_ENUM
};

/** Name of a status ("NO_SPACE"); "UNKNOWN" for a number that is none. Any thread. */
KVIST_API const char *kvist_status_name(enum kvist_status status);

/** Text of a status ("no space left"). Any thread. */
KVIST_API const char *kvist_status_text(enum kvist_status status);

/** Retry class of a status. Any thread. */
KVIST_API enum kvist_retry kvist_status_retry(enum kvist_status status);

/** Status for an errno value, by meaning; SYSTEM where none fits. Any thread. */
KVIST_API enum kvist_status kvist_status_from_errno(int error_number);

/** Status for a wire number; PROTOCOL for a number that is none. Any thread. */
KVIST_API enum kvist_status kvist_status_from_wire(unsigned number);

#ifdef __cplusplus
}
#endif

#endif
