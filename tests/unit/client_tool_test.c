/* What the kvist tool is made of: JSON, sizes, options, requests to a peer that misbehaves. */
#include "client/tool/tool.h"
#include "proto/base/clock.h"
#include "tests/support/unit.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* --- JSON --------------------------------------------------------------------------------------
 */

static char *written; /* by the writer that a case has open */
static size_t written_bytes;

static FILE *open_text(void)
{
    FILE *out = open_memstream(&written, &written_bytes);
    KVIST_TEST_FATAL(out != NULL);
    return out;
}

/* Close the stream and compare, white space left out. */
static bool wrote(FILE *out, const char *expected)
{
    KVIST_TEST_FATAL(fclose(out) == 0);
    char *target = written;
    bool quoted = false;
    for (const char *at = written; *at != '\0'; at++) {
        quoted = *at == '"' && (at == written || at[-1] != '\\') ? !quoted : quoted;
        if (quoted || (*at != ' ' && *at != '\n')) {
            *target++ = *at;
        }
    }
    *target = '\0';
    bool equal = strcmp(written, expected) == 0;
    if (!equal) {
        (void)fprintf(stderr, "got      %s\nexpected %s\n", written, expected);
    }
    free(written);
    return equal;
}

static void json_has_commas_where_they_belong(void)
{
    struct kvist_json json;
    FILE *out = open_text();
    kvist_json_init(&json, out);
    kvist_json_object(&json, NULL);
    kvist_json_number(&json, "a", UINT64_MAX);
    kvist_json_array(&json, "b");
    kvist_json_close(&json);
    kvist_json_array(&json, "c");
    kvist_json_number(&json, NULL, 1);
    kvist_json_object(&json, NULL);
    kvist_json_bool(&json, "d", true);
    kvist_json_bool(&json, "e", false);
    kvist_json_close(&json);
    kvist_json_close(&json);
    kvist_json_hex(&json, "f", "\x00\xff", 2);
    kvist_json_close(&json);
    KVIST_TEST_TRUE(wrote(out,
                          "{\"a\":18446744073709551615,\"b\":[],\"c\":[1,{\"d\":true,\"e\":false}],"
                          "\"f\":\"00ff\"}"));
}

static void json_texts_are_escaped(void)
{
    static const struct {
        const char *text;
        const char *expected;
    } rows[] = {
        {"plain", "[\"plain\"]"},
        {"a\"b\\c", "[\"a\\\"b\\\\c\"]"},
        {"\n\t\x01\x7f", "[\"\\u000a\\u0009\\u0001\\u007f\"]"},
        {"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", "[\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\"]"},
        {"\xff", "[\"\\ufffd\"]"},                                  /* no UTF-8 at all */
        {"\xc3", "[\"\\ufffd\"]"},                                  /* cut */
        {"\xc0\xaf", "[\"\\ufffd\\ufffd\"]"},                       /* overlong */
        {"\xed\xa0\x80", "[\"\\ufffd\\ufffd\\ufffd\"]"},            /* a surrogate */
        {"\xf4\x90\x80\x80", "[\"\\ufffd\\ufffd\\ufffd\\ufffd\"]"}, /* beyond Unicode */
    };
    for (size_t row = 0; row < sizeof(rows) / sizeof(rows[0]); row++) {
        struct kvist_json json;
        FILE *out = open_text();
        kvist_json_init(&json, out);
        kvist_json_array(&json, NULL);
        kvist_json_text(&json, NULL, rows[row].text);
        kvist_json_close(&json);
        KVIST_TEST_TRUE(wrote(out, rows[row].expected));
    }
}

static void json_reals_are_exact_or_null(void)
{
    struct kvist_json json;
    FILE *out = open_text();
    double zero = 0;
    kvist_json_init(&json, out);
    kvist_json_array(&json, NULL);
    kvist_json_real(&json, NULL, 0.1);
    kvist_json_real(&json, NULL, 67108864);
    kvist_json_real(&json, NULL, 0.1 + 0.2);
    kvist_json_real(&json, NULL, 1 / zero);
    kvist_json_real(&json, NULL, -1 / zero);
    kvist_json_real(&json, NULL, zero / zero);
    kvist_json_close(&json);
    KVIST_TEST_TRUE(wrote(out, "[0.1,67108864,0.30000000000000004,null,null,null]"));
}

/* --- Sizes and options -------------------------------------------------------------------------
 */

