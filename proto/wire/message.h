/*
 * message - envelopes to and from frames.
 *
 * Role        packs an Envelope into a frame writer; unpacks a frame and checks what protobuf does
 *             not: a body is there and comes from the right side, requests and replies have an id,
 *             repeated fields and byte strings keep their limits, keys have 32 bytes, roles and
 *             ranks exist. The one place where limits of single messages are enforced, for both
 *             sides, on the way out and on the way in. What depends on state (is this slot granted
 *             to that session?) is the receiver's to check.
 * Versions    a body that a newer peer sends and this side does not know is not an error: the
 *             envelope has body_case KVIST__WIRE__ENVELOPE__BODY__NOT_SET. Answer Failure
 *             UNSUPPORTED when it has an id, else ignore it. A Hello or HelloReply of another
 *             wire_major is checked no further: refuse it with VERSION.
 * Building    with kvist__wire__hello__init(&hello) and its like, not with the INIT macros: those
 *             cast const away where a message has strings, and clang refuses that
 * Ownership   an unpacked envelope is the caller's; free with kvist_message_free()
 * Threads     any
 * Limits      limits.h; a message unpacks to at most KVIST_MESSAGE_MEMORY_MAX bytes of heap,
 *             whatever its sender has nested into it
 * Errors      PROTOCOL with a sentence: close the connection. NO_MEMORY: so too, it is lost.
 * Faults      message.alloc
 */
#ifndef KVIST_WIRE_MESSAGE_H
#define KVIST_WIRE_MESSAGE_H

#include "kvist.pb-c.h"
#include "proto/wire/frame.h"

#define KVIST_MESSAGE_MEMORY_MAX ((size_t)4 << 20)

/**
 * Unpack and check a message.
 *
 * @param from_client    which side sent it: bodies of the other side are refused
 * @param envelope_out   owned by the caller
 * @return OK, PROTOCOL, NO_MEMORY
 */
KVIST_MUST_USE enum kvist_status kvist_message_unpack(const uint8_t *bytes,
                                                      size_t length,
                                                      bool from_client,
                                                      Kvist__Wire__Envelope **envelope_out,
                                                      struct kvist_error *err);

/** Free an unpacked envelope; NULL is fine. Sets the pointer to NULL. */
void kvist_message_free(Kvist__Wire__Envelope **envelope);

/** Number of fds that must come with a checked message, no more and no fewer. */
size_t kvist_message_fd_count(const Kvist__Wire__Envelope *envelope);

/** Name of a message's body for logs ("commit"); "unknown" for one that is not known here. */
const char *kvist_message_name(const Kvist__Wire__Envelope *envelope);

/** What is only read, in the types of protobuf-c, which know no const. Borrowed. @{ */
ProtobufCBinaryData kvist_message_bytes(const void *data, size_t length);
char *kvist_message_text(const char *text);
/** @} */

/**
 * Check an envelope and pack it into a writer's queue.
 *
 * @param fds  [fd_count], borrowed; as many as kvist_message_fd_count() says
 * @return OK, INVALID (a limit is broken, or the wrong number of fds: nothing is queued), else as
 *         kvist_frame_writer_put()
 */
KVIST_MUST_USE enum kvist_status kvist_message_put(struct kvist_frame_writer *writer,
                                                   const Kvist__Wire__Envelope *envelope,
                                                   const int *fds,
                                                   size_t fd_count,
                                                   struct kvist_error *err);

#endif
