#include "proto/wire/frame.h"

#include "proto/base/fault.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define PREFIX_BYTES        4U
#define BUFFER_BYTES_SMALL  ((size_t)16 << 10) /* what an idle reader or writer keeps */
#define READER_BYTES_MAX    ((size_t)KVIST_FRAME_BYTES_MAX + PREFIX_BYTES)
#define READER_ROOM_MIN     ((size_t)4 << 10)
#define READER_GROUPS_MAX   16U   /* frames with fds that wait in a reader */
#define WRITER_GROUPS_MAX   2048U /* frames with fds that wait in a writer */
#define WRITER_GROUPS_SMALL 8U
#define WRITER_DUP_FD_MIN   3

/* The fds of one frame, and where it starts in the stream. */
struct fd_group {
    uint64_t position;
    size_t frame_bytes; /* with the prefix; the writer's alone */
    size_t count;
    int fds[KVIST_FRAME_FDS_MAX];
};

/*
 * bytes [start, whole) are whole frames, [whole, end) the beginning of the next one.
 * Only that one makes the buffer grow, so a flood of small frames never does.
 */
struct kvist_frame_reader {
    enum kvist_status failed; /* OK, or what every further call returns */
    size_t fd_max;
    uint8_t *buffer;
    size_t capacity;
    size_t start;
    size_t whole;
    size_t end;
    uint64_t base; /* position in the stream of buffer[0] */
    struct fd_group groups[READER_GROUPS_MAX];
    size_t group_count;
};

struct kvist_frame_writer {
    enum kvist_status failed;
    uint8_t *buffer;
    size_t capacity;
    size_t start;
    size_t end;
    uint64_t base;
    struct fd_group *groups; /* [group_start, group_end) wait */
    size_t group_capacity;
    size_t group_start;
    size_t group_end;
};

/* Room for the fds of one frame, aligned as the kernel wants it. */
union fd_control {
    struct cmsghdr header;
    char bytes[CMSG_SPACE(sizeof(int) * KVIST_FRAME_FDS_MAX)];
};

static void close_all(int *fds, size_t count)
{
    for (size_t index = 0; index < count; index++) {
        (void)close(fds[index]);
        fds[index] = -1;
    }
}

static enum kvist_status resize(uint8_t **buffer, size_t bytes, struct kvist_error *err)
{
    uint8_t *resized = kvist_fault_point("frame.alloc") ? NULL : realloc(*buffer, bytes);
    if (resized == NULL) {
        return kvist_error_set(
            err, KVIST_NO_MEMORY, ENOMEM, "frame", "no memory for a buffer of %zu bytes", bytes);
    }
    *buffer = resized;
    return KVIST_OK;
}

static uint32_t prefix_decode(const uint8_t *bytes)
{
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 |
           (uint32_t)bytes[3] << 24;
}

static void prefix_encode(uint8_t *bytes, uint32_t length)
{
    for (unsigned index = 0; index < PREFIX_BYTES; index++) {
        bytes[index] = (uint8_t)(length >> (8 * index));
    }
}

/* --- Reader --------------------------------------------------------------------------------- */

enum kvist_status kvist_frame_reader_create(size_t fd_max, struct kvist_frame_reader **reader_out)
{
    if (fd_max > KVIST_FRAME_FDS_MAX) {
        return KVIST_INVALID;
    }
    struct kvist_frame_reader *reader = calloc(1, sizeof(*reader));
    if (reader == NULL) {
        return KVIST_NO_MEMORY;
    }
    if (resize(&reader->buffer, BUFFER_BYTES_SMALL, NULL) != KVIST_OK) {
        free(reader);
        return KVIST_NO_MEMORY;
    }
    reader->capacity = BUFFER_BYTES_SMALL;
    reader->fd_max = fd_max;
    *reader_out = reader;
    return KVIST_OK;
}

void kvist_frame_reader_destroy(struct kvist_frame_reader **reader)
{
    if (*reader == NULL) {
        return;
    }
    for (size_t index = 0; index < (*reader)->group_count; index++) {
        close_all((*reader)->groups[index].fds, (*reader)->groups[index].count);
    }
    free((*reader)->buffer);
    free(*reader);
    *reader = NULL;
}

static enum kvist_status reader_failed(const struct kvist_frame_reader *reader,
                                       struct kvist_error *err)
{
    return kvist_error_set(
        err, reader->failed, 0, "frame", "the connection has failed before: close it");
}

static void reader_compact(struct kvist_frame_reader *reader)
{
    memmove(reader->buffer, reader->buffer + reader->start, reader->end - reader->start);
    reader->base += reader->start;
    reader->whole -= reader->start;
    reader->end -= reader->start;
    reader->start = 0;
}

