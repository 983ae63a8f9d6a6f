/* frame: every way in which a stream socket can cut frames, and every way to send bad ones. */
#include "proto/base/check.h"
#include "proto/base/fault.h"
#include "proto/wire/frame.h"
#include "tests/support/unit.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define SOAK_FRAMES    20000U
#define SOAK_BYTES_MAX 3000U
#define SOAK_SEED      20260101U

static struct {
    size_t fds_before;
    int ours;
    int theirs;
    struct kvist_frame_reader *reader; /* of `ours` */
    struct kvist_frame_writer *writer; /* to `theirs` */
} fixture;

static size_t open_fd_count(void)
{
    size_t count = 0;
    DIR *directory = opendir("/proc/self/fd");
    KVIST_TEST_FATAL(directory != NULL);
    while (readdir(directory) != NULL) {
        count++;
    }
    (void)closedir(directory);
    return count;
}

static void make_reader(size_t fd_max)
{
    kvist_frame_reader_destroy(&fixture.reader);
    KVIST_TEST_FATAL(kvist_frame_reader_create(fd_max, &fixture.reader) == KVIST_OK);
}

static void setup(void)
{
    fixture.fds_before = open_fd_count();
    int pair[2];
    KVIST_TEST_FATAL(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    fixture.ours = pair[0];
    fixture.theirs = pair[1];
    make_reader(KVIST_FRAME_FDS_MAX);
    KVIST_TEST_FATAL(kvist_frame_writer_create(&fixture.writer) == KVIST_OK);
}

static void close_theirs(void)
{
    if (fixture.theirs >= 0) {
        (void)close(fixture.theirs);
        fixture.theirs = -1;
    }
}

static void teardown(void)
{
    (void)kvist_fault_disarm();
    kvist_frame_reader_destroy(&fixture.reader);
    kvist_frame_writer_destroy(&fixture.writer);
    close_theirs();
    (void)close(fixture.ours);
    KVIST_TEST_EQUAL(open_fd_count(), fixture.fds_before);
}

/* --- What cases are made of ------------------------------------------------------------------ */

static int make_fd(uint64_t *inode_out)
{
    struct stat info;
    int fd = memfd_create("frame-test", MFD_CLOEXEC);
    KVIST_TEST_FATAL(fd >= 0 && fstat(fd, &info) == 0);
    *inode_out = info.st_ino;
    return fd;
}

/* Close a received fd and say what it was. */
static uint64_t take_fd(int fd)
{
    struct stat info;
    KVIST_TEST_FATAL(fd >= 0 && fstat(fd, &info) == 0);
    KVIST_TEST_TRUE((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
    (void)close(fd);
    return info.st_ino;
}

static void put(const void *bytes, size_t length, const int *fds, size_t fd_count)
{
    KVIST_TEST_STATUS(kvist_frame_writer_put(fixture.writer, bytes, length, fds, fd_count, NULL),
                      KVIST_OK);
}

static void flush(void)
{
    KVIST_TEST_STATUS(kvist_frame_writer_flush(fixture.writer, fixture.theirs, NULL), KVIST_OK);
}

static enum kvist_status fill_once(bool *more_out, struct kvist_error *err)
{
    return kvist_frame_reader_fill(fixture.reader, fixture.ours, more_out, err);
}

static void fill_all(void)
{
    bool more = true;
    while (more) {
        more = false;
        KVIST_TEST_STATUS(fill_once(&more, NULL), KVIST_OK);
    }
}

static void fill_fails(enum kvist_status expected, const char *text)
{
    struct kvist_error err = KVIST_ERROR_INIT;
    bool more = false;
    KVIST_TEST_STATUS(fill_once(&more, &err), expected);
    KVIST_TEST_STATUS(err.status, expected);
    KVIST_TEST_TRUE(strstr(err.text, text) != NULL);
    KVIST_TEST_STATUS(fill_once(&more, NULL), expected);
}

static void expect_frame(const void *bytes, size_t length, const uint64_t *inodes, size_t fd_count)
{
    struct kvist_frame frame;
    KVIST_TEST_FATAL(kvist_frame_reader_next(fixture.reader, &frame, NULL) == KVIST_OK);
    KVIST_TEST_EQUAL(frame.length, length);
    KVIST_TEST_TRUE(frame.length == length && memcmp(frame.bytes, bytes, length) == 0);
    KVIST_TEST_EQUAL(frame.fd_count, fd_count);
    for (size_t index = 0; index < frame.fd_count; index++) {
        uint64_t inode = take_fd(frame.fds[index]);
        KVIST_TEST_TRUE(index >= fd_count || inode == inodes[index]);
    }
}

static void expect_none(enum kvist_status expected)
{
    struct kvist_frame frame;
    KVIST_TEST_STATUS(kvist_frame_reader_next(fixture.reader, &frame, NULL), expected);
}

static void send_raw(const void *bytes, size_t length, const int *fds, size_t fd_count)
{
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int) * 16)] = {0};
    struct iovec part = {.iov_base = memcpy(malloc(length), bytes, length), .iov_len = length};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd_count > 0) {
        message.msg_control = control;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        KVIST_TEST_FATAL(header != NULL);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
        memcpy(CMSG_DATA(header), fds, sizeof(int) * fd_count);
    }
    KVIST_TEST_EQUAL(sendmsg(fixture.theirs, &message, 0), length);
    free(part.iov_base);
}

