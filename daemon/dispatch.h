/*
 * dispatch - what peers ask for, and what they are told.
 *
 * Role        turns each message into calls of the store and replies; turns the store's events into
 *             pushes. Every check that needs state is made here or in the store: role, tenant,
 *             order of messages.
 * Threads     loop
 * Limits      KVIST_PENDING_MAX requests of a connection that wait for the store
 * Errors      a request that fails is answered with Failure. A message that cannot come from a
 *             sound peer, and what the store calls INVALID, ends the connection.
 */
#ifndef KVIST_DAEMON_DISPATCH_H
#define KVIST_DAEMON_DISPATCH_H

#include "daemon/server.h"
#include "storage/store.h"

#define KVIST_PENDING_MAX 16U

struct kvist_daemon;

/** A message of a peer: kvist_server_handler.message with ctx a kvist_daemon. */
void kvist_dispatch_message(void *ctx,
                            struct kvist_connection *connection,
                            const Kvist__Wire__Envelope *envelope);

/** The connection is gone: replies that come later go nowhere. */
void kvist_dispatch_forget(struct kvist_connection *connection);

/** Parts of kvist_dispatch_message(), in files of their own. @{ */
/* admin.c: answered when it is done */
void kvist_dispatch_clear(struct kvist_daemon *daemon,
                          struct kvist_connection *connection,
                          const Kvist__Wire__Envelope *envelope);
void kvist_dispatch_admin(struct kvist_daemon *daemon,
                          struct kvist_connection *connection,
                          const Kvist__Wire__Envelope *envelope);
/* view.c: answered at once, of the tenant's own, or of all for operators */
void kvist_dispatch_stat(struct kvist_daemon *daemon,
                         struct kvist_connection *connection,
                         const Kvist__Wire__Envelope *envelope);
void kvist_dispatch_list(struct kvist_daemon *daemon,
                         struct kvist_connection *connection,
                         const Kvist__Wire__Envelope *envelope);
void kvist_dispatch_inspect(struct kvist_daemon *daemon,
                            struct kvist_connection *connection,
                            const Kvist__Wire__Envelope *envelope);
/** @} */

/** The store's events, with ctx a kvist_daemon: pushes to the processes that they are for. */
extern const struct kvist_store_events kvist_push_events;

#endif
