/*
 * places - the paths that a configuration names, beside one another.
 *
 * Role        tells whether all Unix sockets could be made, and that none is where another one, its
 *             lock or the NVMe tier is, by whatever name. Makes nothing.
 * Threads     any
 * Errors      those of kvist_listener_check(); INVALID: two are in each other's way
 */
#ifndef KVIST_DAEMON_PLACES_H
#define KVIST_DAEMON_PLACES_H

#include "daemon/http.h"

#define KVIST_PLACE_TENANT "the tenant's socket" /* what names it, for messages */

/**
 * What a start would refuse of the paths before it makes anything.
 *
 * @param address  of daemon.metrics_listen
 * @param passed   systemd has passed a socket in place of daemon.socket
 */
KVIST_MUST_USE enum kvist_status kvist_places_check(const struct kvist_config *config,
                                                    const struct kvist_http_address *address,
                                                    bool passed,
                                                    struct kvist_error *err);

#endif