/* --- Good frames ------------------------------------------------------------------------------ */

static void limits_of_creation(void)
{
    struct kvist_frame_reader *reader = NULL;
    KVIST_TEST_STATUS(kvist_frame_reader_create(KVIST_FRAME_FDS_MAX + 1, &reader), KVIST_INVALID);
    KVIST_TEST_TRUE(reader == NULL);
    kvist_frame_reader_destroy(&reader);
    struct kvist_frame_writer *writer = NULL;
    kvist_frame_writer_destroy(&writer);
    kvist_fault_arm("frame.alloc", 1, true);
    KVIST_TEST_STATUS(kvist_frame_reader_create(0, &reader), KVIST_NO_MEMORY);
    KVIST_TEST_STATUS(kvist_frame_writer_create(&writer), KVIST_NO_MEMORY);
}

static void nothing_there_is_fine(void)
{
    bool more = true;
    KVIST_TEST_STATUS(fill_once(&more, NULL), KVIST_OK);
    KVIST_TEST_TRUE(!more);
    expect_none(KVIST_NOT_FOUND);
    flush();
}

static void frames_come_byte_by_byte(void)
{
    static const uint8_t wire[] = {3, 0, 0, 0, 'a', 'b', 'c', 1, 0, 0, 0, 'd'};
    for (size_t at = 0; at < sizeof(wire); at++) {
        expect_none(KVIST_NOT_FOUND);
        send_raw(&wire[at], 1, NULL, 0);
        fill_all();
        if (at == 6) {
            expect_frame("abc", 3, NULL, 0);
        }
    }
    expect_frame("d", 1, NULL, 0);
    expect_none(KVIST_NOT_FOUND);
}

static void several_frames_come_in_one_read(void)
{
    for (uint32_t index = 0; index < 100; index++) {
        put(&index, sizeof(index), NULL, 0);
    }
    KVIST_TEST_EQUAL(kvist_frame_writer_pending_bytes(fixture.writer), 100 * 8);
    flush();
    KVIST_TEST_EQUAL(kvist_frame_writer_pending_bytes(fixture.writer), 0);
    bool more = true;
    KVIST_TEST_STATUS(fill_once(&more, NULL), KVIST_OK);
    KVIST_TEST_TRUE(!more);
    for (uint32_t index = 0; index < 100; index++) {
        expect_frame(&index, sizeof(index), NULL, 0);
    }
    expect_none(KVIST_NOT_FOUND);
}

static void fds_come_with_their_frame(void)
{
    uint64_t inodes[4];
    int fds[4];
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(fds); index++) {
        fds[index] = make_fd(&inodes[index]);
    }
    put("none", 4, NULL, 0);
    put("one", 3, &fds[0], 1);
    put("neither", 7, NULL, 0);
    put("two", 3, &fds[1], 2);
    put("another", 7, &fds[3], 1);
    put("last", 4, NULL, 0);
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(fds); index++) {
        (void)close(fds[index]); /* the writer has its own */
    }
    flush();
    fill_all(); /* all six are buffered before the first is taken */
    expect_frame("none", 4, NULL, 0);
    expect_frame("one", 3, &inodes[0], 1);
    expect_frame("neither", 7, NULL, 0);
    expect_frame("two", 3, &inodes[1], 2);
    expect_frame("another", 7, &inodes[3], 1);
    expect_frame("last", 4, NULL, 0);
    expect_none(KVIST_NOT_FOUND);
}

