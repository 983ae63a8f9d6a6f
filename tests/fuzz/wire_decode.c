/*
 * Fuzz target: what a peer writes into the socket, against the frame reader.
 *
 * Input: the reader's fd limit, then sends of {how: fds and whether it is an honest frame, length,
 * bytes}. Whatever is sent, the frames that come out are those that the bytes say, in that order;
 * no fd is lost or leaked; honest frames that follow honest frames bring their own fds.
 */
#include "proto/wire/frame.h"
#include "tests/fuzz/fuzz.h"

#include <fcntl.h>
#include <stdbool.h>
#include <sys/socket.h>
#include <unistd.h>

#define STREAM_BYTES_MAX 65536U
#define SENDS_MAX        64U
#define FDS_SENT_MAX     6U

static struct {
    uint8_t bytes[STREAM_BYTES_MAX];
    size_t length;
    size_t taken;                     /* whole frames that came out of the reader */
    uint64_t fds_expected[SENDS_MAX]; /* of honest frames, by number */
    size_t frames_sent;
    size_t frames_taken;
    bool honest; /* nothing but honest frames so far */
} stream;

static int null_fd = -1;

static uint32_t length_at(size_t position)
{
    const uint8_t *at = stream.bytes + position;
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static bool send_raw(int fd, const uint8_t *bytes, size_t length, size_t fd_count)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof(int) * FDS_SENT_MAX)];
    } control;
    memset(&control, 0, sizeof(control));
    union {
        const uint8_t *source;
        void *base;
    } memory = {.source = bytes};
    struct iovec part = {.iov_base = memory.base, .iov_len = length};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd_count > 0) {
        message.msg_control = &control;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
        for (size_t index = 0; index < fd_count; index++) {
            memcpy(CMSG_DATA(header) + index * sizeof(int), &null_fd, sizeof(int));
        }
    }
    return sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)length;
}

static void remember(const uint8_t *bytes, size_t length)
{
    KVIST_FUZZ_REQUIRE(length <= sizeof(stream.bytes) - stream.length);
    memcpy(stream.bytes + stream.length, bytes, length);
    stream.length += length;
}

static void check_frame(const struct kvist_frame *frame)
{
    KVIST_FUZZ_REQUIRE(stream.length - stream.taken >= 4);
    size_t length = length_at(stream.taken);
    KVIST_FUZZ_REQUIRE(frame->length == length && length >= 1 && length <= KVIST_FRAME_BYTES_MAX);
    KVIST_FUZZ_REQUIRE(stream.length - stream.taken - 4 >= length);
    KVIST_FUZZ_REQUIRE(memcmp(frame->bytes, stream.bytes + stream.taken + 4, length) == 0);
    stream.taken += 4 + length;
    if (stream.honest) {
        KVIST_FUZZ_REQUIRE(frame->fd_count == stream.fds_expected[stream.frames_taken]);
    }
    stream.frames_taken++;
    for (size_t index = 0; index < frame->fd_count; index++) {
        KVIST_FUZZ_REQUIRE(fcntl(frame->fds[index], F_GETFD) == FD_CLOEXEC);
        (void)close(frame->fds[index]);
    }
}

/* @return whether the reader can go on */
static bool read_all(struct kvist_frame_reader *reader, int fd)
{
    bool more = true;
    enum kvist_status status = KVIST_OK;
    while (status == KVIST_OK && more) {
        struct kvist_frame frame;
        struct kvist_error err = KVIST_ERROR_INIT;
        status = kvist_frame_reader_fill(reader, fd, &more, &err);
        enum kvist_status taken = KVIST_OK;
        while ((taken = kvist_frame_reader_next(reader, &frame, &err)) == KVIST_OK) {
            check_frame(&frame);
        }
        KVIST_FUZZ_REQUIRE(status == KVIST_OK ? taken == KVIST_NOT_FOUND : taken != KVIST_OK);
    }
    KVIST_FUZZ_REQUIRE(status == KVIST_OK || status == KVIST_CLOSED || status == KVIST_PROTOCOL);
    KVIST_FUZZ_REQUIRE(status != KVIST_PROTOCOL || !stream.honest);
    return status == KVIST_OK;
}

