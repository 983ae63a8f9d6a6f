/*
 * request - questions to kvistd, with a deadline.
 *
 * Role        one connection as a tool: Hello, then one request at a time and its reply. For people
 *             and scripts; engines use kvist/client.h, which never waits.
 * Units       microseconds
 * Ownership   a reply is the caller's: kvist_message_free()
 * Threads     one at a time
 * Errors      UNAVAILABLE: no daemon there; TIMED_OUT: it does not answer; DENIED: the socket's
 *             permissions, or the daemon's refusal; else what the daemon answered, in its words
 */
#ifndef KVIST_TOOL_REQUEST_H
#define KVIST_TOOL_REQUEST_H

#include "proto/wire/message.h"

struct kvist_request;

/** Connect and say hello. */
KVIST_MUST_USE enum kvist_status kvist_request_open(const char *socket_path,
                                                    uint64_t timeout_us,
                                                    struct kvist_request **request_out,
                                                    struct kvist_error *err);
void kvist_request_close(struct kvist_request **request);

/** What the daemon said about itself. Borrowed. */
const Kvist__Wire__HelloReply *kvist_request_daemon(const struct kvist_request *request);

/**
 * Ask and wait for the answer.
 *
 * @param envelope   a request; its id is set here
 * @param expected   the reply's body
 * @param reply_out  the caller's
 */
KVIST_MUST_USE enum kvist_status kvist_request_call(struct kvist_request *request,
                                                    Kvist__Wire__Envelope *envelope,
                                                    Kvist__Wire__Envelope__BodyCase expected,
                                                    uint64_t timeout_us,
                                                    Kvist__Wire__Envelope **reply_out,
                                                    struct kvist_error *err);

#endif