static void fds_ride_on_the_first_byte(void)
{
    static const uint8_t wire[] = {2, 0, 0, 0, 'h', 'i'};
    uint64_t inode = 0;
    int fd = make_fd(&inode);
    for (size_t at = 0; at < sizeof(wire); at++) {
        send_raw(&wire[at], 1, &fd, at == 0 ? 1 : 0);
        fill_all();
    }
    (void)close(fd);
    expect_frame("hi", 2, &inode, 1);
}

/* The longest frame does not fit the socket: it is written and read in parts. */
static void the_longest_frame_passes(void)
{
    uint64_t inode = 0;
    int fd = make_fd(&inode);
    uint8_t *bytes = malloc(KVIST_FRAME_BYTES_MAX + 1);
    KVIST_TEST_FATAL(bytes != NULL);
    for (size_t at = 0; at <= KVIST_FRAME_BYTES_MAX; at++) {
        bytes[at] = (uint8_t)(at * 7 + at / 251);
    }
    KVIST_TEST_STATUS(
        kvist_frame_writer_put(fixture.writer, bytes, KVIST_FRAME_BYTES_MAX + 1, NULL, 0, NULL),
        KVIST_INVALID);
    put("before", 6, NULL, 0);
    put(bytes, KVIST_FRAME_BYTES_MAX, &fd, 1);
    put("after", 5, NULL, 0);
    (void)close(fd);
    flush();
    KVIST_TEST_TRUE(kvist_frame_writer_pending_bytes(fixture.writer) > 0);
    fill_all();
    expect_frame("before", 6, NULL, 0);
    expect_none(KVIST_NOT_FOUND);
    kvist_fault_arm("frame.alloc", 0, false); /* counts */
    while (kvist_frame_writer_pending_bytes(fixture.writer) > 0) {
        flush();
        fill_all();
    }
    expect_frame(bytes, KVIST_FRAME_BYTES_MAX, &inode, 1);
    fill_all(); /* the reader was full */
    expect_frame("after", 5, NULL, 0);
    uint64_t before_rest = kvist_fault_disarm();
    KVIST_TEST_TRUE(before_rest <= 10); /* grows by doubling */
    kvist_fault_arm("frame.alloc", 0, false);
    expect_none(KVIST_NOT_FOUND);
    KVIST_TEST_EQUAL(kvist_fault_disarm(), 1); /* the memory was given back */
    free(bytes);
}

static void a_flood_of_small_frames_does_not_grow_the_reader(void)
{
    for (uint32_t index = 0; index < 20000; index++) {
        put(&index, sizeof(index), NULL, 0);
    }
    flush();
    kvist_fault_arm("frame.alloc", 0, false);
    fill_all();
    bool more = true;
    KVIST_TEST_STATUS(fill_once(&more, NULL), KVIST_OK);
    KVIST_TEST_TRUE(!more); /* full: what is there must be taken first */
    KVIST_TEST_EQUAL(kvist_fault_disarm(), 0);
    for (uint32_t index = 0; index < 20000; index++) {
        struct kvist_frame frame;
        while (kvist_frame_reader_next(fixture.reader, &frame, NULL) == KVIST_NOT_FOUND) {
            flush();
            fill_all();
        }
        KVIST_TEST_FATAL(frame.length == 4 && memcmp(frame.bytes, &index, 4) == 0);
    }
    expect_none(KVIST_NOT_FOUND);
}

static void more_frames_with_fds_than_a_reader_keeps(void)
{
    enum { COUNT = 50 };
    uint64_t inodes[COUNT];
    for (uint32_t index = 0; index < COUNT; index++) {
        int fd = make_fd(&inodes[index]);
        put(&index, sizeof(index), &fd, 1);
        (void)close(fd);
    }
    flush();
    fill_all();
    fill_all(); /* full: reads nothing */
    for (uint32_t index = 0; index < COUNT; index++) {
        expect_frame(&index, sizeof(index), &inodes[index], 1);
        fill_all();
    }
    expect_none(KVIST_NOT_FOUND);
}