/*
 * Make room for a read; there may be none while whole frames wait to be taken. A byte is moved
 * only when half of the buffer is free before it or when it belongs to the frame that is being
 * read, once: the cost stays linear.
 */
static enum kvist_status reader_make_room(struct kvist_frame_reader *reader,
                                          struct kvist_error *err)
{
    bool frames_wait = reader->whole > reader->start;
    if (reader->capacity - reader->end >= READER_ROOM_MIN) {
        return KVIST_OK;
    }
    if (reader->start > 0 && (!frames_wait || reader->start >= reader->capacity / 2)) {
        reader_compact(reader);
    }
    if (reader->capacity - reader->end >= READER_ROOM_MIN || frames_wait ||
        reader->capacity == READER_BYTES_MAX) {
        return KVIST_OK;
    }
    size_t capacity = reader->capacity * 2;
    if (capacity > READER_BYTES_MAX) {
        capacity = READER_BYTES_MAX;
    }
    enum kvist_status status = resize(&reader->buffer, capacity, err);
    if (status == KVIST_OK) {
        reader->capacity = capacity;
    }
    return status;
}

/*
 * Move `whole` past every frame that is complete.
 *
 * @param last_out  start of the frame that holds the last byte of the buffer
 */
static enum kvist_status
reader_scan(struct kvist_frame_reader *reader, size_t *last_out, struct kvist_error *err)
{
    size_t last = reader->whole;
    while (reader->end > reader->whole) {
        last = reader->whole;
        if (reader->end - reader->whole < PREFIX_BYTES) {
            break;
        }
        uint32_t length = prefix_decode(reader->buffer + reader->whole);
        if (length == 0 || length > KVIST_FRAME_BYTES_MAX) {
            return kvist_error_set(err,
                                   KVIST_PROTOCOL,
                                   0,
                                   "peer",
                                   "frame of %u bytes; 1 to %u are allowed",
                                   length,
                                   KVIST_FRAME_BYTES_MAX);
        }
        if (reader->end - reader->whole - PREFIX_BYTES < length) {
            break;
        }
        reader->whole += PREFIX_BYTES + length;
    }
    *last_out = last;
    return KVIST_OK;
}

/* Take the fds out of a received message. The control buffer has room for fd_max and padding. */
static size_t collect_fds(struct msghdr *message, int fds_out[KVIST_FRAME_FDS_MAX + 1])
{
    size_t count = 0;
    for (struct cmsghdr *control = CMSG_FIRSTHDR(message); control != NULL;
         control = CMSG_NXTHDR(message, control)) {
        if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) {
            continue;
        }
        size_t carried = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t index = 0; index < carried; index++) {
            int fd = -1;
            memcpy(&fd, CMSG_DATA(control) + index * sizeof(int), sizeof(fd));
            if (count <= KVIST_FRAME_FDS_MAX) {
                fds_out[count++] = fd;
            } else {
                (void)close(fd);
            }
        }
    }
    return count;
}

static enum kvist_status check_fd_count(const struct kvist_frame_reader *reader,
                                        const struct msghdr *message,
                                        size_t count,
                                        struct kvist_error *err)
{
    bool truncated = (message->msg_flags & MSG_CTRUNC) != 0;
    if (truncated && count < reader->fd_max) {
        return kvist_error_set_errno(err,
                                     EMFILE,
                                     "recvmsg",
                                     "cannot receive file descriptors, raise the limit of open "
                                     "files of this process");
    }
    if (truncated || count > reader->fd_max) {
        return kvist_error_set(err,
                               KVIST_PROTOCOL,
                               0,
                               "peer",
                               "frame with more than %zu file descriptors",
                               reader->fd_max);
    }
    return KVIST_OK;
}

/*
 * Give received fds to their frame. The kernel ends a read with the sendmsg that carries fds, and
 * the sender puts nothing but that frame into it; so it is the frame that holds the last byte, and
 * it must have started within this read.
 */
static enum kvist_status reader_attach_fds(struct kvist_frame_reader *reader,
                                           size_t read_start,
                                           size_t frame_start,
                                           const int *fds,
                                           size_t count,
                                           struct kvist_error *err)
{
    if (frame_start < read_start) {
        return kvist_error_set(
            err, KVIST_PROTOCOL, 0, "peer", "file descriptors in the middle of a frame");
    }
    struct fd_group *group = &reader->groups[reader->group_count++];
    group->position = reader->base + frame_start;
    group->count = count;
    memcpy(group->fds, fds, count * sizeof(*fds));
    return KVIST_OK;
}

