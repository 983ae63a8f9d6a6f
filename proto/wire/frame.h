/*
 * frame - length-prefixed messages with file descriptors, over a stream socket.
 *
 * Role        turns bytes and fds from recvmsg(2) into whole frames, and back. Knows nothing of
 *             what is in a frame. Used by the daemon (through its event loop) and by the client.
 * Wire        u32 little-endian length (1..KVIST_FRAME_BYTES_MAX), then that many bytes.
 *             fds ride on the frame's first byte: SCM_RIGHTS with the sendmsg that starts it. That
 *             sendmsg carries bytes of this frame alone, so that a receiver can tell whose they
 *             are: the kernel ends a recvmsg after the sendmsg that carries fds, not before it.
 * Ownership   received fds belong to the reader until taken with the frame; the rest is closed
 * Threads     one at a time
 * Limits      KVIST_FRAME_BYTES_MAX, KVIST_FRAME_FDS_MAX a frame; the writer's queue is bounded by
 *             KVIST_OUTPUT_BYTES_MAX
 * Errors      PROTOCOL: a length or an fd count beyond the limits, CLOSED: the peer is gone,
 *             BUSY: the output queue is full (the peer does not read), or this process has no fds
 *             left
 * States      after an error of fill or flush the reader or writer stays failed: close the socket.
 *             A put that failed has queued nothing and spoils nothing.
 * Faults      frame.alloc, frame.recv (ECONNRESET), frame.send (EPIPE), frame.dup (EMFILE)
 * Source      unix(7) SCM_RIGHTS, recvmsg(2) MSG_CMSG_CLOEXEC
 */
#ifndef KVIST_WIRE_FRAME_H
#define KVIST_WIRE_FRAME_H

#include <kvist/error.h>
#include <kvist/limits.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kvist_frame {
    const uint8_t *bytes; /* borrowed: valid until the next call on the reader */
    size_t length;
    int fds[KVIST_FRAME_FDS_MAX]; /* owned by the caller, who must close or keep each */
    size_t fd_count;
};

struct kvist_frame_reader;
struct kvist_frame_writer;

/** @param fd_max  most fds accepted in a frame: 0 on the daemon's side, where none is expected */
KVIST_MUST_USE enum kvist_status kvist_frame_reader_create(size_t fd_max,
                                                           struct kvist_frame_reader **reader_out);
void kvist_frame_reader_destroy(struct kvist_frame_reader **reader);

/**
 * Read once from a socket into the reader; never waits.
 *
 * @param socket_fd    borrowed
 * @param more_out     true: the socket may hold more now. false: it does not, or the reader is full
 *                     of whole frames, which must be taken before it reads on.
 * @return OK (also when nothing was there), CLOSED at end of stream (whole frames that came before
 *         it can still be taken), PROTOCOL (nothing more can be taken), BUSY (no fds left),
 *         NO_MEMORY, SYSTEM
 */
KVIST_MUST_USE enum kvist_status kvist_frame_reader_fill(struct kvist_frame_reader *reader,
                                                         int socket_fd,
                                                         bool *more_out,
                                                         struct kvist_error *err);

/**
 * Take the next whole frame. To be called until NOT_FOUND after each fill: this also gives back
 * the memory that a long frame has taken.
 *
 * @return OK, NOT_FOUND when there is no whole frame yet, else the error of an earlier fill
 */
KVIST_MUST_USE enum kvist_status kvist_frame_reader_next(struct kvist_frame_reader *reader,
                                                         struct kvist_frame *frame_out,
                                                         struct kvist_error *err);

KVIST_MUST_USE enum kvist_status kvist_frame_writer_create(struct kvist_frame_writer **writer_out);
void kvist_frame_writer_destroy(struct kvist_frame_writer **writer);

/**
 * Queue a frame. The fds are duplicated: the caller keeps its own.
 *
 * @param fds  [fd_count], may be NULL
 * @return OK, BUSY (queue full), INVALID (too long), NO_MEMORY, SYSTEM
 */
KVIST_MUST_USE enum kvist_status kvist_frame_writer_put(struct kvist_frame_writer *writer,
                                                        const uint8_t *bytes,
                                                        size_t length,
                                                        const int *fds,
                                                        size_t fd_count,
                                                        struct kvist_error *err);

/**
 * Write as much as the non-blocking socket takes; never raises SIGPIPE.
 *
 * @return OK, CLOSED, SYSTEM
 */
KVIST_MUST_USE enum kvist_status
kvist_frame_writer_flush(struct kvist_frame_writer *writer, int socket_fd, struct kvist_error *err);

/** Bytes queued and not written yet. */
size_t kvist_frame_writer_pending_bytes(const struct kvist_frame_writer *writer);

#endif