/* The peer lags: the queue moves within its memory, and each fd stays with its frame. */
static void a_long_queue_keeps_its_fds(void)
{
    enum { ROUNDS = 60, ROUND_FRAMES = 30, FRAME_BYTES = 10000 };
    uint64_t inode = 0;
    int fd = make_fd(&inode);
    uint8_t *bytes = calloc(1, FRAME_BYTES);
    KVIST_TEST_FATAL(bytes != NULL);
    uint32_t taken = 0;
    for (uint32_t put_count = 0; taken < ROUNDS * ROUND_FRAMES;) {
        for (uint32_t frames = 0; frames < ROUND_FRAMES && put_count < ROUNDS * ROUND_FRAMES;
             frames++, put_count++) {
            memcpy(bytes, &put_count, sizeof(put_count));
            put(bytes, FRAME_BYTES, &fd, put_count % 3 == 0 ? 1 : 0);
        }
        flush();
        fill_all();
        struct kvist_frame frame;
        while (kvist_frame_reader_next(fixture.reader, &frame, NULL) == KVIST_OK) {
            KVIST_TEST_FATAL(memcmp(frame.bytes, &taken, sizeof(taken)) == 0);
            KVIST_TEST_FATAL(frame.fd_count == (taken % 3 == 0 ? 1 : 0));
            KVIST_TEST_TRUE(frame.fd_count == 0 || take_fd(frame.fds[0]) == inode);
            taken++;
            fill_all();
        }
    }
    free(bytes);
    (void)close(fd);
}

/* --- A model of random traffic ---------------------------------------------------------------- */

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525U + 1013904223U;
    return *state >> 8;
}

struct soak {
    uint32_t put_state;
    uint32_t take_state;
    uint32_t put_count;
    uint32_t take_count;
    uint64_t inodes[2];
    int fds[2];
    uint8_t bytes[SOAK_BYTES_MAX];
};

/* What frame number `count` is follows from the state alone, so both ends agree. */
static size_t soak_frame(struct soak *soak, uint32_t *state, size_t *fd_count_out)
{
    uint32_t shape = next_random(state);
    size_t length = shape % 50 == 0 ? next_random(state) % SOAK_BYTES_MAX + 1 : shape % 64 + 1;
    memset(soak->bytes, (int)(next_random(state) & 255U), length);
    *fd_count_out = next_random(state) % 8 == 0 ? next_random(state) % 2 + 1 : 0;
    return length;
}

static void soak_put(struct soak *soak)
{
    size_t fd_count = 0;
    size_t length = soak_frame(soak, &soak->put_state, &fd_count);
    put(soak->bytes, length, soak->fds, fd_count);
    soak->put_count++;
}

static bool soak_take(struct soak *soak)
{
    struct kvist_frame frame;
    if (kvist_frame_reader_next(fixture.reader, &frame, NULL) != KVIST_OK) {
        return false;
    }
    size_t fd_count = 0;
    size_t length = soak_frame(soak, &soak->take_state, &fd_count);
    KVIST_TEST_FATAL(frame.length == length && memcmp(frame.bytes, soak->bytes, length) == 0);
    KVIST_TEST_FATAL(frame.fd_count == fd_count);
    for (size_t index = 0; index < fd_count; index++) {
        KVIST_TEST_FATAL(take_fd(frame.fds[index]) == soak->inodes[index]);
    }
    soak->take_count++;
    return true;
}

static void random_traffic_keeps_order_and_fds(void)
{
    struct soak *soak = calloc(1, sizeof(*soak));
    KVIST_TEST_FATAL(soak != NULL);
    uint32_t random = SOAK_SEED;
    soak->put_state = SOAK_SEED;
    soak->take_state = SOAK_SEED;
    for (size_t index = 0; index < 2; index++) {
        soak->fds[index] = make_fd(&soak->inodes[index]);
    }
    while (soak->take_count < SOAK_FRAMES) {
        for (uint32_t puts = next_random(&random) % 12;
             puts > 0 && soak->put_count < SOAK_FRAMES && soak->put_count - soak->take_count < 400;
             puts--) {
            soak_put(soak);
        }
        flush();
        for (uint32_t fills = next_random(&random) % 4; fills > 0; fills--) {
            bool more = false;
            KVIST_TEST_FATAL(fill_once(&more, NULL) == KVIST_OK);
        }
        for (uint32_t takes = next_random(&random) % 16; takes > 0 && soak_take(soak); takes--) {
        }
    }
    expect_none(KVIST_NOT_FOUND);
    (void)close(soak->fds[0]);
    (void)close(soak->fds[1]);
    free(soak);
}