static void sizes_are_read_and_written(void)
{
    static const struct {
        const char *text;
        uint64_t bytes; /* 0: refused */
    } rows[] = {
        {"4096", 4096},
        {"128K", 131072},
        {"2M", 2097152},
        {"1.5g", 1610612736},
        {"1T", 1ULL << 40},
        {"", 0},
        {"K", 0},
        {"-1", 0},
        {"2MB", 0},
        {"2X", 0},
        {"0", 0},
        {"nan", 0},
        {"inf", 0},
        {"1e30", 0},
    };
    for (size_t row = 0; row < sizeof(rows) / sizeof(rows[0]); row++) {
        uint64_t bytes = 0;
        bool accepted = kvist_tool_parse_size(rows[row].text, &bytes);
        KVIST_TEST_EQUAL(accepted, rows[row].bytes != 0);
        KVIST_TEST_EQUAL(bytes, rows[row].bytes);
    }
    char text[32];
    KVIST_TEST_TRUE(strcmp(kvist_tool_size(0, text), "0 B") == 0);
    KVIST_TEST_TRUE(strcmp(kvist_tool_size(1536, text), "1.5 KiB") == 0);
    KVIST_TEST_TRUE(strcmp(kvist_tool_size(1048575, text), "1.0 MiB") == 0);
    KVIST_TEST_TRUE(strcmp(kvist_tool_size(UINT64_MAX, text), "16384.0 PiB") == 0);
}

static int parse(struct kvist_tool *tool, const char **pool, const char **all, char **argv)
{
    static const struct kvist_tool_command command = {"clear", "", "", NULL};
    const struct kvist_tool_option options[] = {
        {"pool ID", true, "", pool},
        {"all", false, "", all},
    };
    int argc = 0;
    while (argv[argc] != NULL) {
        argc++;
    }
    return kvist_tool_parse(tool, &command, argc, argv, options, 2, 1);
}

static void options_are_parsed(void)
{
    struct kvist_tool tool = {.socket_path = "/default", .timeout_us = 1};
    const char *pool = NULL;
    const char *all = NULL;
    char *good[] = {(char[]){"kvist"},
                    (char[]){"--pool"},
                    (char[]){"abc"},
                    (char[]){"--all"},
                    (char[]){"--socket=/x"},
                    (char[]){"--timeout"},
                    (char[]){"1.5"},
                    (char[]){"--json"},
                    (char[]){"operand"},
                    NULL};
    KVIST_TEST_EQUAL(parse(&tool, &pool, &all, good), -1);
    KVIST_TEST_TRUE(pool != NULL && strcmp(pool, "abc") == 0 && all != NULL);
    KVIST_TEST_TRUE(tool.json && tool.socket_given && strcmp(tool.socket_path, "/x") == 0);
    KVIST_TEST_TRUE(tool.timeout_us >= 1500000 && tool.timeout_us <= 1500001);
    char *unknown[] = {(char[]){"kvist"}, (char[]){"--frob"}, NULL};
    KVIST_TEST_EQUAL(parse(&tool, &pool, &all, unknown), KVIST_EXIT_USAGE);
    char *missing[] = {(char[]){"kvist"}, (char[]){"--pool"}, NULL};
    KVIST_TEST_EQUAL(parse(&tool, &pool, &all, missing), KVIST_EXIT_USAGE);
    char *too_much[] = {(char[]){"kvist"}, (char[]){"one"}, (char[]){"two"}, NULL};
    KVIST_TEST_EQUAL(parse(&tool, &pool, &all, too_much), KVIST_EXIT_USAGE);
    char *never[] = {(char[]){"kvist"}, (char[]){"--timeout=never"}, NULL};
    KVIST_TEST_EQUAL(parse(&tool, &pool, &all, never), KVIST_EXIT_USAGE);
}

/* --- Requests ----------------------------------------------------------------------------------
 */

/* A peer that accepts one connection, reads something, writes these bytes and closes. */
struct rude_peer {
    char directory[32];
    char path[64];
    int listen_fd;
    const void *bytes;
    size_t length;
    bool hangs; /* keeps the connection open until the other side closes */
};

static void *be_rude(void *ctx)
{
    const struct rude_peer *peer = ctx;
    uint8_t buffer[4096];
    int fd = accept(peer->listen_fd, NULL, NULL);
    ssize_t got = read(fd, buffer, sizeof(buffer));
    if (got > 0 && peer->length > 0) {
        ssize_t sent = send(fd, peer->bytes, peer->length, MSG_NOSIGNAL);
        KVIST_TEST_TRUE(sent == (ssize_t)peer->length);
    }
    while (peer->hangs && read(fd, buffer, sizeof(buffer)) > 0) {
    }
    (void)close(fd);
    return NULL;
}