/* Account for `length` bytes that were read, and for the fds that came with them. */
static enum kvist_status reader_accept(struct kvist_frame_reader *reader,
                                       size_t length,
                                       struct msghdr *message,
                                       bool *got_fds_out,
                                       struct kvist_error *err)
{
    int fds[KVIST_FRAME_FDS_MAX + 1];
    size_t count = collect_fds(message, fds);
    size_t read_start = reader->end;
    size_t last = 0;
    reader->end += length;
    enum kvist_status status = check_fd_count(reader, message, count, err);
    if (status == KVIST_OK) {
        status = reader_scan(reader, &last, err);
    }
    if (status == KVIST_OK && count > 0) {
        status = reader_attach_fds(reader, read_start, last, fds, count, err);
    }
    if (status != KVIST_OK) {
        close_all(fds, count);
        return status;
    }
    *got_fds_out = count > 0;
    return KVIST_OK;
}

static enum kvist_status reader_ended(const struct kvist_frame_reader *reader,
                                      struct kvist_error *err)
{
    return kvist_error_set(err,
                           KVIST_CLOSED,
                           0,
                           "peer",
                           reader->end > reader->whole
                               ? "the peer closed the connection in the middle of a frame"
                               : "the peer closed the connection");
}

static ssize_t receive(int socket_fd, struct msghdr *message)
{
    if (kvist_fault_point("frame.recv")) {
        errno = ECONNRESET;
        return -1;
    }
    ssize_t got = 0;
    do {
        got = recvmsg(socket_fd, message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (got < 0 && errno == EINTR);
    return got;
}

enum kvist_status kvist_frame_reader_fill(struct kvist_frame_reader *reader,
                                          int socket_fd,
                                          bool *more_out,
                                          struct kvist_error *err)
{
    if (reader->failed != KVIST_OK) {
        return reader_failed(reader, err);
    }
    enum kvist_status status = reader_make_room(reader, err);
    if (status != KVIST_OK) {
        reader->failed = status;
        return status;
    }
    size_t room = reader->capacity - reader->end;
    if (room == 0 || reader->group_count == READER_GROUPS_MAX) {
        *more_out = false; /* full: frames must be taken first */
        return KVIST_OK;
    }
    union fd_control control;
    struct iovec part = {.iov_base = reader->buffer + reader->end, .iov_len = room};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (reader->fd_max > 0) { /* else the kernel closes what is sent, and says CTRUNC */
        message.msg_control = &control;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * reader->fd_max);
    }
    ssize_t got = receive(socket_fd, &message);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        *more_out = false;
        return KVIST_OK;
    }
    bool got_fds = false;
    if (got < 0) {
        status = kvist_error_set_errno(err, errno, "recvmsg", "cannot read from the peer");
    } else if (got == 0) {
        status = reader_ended(reader, err);
    } else {
        status = reader_accept(reader, (size_t)got, &message, &got_fds, err);
    }
    if (status != KVIST_OK) {
        reader->failed = status;
        return status;
    }
    *more_out = got_fds || (size_t)got == room;
    return KVIST_OK;
}

/* Nothing is buffered and the last frame's bytes are no longer borrowed: keep little memory. */
static void reader_rest(struct kvist_frame_reader *reader)
{
    reader->base += reader->end;
    reader->start = 0;
    reader->whole = 0;
    reader->end = 0;
    if (reader->capacity > BUFFER_BYTES_SMALL &&
        resize(&reader->buffer, BUFFER_BYTES_SMALL, NULL) == KVIST_OK) {
        reader->capacity = BUFFER_BYTES_SMALL;
    }
}

enum kvist_status kvist_frame_reader_next(struct kvist_frame_reader *reader,
                                          struct kvist_frame *frame_out,
                                          struct kvist_error *err)
{
    if (reader->failed != KVIST_OK && reader->failed != KVIST_CLOSED) {
        return reader_failed(reader, err);
    }
    if (reader->whole == reader->start) {
        if (reader->end == reader->start) {
            reader_rest(reader);
        }
        return KVIST_NOT_FOUND;
    }
    frame_out->length = prefix_decode(reader->buffer + reader->start);
    frame_out->bytes = reader->buffer + reader->start + PREFIX_BYTES;
    frame_out->fd_count = 0;
    if (reader->group_count > 0 && reader->groups[0].position == reader->base + reader->start) {
        frame_out->fd_count = reader->groups[0].count;
        memcpy(frame_out->fds, reader->groups[0].fds, sizeof(frame_out->fds));
        reader->group_count--;
        memmove(
            reader->groups, reader->groups + 1, reader->group_count * sizeof(reader->groups[0]));
    }
    reader->start += PREFIX_BYTES + frame_out->length;
    return KVIST_OK;
}