/* --- Bad peers -------------------------------------------------------------------------------- */

static void lengths_are_bounded(void)
{
    static const uint8_t zero[] = {0, 0, 0, 0};
    static const uint8_t beyond[] = {1, 0, 16, 0}; /* KVIST_FRAME_BYTES_MAX + 1 */
    static const uint8_t huge[] = {255, 255, 255, 255};
    const uint8_t *const prefixes[] = {zero, beyond, huge};
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(prefixes); index++) {
        make_reader(KVIST_FRAME_FDS_MAX);
        send_raw(prefixes[index], 4, NULL, 0);
        fill_fails(KVIST_PROTOCOL, "1 to 1048576 are allowed");
        expect_none(KVIST_PROTOCOL);
    }
}

static void a_bad_length_after_a_frame_with_fds_leaks_nothing(void)
{
    uint64_t inode = 0;
    int fd = make_fd(&inode);
    put("good", 4, &fd, 1);
    (void)close(fd);
    flush();
    send_raw("\0\0\0\0", 4, NULL, 0);
    bool more = false;
    KVIST_TEST_STATUS(fill_once(&more, NULL), KVIST_OK);
    KVIST_TEST_TRUE(more);
    fill_fails(KVIST_PROTOCOL, "frame of 0 bytes");
}

static void fd_counts_are_bounded(void)
{
    static const uint8_t wire[] = {1, 0, 0, 0, 'x'};
    static const struct {
        size_t fd_max;
        size_t sent;
    } rows[] = {{0, 1}, {1, 2}, {1, 3}, {2, 3}, {3, 4}, {4, 5}, {4, 16}};
    int fds[16];
    uint64_t inode = 0;
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(fds); index++) {
        fds[index] = make_fd(&inode);
    }
    size_t fds_open = open_fd_count();
    for (size_t row = 0; row < KVIST_ARRAY_COUNT(rows); row++) {
        make_reader(rows[row].fd_max);
        send_raw(wire, sizeof(wire), fds, rows[row].sent);
        fill_fails(KVIST_PROTOCOL, "file descriptors");
        KVIST_TEST_EQUAL(open_fd_count(), fds_open);
    }
    KVIST_TEST_STATUS(kvist_frame_writer_put(fixture.writer, wire, 1, fds, 5, NULL), KVIST_INVALID);
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(fds); index++) {
        (void)close(fds[index]);
    }
}

static void fds_within_a_frame_are_refused(void)
{
    uint64_t inode = 0;
    int fd = make_fd(&inode);
    send_raw("\4\0\0\0ab", 6, NULL, 0);
    fill_all();
    send_raw("cd", 2, &fd, 1);
    (void)close(fd);
    fill_fails(KVIST_PROTOCOL, "in the middle of a frame");
}

static void the_end_of_a_stream_is_closed(void)
{
    put("last words", 10, NULL, 0);
    flush();
    close_theirs();
    bool more = false;
    KVIST_TEST_STATUS(fill_once(&more, NULL), KVIST_OK);
    fill_fails(KVIST_CLOSED, "closed the connection");
    expect_frame("last words", 10, NULL, 0);
    expect_none(KVIST_NOT_FOUND);
}

static void the_end_within_a_frame_is_closed(void)
{
    uint64_t inode = 0;
    int fd = make_fd(&inode);
    send_raw("\4\0\0\0ab", 6, &fd, 1);
    (void)close(fd);
    close_theirs();
    bool more = false;
    KVIST_TEST_STATUS(fill_once(&more, NULL), KVIST_OK);
    fill_fails(KVIST_CLOSED, "in the middle of a frame");
    expect_none(KVIST_NOT_FOUND);
}