static enum kvist_status ask_rude_peer(struct rude_peer *peer)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct kvist_request *request = NULL;
    struct kvist_error err = KVIST_ERROR_INIT;
    pthread_t thread;
    (void)snprintf(peer->directory, sizeof(peer->directory), "/tmp/kvist-tool-XXXXXX");
    KVIST_TEST_FATAL(mkdtemp(peer->directory) != NULL);
    (void)snprintf(peer->path, sizeof(peer->path), "%s/s", peer->directory);
    memcpy(address.sun_path, peer->path, strlen(peer->path) + 1);
    peer->listen_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    KVIST_TEST_FATAL(bind(peer->listen_fd, (struct sockaddr *)&address, sizeof(address)) == 0 &&
                     listen(peer->listen_fd, 1) == 0);
    KVIST_TEST_FATAL(pthread_create(&thread, NULL, be_rude, peer) == 0);
    enum kvist_status status = kvist_request_open(peer->path, 200000, &request, &err);
    KVIST_TEST_TRUE(request == NULL && err.text[0] != '\0');
    kvist_request_close(&request);
    (void)pthread_join(thread, NULL);
    (void)close(peer->listen_fd);
    (void)unlink(peer->path);
    (void)rmdir(peer->directory);
    return status;
}

static void a_peer_that_misbehaves_is_a_failure(void)
{
    static const uint8_t huge[] = {0xff, 0xff, 0xff, 0x7f, 1, 2};
    static const uint8_t noise[] = {4, 0, 0, 0, 0xff, 0xff, 0xff, 0xff};
    /* Envelope { id: 1, stat_reply {} }: not what was asked for. */
    static const uint8_t other[] = {6, 0, 0, 0, 0x08, 0x01, 0x92, 0x02, 0x01, 0x28};
    struct rude_peer peer = {.listen_fd = -1};
    KVIST_TEST_STATUS(ask_rude_peer(&peer), KVIST_UNAVAILABLE);
    peer.hangs = true;
    KVIST_TEST_STATUS(ask_rude_peer(&peer), KVIST_TIMED_OUT);
    peer.bytes = huge;
    peer.length = sizeof(huge);
    KVIST_TEST_STATUS(ask_rude_peer(&peer), KVIST_PROTOCOL);
    peer.bytes = noise;
    peer.length = sizeof(noise);
    KVIST_TEST_STATUS(ask_rude_peer(&peer), KVIST_PROTOCOL);
    peer.bytes = other;
    peer.length = sizeof(other);
    KVIST_TEST_STATUS(ask_rude_peer(&peer), KVIST_PROTOCOL);
}

static void no_daemon_is_told_from_no_permission(void)
{
    struct kvist_request *request = NULL;
    struct kvist_error err = KVIST_ERROR_INIT;
    struct kvist_tool tool = {.socket_path = "/nonexistent/sock", .timeout_us = 1000};
    int exit_code = -1;
    KVIST_TEST_STATUS(kvist_request_open(tool.socket_path, 1000, &request, &err),
                      KVIST_UNAVAILABLE);
    KVIST_TEST_TRUE(kvist_tool_connect(&tool, &exit_code) == NULL);
    KVIST_TEST_EQUAL(exit_code, KVIST_EXIT_UNREACHABLE);
    err = (struct kvist_error){.status = KVIST_NOT_FOUND, .origin = "kvistd", .text = "no pool"};
    KVIST_TEST_EQUAL(kvist_tool_fail(&tool, &err), KVIST_EXIT_FAILED);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"JSON has commas where they belong", json_has_commas_where_they_belong},
        {"JSON texts are escaped", json_texts_are_escaped},
        {"JSON reals are exact or null", json_reals_are_exact_or_null},
        {"sizes are read and written", sizes_are_read_and_written},
        {"options are parsed", options_are_parsed},
        {"a peer that misbehaves is a failure", a_peer_that_misbehaves_is_a_failure},
        {"no daemon is told from no permission", no_daemon_is_told_from_no_permission},
    };
    return kvist_unit_main("client tool", cases, sizeof(cases) / sizeof(cases[0]), NULL, NULL);
}