/* --- Writer --------------------------------------------------------------------------------- */

enum kvist_status kvist_frame_writer_create(struct kvist_frame_writer **writer_out)
{
    struct kvist_frame_writer *writer = calloc(1, sizeof(*writer));
    if (writer == NULL) {
        return KVIST_NO_MEMORY;
    }
    if (resize(&writer->buffer, BUFFER_BYTES_SMALL, NULL) != KVIST_OK) {
        free(writer);
        return KVIST_NO_MEMORY;
    }
    writer->capacity = BUFFER_BYTES_SMALL;
    *writer_out = writer;
    return KVIST_OK;
}

void kvist_frame_writer_destroy(struct kvist_frame_writer **writer)
{
    if (*writer == NULL) {
        return;
    }
    for (size_t index = (*writer)->group_start; index < (*writer)->group_end; index++) {
        close_all((*writer)->groups[index].fds, (*writer)->groups[index].count);
    }
    free((*writer)->groups);
    free((*writer)->buffer);
    free(*writer);
    *writer = NULL;
}

static enum kvist_status writer_failed(const struct kvist_frame_writer *writer,
                                       struct kvist_error *err)
{
    return kvist_error_set(
        err, writer->failed, 0, "frame", "the connection has failed before: close it");
}

static enum kvist_status
writer_reserve(struct kvist_frame_writer *writer, size_t bytes, struct kvist_error *err)
{
    if (writer->capacity - writer->end >= bytes) {
        return KVIST_OK;
    }
    if (writer->start >= writer->capacity / 2) {
        memmove(writer->buffer, writer->buffer + writer->start, writer->end - writer->start);
        writer->base += writer->start;
        writer->end -= writer->start;
        writer->start = 0;
    }
    size_t capacity = writer->capacity;
    while (capacity - writer->end < bytes) {
        capacity *= 2;
    }
    if (capacity == writer->capacity) {
        return KVIST_OK;
    }
    enum kvist_status status = resize(&writer->buffer, capacity, err);
    if (status == KVIST_OK) {
        writer->capacity = capacity;
    }
    return status;
}

static enum kvist_status writer_reserve_group(struct kvist_frame_writer *writer,
                                              struct kvist_error *err)
{
    if (writer->group_end < writer->group_capacity) {
        return KVIST_OK;
    }
    size_t count = writer->group_end - writer->group_start;
    if (count == WRITER_GROUPS_MAX) {
        return kvist_error_set(err,
                               KVIST_BUSY,
                               0,
                               "frame",
                               "the peer does not read: %zu frames with file descriptors wait",
                               count);
    }
    if (writer->group_start > 0 && writer->group_start >= writer->group_capacity / 2) {
        memmove(
            writer->groups, writer->groups + writer->group_start, count * sizeof(*writer->groups));
        writer->group_start = 0;
        writer->group_end = count;
        return KVIST_OK;
    }
    size_t capacity = writer->group_capacity > 0 ? 2 * writer->group_capacity : WRITER_GROUPS_SMALL;
    struct fd_group *groups = kvist_fault_point("frame.alloc")
                                  ? NULL
                                  : realloc(writer->groups, capacity * sizeof(*groups));
    if (groups == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, ENOMEM, "frame", "no memory for a frame");
    }
    writer->groups = groups;
    writer->group_capacity = capacity;
    return KVIST_OK;
}

/* Duplicate fds into a group that nobody sees yet. */
static enum kvist_status
duplicate_fds(struct fd_group *group, const int *fds, size_t count, struct kvist_error *err)
{
    for (group->count = 0; group->count < count; group->count++) {
        int fd = -1;
        if (kvist_fault_point("frame.dup")) {
            errno = EMFILE;
        } else {
            fd = fcntl(fds[group->count], F_DUPFD_CLOEXEC, WRITER_DUP_FD_MIN);
        }
        if (fd < 0) {
            int error_number = errno;
            close_all(group->fds, group->count);
            group->count = 0;
            return kvist_error_set_errno(
                err, error_number, "fcntl", "cannot duplicate a file descriptor");
        }
        group->fds[group->count] = fd;
    }
    return KVIST_OK;
}