/* --- Peers that do not read, and peers that have gone ------------------------------------------
 */

static void the_queue_is_bounded(void)
{
    uint8_t *bytes = calloc(1, KVIST_FRAME_BYTES_MAX);
    KVIST_TEST_FATAL(bytes != NULL);
    uint32_t count = 0;
    struct kvist_error err = KVIST_ERROR_INIT;
    enum kvist_status status = KVIST_OK;
    while (status == KVIST_OK && count < 100) {
        memcpy(bytes, &count, sizeof(count));
        status =
            kvist_frame_writer_put(fixture.writer, bytes, KVIST_FRAME_BYTES_MAX / 2, NULL, 0, &err);
        count += status == KVIST_OK ? 1 : 0;
    }
    KVIST_TEST_STATUS(status, KVIST_BUSY);
    KVIST_TEST_EQUAL(count, KVIST_OUTPUT_BYTES_MAX / (KVIST_FRAME_BYTES_MAX / 2) - 1);
    KVIST_TEST_TRUE(strstr(err.text, "does not read") != NULL);
    for (uint32_t index = 0; index < count;) {
        flush();
        fill_all();
        struct kvist_frame frame;
        while (kvist_frame_reader_next(fixture.reader, &frame, NULL) == KVIST_OK) {
            KVIST_TEST_TRUE(memcmp(frame.bytes, &index, sizeof(index)) == 0);
            index++;
        }
    }
    put("room again", 10, NULL, 0);
    free(bytes);
}

