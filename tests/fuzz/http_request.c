/*
 * Fuzz target: what a peer sends to the status pages.
 *
 * Input: chunks of {length, bytes}, each sent and then handled. There is at most one answer, with
 * the length that it says, and nothing of the peer is left when it has gone.
 */
#include "daemon/http.h"
#include "tests/fuzz/fuzz.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define CHUNKS_MAX   32U
#define HANDLES_MAX  16U
#define ANSWER_BYTES 4096U

static struct {
    struct event_base *base;
    struct kvist_counters counters;
    struct kvist_http http;
    struct sockaddr_un address;
} served;

static void write_page(void *ctx, FILE *file)
{
    (void)ctx;
    (void)fputs("page", file);
}

static bool is_ready(void *ctx)
{
    (void)ctx;
    return false;
}

/* libFuzzer ends without atexit(), so nothing stays in the file system: the socket is reached
 * through a descriptor of its inode. */
static void unlink_socket(const char *directory)
{
    char lock[sizeof(served.address.sun_path) + 8];
    (void)snprintf(lock, sizeof(lock), "%s.lock", served.address.sun_path);
    int fd = open(served.address.sun_path, O_PATH | O_CLOEXEC);
    KVIST_FUZZ_REQUIRE(fd >= 0 && unlink(served.address.sun_path) == 0 && unlink(lock) == 0 &&
                       rmdir(directory) == 0);
    (void)snprintf(
        served.address.sun_path, sizeof(served.address.sun_path), "/proc/self/fd/%d", fd);
}

static void clean(void)
{
    kvist_http_stop(&served.http);
    event_base_free(served.base);
}

static void serve(void)
{
    char directory[] = "/tmp/kvist-fuzz-XXXXXX";
    KVIST_FUZZ_REQUIRE(mkdtemp(directory) != NULL);
    served.address.sun_family = AF_UNIX;
    (void)snprintf(
        served.address.sun_path, sizeof(served.address.sun_path), "%s/http", directory);
    const struct kvist_http_address address = {.kind = KVIST_HTTP_UNIX,
                                               .path = served.address.sun_path};
    const struct kvist_http_pages pages = {
        .metrics = write_page, .health = write_page, .ready = is_ready};
    served.base = event_base_new();
    KVIST_FUZZ_REQUIRE(served.base != NULL);
    KVIST_FUZZ_REQUIRE(
        kvist_http_start(&served.http, served.base, &address, &served.counters, &pages, NULL) ==
        KVIST_OK);
    unlink_socket(directory);
    KVIST_FUZZ_REQUIRE(atexit(clean) == 0); /* of the replay */
}

static void handle(void)
{
    for (unsigned pass = 0; pass < HANDLES_MAX; pass++) {
        KVIST_FUZZ_REQUIRE(event_base_loop(served.base, EVLOOP_NONBLOCK) >= 0);
    }
}

static void check_answer(const char *answer, size_t length)
{
    static const char start[] = "HTTP/1.1 ";
    KVIST_FUZZ_REQUIRE(strncmp(answer, start, sizeof(start) - 1) == 0);
    const char *body = strstr(answer, "\r\n\r\n");
    const char *says = strstr(answer, "Content-Length: ");
    KVIST_FUZZ_REQUIRE(body != NULL && says != NULL && says < body);
    size_t body_bytes = length - (size_t)(body + 4 - answer);
    size_t said_bytes = strtoul(says + strlen("Content-Length: "), NULL, 10);
    /* A HEAD is answered without the body. */
    KVIST_FUZZ_REQUIRE(body_bytes == said_bytes || body_bytes == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kvist_fuzz_input input = {data, size};
    char answer[ANSWER_BYTES];
    if (served.base == NULL) {
        serve();
    }
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    KVIST_FUZZ_REQUIRE(
        fd >= 0 &&
        connect(fd, (const struct sockaddr *)&served.address, sizeof(served.address)) == 0);
    for (unsigned chunk = 0; chunk < CHUNKS_MAX && input.left > 0; chunk++) {
        size_t length = kvist_fuzz_u16(&input) % (2 * KVIST_HTTP_REQUEST_BYTES_MAX);
        length = length < input.left ? length : input.left;
        ssize_t sent = send(fd, input.at, length, MSG_DONTWAIT | MSG_NOSIGNAL);
        (void)sent; /* the peer may have been answered and closed */
        input.at += length;
        input.left -= length;
        handle();
    }
    (void)shutdown(fd, SHUT_WR);
    handle();
    ssize_t got = recv(fd, answer, sizeof(answer) - 1, MSG_DONTWAIT);
    if (got > 0) {
        answer[got] = '\0';
        check_answer(answer, (size_t)got);
    }
    (void)close(fd);
    handle();
    KVIST_FUZZ_REQUIRE(served.http.peer_count == 0 && served.http.peers == NULL);
    return 0;
}

void kvist_fuzz_seeds(kvist_fuzz_emit_fn *emit, void *ctx)
{
    static const char *const requests[] = {
        "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /healthz?x HTTP/1.0\n\n",
        "HEAD /readyz HTTP/1.1\r\n\r\n",
        "GET /nothing HTTP/1.1\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n",
        "POST / HTTP/1.1\r\n\r\n",
        "\n\n",
    };
    for (size_t index = 0; index < sizeof(requests) / sizeof(requests[0]); index++) {
        char seed[256];
        size_t length = strlen(requests[index]);
        seed[0] = (char)length;
        seed[1] = 0;
        memcpy(seed + 2, requests[index], length);
        emit(ctx, seed, length + 2);
        /* The same in two chunks. */
        seed[0] = (char)(length / 2);
        memmove(seed + 2 + length / 2 + 2, seed + 2 + length / 2, length - length / 2);
        seed[2 + length / 2] = 127;
        seed[3 + length / 2] = 0;
        emit(ctx, seed, length + 4);
    }
    static char long_request[2 + 2 * KVIST_HTTP_REQUEST_BYTES_MAX];
    memset(long_request, 'a', sizeof(long_request));
    long_request[0] = 0;
    long_request[1] = KVIST_HTTP_REQUEST_BYTES_MAX >> 8;
    emit(ctx, long_request, sizeof(long_request));
}
