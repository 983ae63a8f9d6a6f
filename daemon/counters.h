/*
 * counters - what kvistd counts of its own; metrics.def says what each means.
 *
 * Threads     loop
 */
#ifndef KVIST_DAEMON_COUNTERS_H
#define KVIST_DAEMON_COUNTERS_H

#include <stdint.h>

struct kvist_counters {
    uint64_t connections_total;
    uint64_t connections_rejected_total; /* over a limit */
    uint64_t accept_errors_total;
    uint64_t share_refusals_total;
    uint64_t share_refused_us; /* when that was last; 0: never */
    char share_refused[160];   /* what, and to whom */
    uint64_t hello_timeouts_total;
    uint64_t idle_timeouts_total;
    uint64_t peers_dropped_total; /* took nothing of what was sent */
    uint64_t messages_total;
    uint64_t message_bytes_total;
    uint64_t pushes_total;
    uint64_t protocol_errors_total;
    uint64_t failures_total;
    uint64_t denials_total; /* of them */
    uint64_t processes_ended_total;
    uint64_t http_requests_total;
    uint64_t http_rejected_total;
    uint64_t reloads_total;
    uint64_t reload_failures_total;
    uint64_t stored_files;     /* with the service manager */
    uint64_t stored_files_max;
    uint64_t notices_waiting; /* for the service manager to read */
    uint64_t notices_dropped_total;
    uint64_t turns_total;
    uint64_t loop_lag_us;        /* of the last tick */
    uint64_t loop_lag_us_max[2]; /* of this window of ten seconds, and of the one before */
    uint64_t lag_window_us;      /* when this one began */
};

#endif