static void queued_fds_are_bounded(void)
{
    struct rlimit limit;
    KVIST_TEST_FATAL(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    struct rlimit raised = {.rlim_cur = limit.rlim_max, .rlim_max = limit.rlim_max};
    KVIST_TEST_FATAL(setrlimit(RLIMIT_NOFILE, &raised) == 0);
    uint64_t inode = 0;
    int fd = make_fd(&inode);
    enum kvist_status status = KVIST_OK;
    for (size_t count = 0; status == KVIST_OK && count < 10000; count++) {
        status = kvist_frame_writer_put(fixture.writer, (const uint8_t *)"x", 1, &fd, 1, NULL);
    }
    KVIST_TEST_STATUS(status, KVIST_BUSY);
    (void)close(fd);
    kvist_frame_writer_destroy(&fixture.writer);
    KVIST_TEST_FATAL(setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

static void a_gone_peer_is_closed(void)
{
    uint64_t inode = 0;
    int fd = make_fd(&inode);
    put("hello", 5, &fd, 1);
    (void)close(fd);
    close_theirs();
    struct kvist_error err = KVIST_ERROR_INIT;
    KVIST_TEST_STATUS(kvist_frame_writer_flush(fixture.writer, fixture.ours, &err), KVIST_CLOSED);
    KVIST_TEST_TRUE(strstr(err.text, "cannot write to the peer") != NULL);
    KVIST_TEST_STATUS(kvist_frame_writer_flush(fixture.writer, fixture.ours, NULL), KVIST_CLOSED);
    KVIST_TEST_STATUS(
        kvist_frame_writer_put(fixture.writer, (const uint8_t *)"x", 1, NULL, 0, NULL),
        KVIST_CLOSED);
}

/* --- Faults ------------------------------------------------------------------------------------
 */

static void a_put_that_fails_spoils_nothing(void)
{
    uint64_t inodes[4];
    int fds[4];
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(fds); index++) {
        fds[index] = make_fd(&inodes[index]);
    }
    for (uint64_t nth = 1; nth <= KVIST_ARRAY_COUNT(fds); nth++) {
        size_t fds_open = open_fd_count();
        kvist_fault_arm("frame.dup", nth, false);
        KVIST_TEST_STATUS(
            kvist_frame_writer_put(fixture.writer, (const uint8_t *)"x", 1, fds, 4, NULL),
            KVIST_BUSY);
        KVIST_TEST_EQUAL(open_fd_count(), fds_open);
    }
    uint8_t longer[20000] = {0};
    kvist_fault_arm("frame.alloc", 1, true);
    KVIST_TEST_STATUS(kvist_frame_writer_put(fixture.writer, longer, sizeof(longer), NULL, 0, NULL),
                      KVIST_NO_MEMORY);
    (void)kvist_fault_disarm();
    put("fine", 4, fds, 4);
    flush();
    fill_all();
    expect_frame("fine", 4, inodes, 4);
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(fds); index++) {
        (void)close(fds[index]);
    }
}

static void failed_calls_are_reported(void)
{
    kvist_fault_arm("frame.send", 1, false);
    put("x", 1, NULL, 0);
    KVIST_TEST_STATUS(kvist_frame_writer_flush(fixture.writer, fixture.theirs, NULL), KVIST_CLOSED);
    kvist_fault_arm("frame.recv", 1, false);
    fill_fails(KVIST_CLOSED, "cannot read from the peer");
    make_reader(0);
    uint8_t longer[20000] = {0, 0, 1, 0}; /* the beginning of 64 KiB: the reader must grow */
    send_raw(longer, sizeof(longer), NULL, 0);
    kvist_fault_arm("frame.alloc", 1, false);
    bool more = false;
    KVIST_TEST_STATUS(fill_once(&more, NULL), KVIST_OK);
    fill_fails(KVIST_NO_MEMORY, "no memory for a buffer of 32768 bytes");
    expect_none(KVIST_NO_MEMORY);
}

static void running_out_of_fds_is_busy(void)
{
    struct rlimit limit;
    KVIST_TEST_FATAL(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    uint64_t inode = 0;
    int fds[2] = {make_fd(&inode), make_fd(&inode)};
    put("x", 1, fds, 2);
    flush();
    size_t fds_open = open_fd_count();
    /* Every number below the limit is taken: the kernel cannot install what has come. */
    struct rlimit low = {.rlim_cur = (rlim_t)fds[0], .rlim_max = limit.rlim_max};
    KVIST_TEST_FATAL(setrlimit(RLIMIT_NOFILE, &low) == 0);
    fill_fails(KVIST_BUSY, "raise the limit of open files");
    KVIST_TEST_FATAL(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    KVIST_TEST_EQUAL(open_fd_count(), fds_open);
    (void)close(fds[0]);
    (void)close(fds[1]);
}

static void fds_that_nobody_takes_are_closed(void)
{
    uint64_t inode = 0;
    int fd = make_fd(&inode);
    put("sent", 4, &fd, 1);
    flush();
    fill_all();
    put("queued", 6, &fd, 1);
    (void)close(fd);
    /* teardown destroys both ends and counts */
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"limits of creation", limits_of_creation},
        {"nothing there is fine", nothing_there_is_fine},
        {"frames come byte by byte", frames_come_byte_by_byte},
        {"several frames come in one read", several_frames_come_in_one_read},
        {"fds come with their frame", fds_come_with_their_frame},
        {"fds ride on the first byte", fds_ride_on_the_first_byte},
        {"the longest frame passes", the_longest_frame_passes},
        {"a flood of small frames does not grow the reader",
         a_flood_of_small_frames_does_not_grow_the_reader},
        {"more frames with fds than a reader keeps", more_frames_with_fds_than_a_reader_keeps},
        {"a long queue keeps its fds", a_long_queue_keeps_its_fds},
        {"random traffic keeps order and fds", random_traffic_keeps_order_and_fds},
        {"lengths are bounded", lengths_are_bounded},
        {"a bad length after a frame with fds leaks nothing",
         a_bad_length_after_a_frame_with_fds_leaks_nothing},
        {"fd counts are bounded", fd_counts_are_bounded},
        {"fds within a frame are refused", fds_within_a_frame_are_refused},
        {"the end of a stream is CLOSED", the_end_of_a_stream_is_closed},
        {"the end within a frame is CLOSED", the_end_within_a_frame_is_closed},
        {"the queue is bounded", the_queue_is_bounded},
        {"queued fds are bounded", queued_fds_are_bounded},
        {"a gone peer is CLOSED", a_gone_peer_is_closed},
        {"a put that fails spoils nothing", a_put_that_fails_spoils_nothing},
        {"failed calls are reported", failed_calls_are_reported},
        {"running out of fds is BUSY", running_out_of_fds_is_busy},
        {"fds that nobody takes are closed", fds_that_nobody_takes_are_closed},
    };
    return kvist_unit_main("frame", cases, KVIST_ARRAY_COUNT(cases), setup, teardown);
}