/* A frame through the writer: with its fds, that come out with it. */
static bool send_honest(
    struct kvist_frame_writer *writer, int fd, const uint8_t *bytes, size_t length, size_t fd_count)
{
    const int fds[KVIST_FRAME_FDS_MAX] = {null_fd, null_fd, null_fd, null_fd};
    const uint8_t prefix[4] = {(uint8_t)length, (uint8_t)(length >> 8), 0, 0};
    if (length == 0 ||
        kvist_frame_writer_put(writer, bytes, length, fds, fd_count, NULL) != KVIST_OK) {
        return length == 0;
    }
    stream.fds_expected[stream.frames_sent++] = fd_count;
    remember(prefix, sizeof(prefix));
    remember(bytes, length);
    return kvist_frame_writer_flush(writer, fd, NULL) == KVIST_OK &&
           kvist_frame_writer_pending_bytes(writer) == 0;
}

static void converse(struct kvist_fuzz_input *input, const int sockets[2])
{
    size_t fd_max = kvist_fuzz_u8(input) % (KVIST_FRAME_FDS_MAX + 1);
    struct kvist_frame_reader *reader = NULL;
    struct kvist_frame_writer *writer = NULL;
    KVIST_FUZZ_REQUIRE(kvist_frame_reader_create(fd_max, &reader) == KVIST_OK);
    KVIST_FUZZ_REQUIRE(kvist_frame_writer_create(&writer) == KVIST_OK);
    bool going = true;
    for (unsigned sends = 0; going && input->left > 0 && sends < SENDS_MAX; sends++) {
        uint8_t how = kvist_fuzz_u8(input);
        size_t length = kvist_fuzz_u16(input) % 4096;
        length = length < input->left ? length : input->left;
        const uint8_t *bytes = input->at;
        input->at += length;
        input->left -= length;
        bool honest = (how & 8U) != 0;
        size_t fd_count = (how & 7U) % (honest ? fd_max + 1 : FDS_SENT_MAX + 1);
        if (honest) {
            going = send_honest(writer, sockets[0], bytes, length, fd_count);
        } else if (length > 0) {
            stream.honest = false;
            remember(bytes, length);
            going = send_raw(sockets[0], bytes, length, fd_count);
        }
        if ((how & 16U) == 0) { /* else several sends before a read */
            going = going && read_all(reader, sockets[1]);
        }
    }
    (void)shutdown(sockets[0], SHUT_WR);
    if (going) {
        (void)read_all(reader, sockets[1]);
        KVIST_FUZZ_REQUIRE(!stream.honest || stream.frames_taken == stream.frames_sent);
    }
    kvist_frame_writer_destroy(&writer);
    kvist_frame_reader_destroy(&reader);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kvist_fuzz_input input = {data, size};
    int sockets[2];
    if (size > STREAM_BYTES_MAX / 2) {
        return 0;
    }
    if (null_fd < 0) {
        null_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    }
    KVIST_FUZZ_REQUIRE(null_fd >= 0);
    int first_free = dup(null_fd);
    (void)close(first_free);
    KVIST_FUZZ_REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0);
    stream.length = 0;
    stream.taken = 0;
    stream.frames_sent = 0;
    stream.frames_taken = 0;
    stream.honest = true;
    converse(&input, sockets);
    (void)close(sockets[0]);
    (void)close(sockets[1]);
    int free_now = dup(null_fd);
    KVIST_FUZZ_REQUIRE(free_now == first_free); /* no fd is left open */
    (void)close(free_now);
    return 0;
}

void kvist_fuzz_seeds(kvist_fuzz_emit_fn *emit, void *ctx)
{
    /* fd_max; then how, length (16 bit), bytes */
    static const uint8_t honest[] = {4,   8 + 2,      3, 0, 'a', 'b', 'c',   8, 1, 0,
                                     'd', 8 + 16 + 4, 2, 0, 'e', 'f', 8 + 1, 1, 0, 'g'};
    static const uint8_t raw[] = {1, 1, 6, 0, 2, 0,   0, 0, 'x', 'y', 0, 3, 0, 1, 0,
                                  0, 0, 3, 0, 0, 'z', 1, 1, 5,   0,   1, 0, 0, 0, 'w'};
    static const uint8_t zero[] = {0, 0, 4, 0, 0, 0, 0, 0};
    static const uint8_t huge[] = {2, 3, 4, 0, 0xff, 0xff, 0xff, 0xff};
    static const uint8_t too_many_fds[] = {4, 5, 5, 0, 1, 0, 0, 0, 'x'};
    static const uint8_t middle[] = {4, 0, 5, 0, 4, 0, 0, 0, 'x', 2, 3, 0, 'a', 'b', 'c'};
    emit(ctx, honest, sizeof(honest));
    emit(ctx, raw, sizeof(raw));
    emit(ctx, zero, sizeof(zero));
    emit(ctx, huge, sizeof(huge));
    emit(ctx, too_many_fds, sizeof(too_many_fds));
    emit(ctx, middle, sizeof(middle));
}