enum kvist_status kvist_frame_writer_put(struct kvist_frame_writer *writer,
                                         const uint8_t *bytes,
                                         size_t length,
                                         const int *fds,
                                         size_t fd_count,
                                         struct kvist_error *err)
{
    if (writer->failed != KVIST_OK) {
        return writer_failed(writer, err);
    }
    if (length == 0 || length > KVIST_FRAME_BYTES_MAX || fd_count > KVIST_FRAME_FDS_MAX) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "frame",
                               "frame of %zu bytes and %zu file descriptors is beyond the limits",
                               length,
                               fd_count);
    }
    size_t frame_bytes = PREFIX_BYTES + length;
    size_t pending = kvist_frame_writer_pending_bytes(writer);
    if (frame_bytes > KVIST_OUTPUT_BYTES_MAX - pending) {
        return kvist_error_set(
            err, KVIST_BUSY, 0, "frame", "the peer does not read: %zu bytes wait", pending);
    }
    enum kvist_status status = writer_reserve(writer, frame_bytes, err);
    if (status != KVIST_OK) {
        return status;
    }
    if (fd_count > 0) {
        status = writer_reserve_group(writer, err);
        if (status != KVIST_OK) {
            return status;
        }
        struct fd_group *group = &writer->groups[writer->group_end];
        status = duplicate_fds(group, fds, fd_count, err);
        if (status != KVIST_OK) {
            return status;
        }
        group->position = writer->base + writer->end;
        group->frame_bytes = frame_bytes;
        writer->group_end++;
    }
    prefix_encode(writer->buffer + writer->end, (uint32_t)length);
    memcpy(writer->buffer + writer->end + PREFIX_BYTES, bytes, length);
    writer->end += frame_bytes;
    return KVIST_OK;
}

static ssize_t transmit(int socket_fd, const struct msghdr *message)
{
    if (kvist_fault_point("frame.send")) {
        errno = EPIPE;
        return -1;
    }
    ssize_t sent = 0;
    do {
        sent = sendmsg(socket_fd, message, MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    return sent;
}

static void
message_add_fds(struct msghdr *message, union fd_control *control, const struct fd_group *group)
{
    size_t bytes = sizeof(int) * group->count;
    memset(control, 0, sizeof(*control));
    control->header.cmsg_level = SOL_SOCKET;
    control->header.cmsg_type = SCM_RIGHTS;
    control->header.cmsg_len = CMSG_LEN(bytes);
    memcpy(CMSG_DATA(&control->header), group->fds, bytes);
    message->msg_control = control;
    message->msg_controllen = CMSG_SPACE(bytes);
}

/* One sendmsg: a frame that has fds with them and alone, or all bytes up to the next such frame. */
static ssize_t writer_send_once(struct kvist_frame_writer *writer, int socket_fd)
{
    union fd_control control;
    struct iovec part = {
        .iov_base = writer->buffer + writer->start,
        .iov_len = writer->end - writer->start,
    };
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    struct fd_group *group = NULL;
    if (writer->group_start < writer->group_end) {
        struct fd_group *next = &writer->groups[writer->group_start];
        if (next->position == writer->base + writer->start) {
            group = next;
            part.iov_len = group->frame_bytes;
            message_add_fds(&message, &control, group);
        } else {
            part.iov_len = next->position - writer->base - writer->start;
        }
    }
    ssize_t sent = transmit(socket_fd, &message);
    if (sent > 0) {
        writer->start += (size_t)sent;
        if (group != NULL) { /* its fds went with the first byte */
            close_all(group->fds, group->count);
            writer->group_start++;
        }
    }
    return sent;
}

static void writer_rest(struct kvist_frame_writer *writer)
{
    writer->base += writer->end;
    writer->start = 0;
    writer->end = 0;
    writer->group_start = 0;
    writer->group_end = 0;
    if (writer->capacity > BUFFER_BYTES_SMALL &&
        resize(&writer->buffer, BUFFER_BYTES_SMALL, NULL) == KVIST_OK) {
        writer->capacity = BUFFER_BYTES_SMALL;
    }
}

enum kvist_status
kvist_frame_writer_flush(struct kvist_frame_writer *writer, int socket_fd, struct kvist_error *err)
{
    if (writer->failed != KVIST_OK) {
        return writer_failed(writer, err);
    }
    while (writer->start < writer->end) {
        if (writer_send_once(writer, socket_fd) >= 0) {
            continue;
        }
        if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return KVIST_OK;
        }
        writer->failed = kvist_error_set_errno(err, errno, "sendmsg", "cannot write to the peer");
        return writer->failed;
    }
    writer_rest(writer);
    return KVIST_OK;
}

size_t kvist_frame_writer_pending_bytes(const struct kvist_frame_writer *writer)
{
    return writer->end - writer->start;
}
