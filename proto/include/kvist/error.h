/*
 * error - what went wrong, in the caller's storage.
 *
 * Role        carries status, foreign code, origin and a sentence beside a returned status.
 * Ownership   the caller's; every function that takes one accepts NULL.
 * Threads     any; not shared.
 */
#ifndef KVIST_ERROR_H
#define KVIST_ERROR_H

#include <kvist/status.h>

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVIST_ERROR_TEXT_BYTES 240

struct kvist_error {
    enum kvist_status status;
    int32_t code;                      /* errno or the like; 0 when there is none */
    const char *origin;                /* static: "open", "rocksdb", "peer" */
    char text[KVIST_ERROR_TEXT_BYTES]; /* a sentence: what is wrong, and what to do */
};

#define KVIST_ERROR_INIT                                                                           \
    {                                                                                              \
        KVIST_OK, 0, "", ""                                                                        \
    }

/**
 * Fill an error and hand the status back, so that a failure is one line:
 * `return kvist_error_set(err, KVIST_INVALID, 0, "config", "slot_bytes is %u", n);`
 *
 * @param err     may be NULL
 * @param code    foreign code, or 0
 * @param origin  static string
 * @return status
 */
KVIST_API enum kvist_status kvist_error_set(struct kvist_error *err,
                                            enum kvist_status status,
                                            int32_t code,
                                            const char *origin,
                                            const char *format,
                                            ...) __attribute__((format(printf, 5, 6)));

/**
 * The same for a failed system call: status and text come from errno, after the formatted text.
 */
KVIST_API enum kvist_status kvist_error_set_errno(struct kvist_error *err,
                                                  int error_number,
                                                  const char *origin,
                                                  const char *format,
                                                  ...) __attribute__((format(printf, 4, 5)));

#ifdef __cplusplus
}
#endif

#endif
