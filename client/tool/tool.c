#include "client/tool/tool.h"

#include "proto/base/check.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define OPTIONS_MAX   16U
#define COMMON_COUNT  4U
#define TIMEOUT_S_MAX 86400.0

/* Values of getopt_long for the common options; a command's own begin at OWN_FIRST. */
enum { OPTION_SOCKET = 256, OPTION_TIMEOUT, OPTION_JSON, OPTION_HELP, OWN_FIRST };

/* --- Options ------------------------------------------------------------------------------- */

static void print_help(const struct kvist_tool_command *command,
                       const struct kvist_tool_option *options,
                       size_t option_count)
{
    (void)printf("kvist %s - %s\n\nusage: kvist %s [options]%s%s\n\n",
                 command->name,
                 command->text,
                 command->name,
                 command->operands[0] != '\0' ? " " : "",
                 command->operands);
    for (size_t index = 0; index < option_count; index++) {
        (void)printf("  --%-22s %s\n", options[index].name, options[index].text);
    }
    (void)puts("  --socket PATH            kvistd's socket (else KVIST_SOCKET, else "
               "/run/kvist/kvist.sock)\n"
               "  --timeout SECONDS        how long to wait for kvistd (5; for what waits for a disk 600)\n"
               "  --json                   one JSON object on stdout\n"
               "  --help                   this text\n"
               "\n"
               "Exit status: 0 done, 1 failed, 2 wrong usage, 3 kvistd cannot be reached.");
}

static int
parse_timeout(struct kvist_tool *tool, const struct kvist_tool_command *command, const char *text)
{
    char *end = NULL;
    double seconds = strtod(text, &end);
    if (end == text || *end != '\0' || !(seconds > 0) || seconds > TIMEOUT_S_MAX) {
        return kvist_tool_usage(command, "--timeout needs seconds, not \"%s\"", text);
    }
    tool->timeout_us = (uint64_t)(seconds * 1e6) + 1;
    tool->timeout_given = true;
    return -1;
}

/* Options' names stand with their value's name in help: "pool ID". */
static size_t name_length(const char *name)
{
    return strcspn(name, " ");
}

/* The common options, then the command's own; `names` holds what `table` points to. */
static void fill_table(const struct kvist_tool_option *options,
                       size_t option_count,
                       char names[OPTIONS_MAX][32],
                       struct option table[OPTIONS_MAX + COMMON_COUNT + 1])
{
    static const struct option common[COMMON_COUNT] = {
        {"socket", required_argument, NULL, OPTION_SOCKET},
        {"timeout", required_argument, NULL, OPTION_TIMEOUT},
        {"json", no_argument, NULL, OPTION_JSON},
        {"help", no_argument, NULL, OPTION_HELP},
    };
    KVIST_CHECK(option_count <= OPTIONS_MAX);
    memcpy(table, common, sizeof(common));
    for (size_t index = 0; index < option_count; index++) {
        (void)snprintf(names[index],
                       sizeof(names[index]),
                       "%.*s",
                       (int)name_length(options[index].name),
                       options[index].name);
        table[COMMON_COUNT + index].name = names[index];
        table[COMMON_COUNT + index].has_arg =
            options[index].has_value ? required_argument : no_argument;
        table[COMMON_COUNT + index].val = OWN_FIRST + (int)index;
    }
}

int kvist_tool_parse(struct kvist_tool *tool,
                     const struct kvist_tool_command *command,
                     int argc,
                     char **argv,
                     const struct kvist_tool_option *options,
                     size_t option_count,
                     int operand_max)
{
    char names[OPTIONS_MAX][32];
    struct option table[OPTIONS_MAX + COMMON_COUNT + 1] = {{.name = NULL}};
    fill_table(options, option_count, names, table);
    optind = 0; /* getopt_long starts anew */
    opterr = 0;
    int exit_code = -1;
    while (exit_code < 0) {
        /* NOLINTNEXTLINE(concurrency-mt-unsafe): one thread */
        int found = getopt_long(argc, argv, ":h", table, NULL);
        if (found == -1) {
            break;
        }
        if (found == OPTION_SOCKET) {
            tool->socket_path = optarg;
            tool->socket_given = true;
        } else if (found == OPTION_TIMEOUT) {
            exit_code = parse_timeout(tool, command, optarg != NULL ? optarg : "");
        } else if (found == OPTION_JSON) {
            tool->json = true;
        } else if (found == OPTION_HELP || found == 'h') {
            print_help(command, options, option_count);
            exit_code = KVIST_EXIT_OK;
        } else if (found == '?' || found == ':') {
            exit_code = kvist_tool_usage(
                command, found == ':' ? "%s needs a value" : "%s is no option", argv[optind - 1]);
        } else {
            *options[found - OWN_FIRST].value = optarg != NULL ? optarg : "";
        }
    }
    if (exit_code < 0 && argc - optind > operand_max) {
        return kvist_tool_usage(command, "\"%s\" is too much", argv[optind + operand_max]);
    }
    return exit_code;
}

/* --- Failures ------------------------------------------------------------------------------ */

int kvist_tool_usage(const struct kvist_tool_command *command, const char *format, ...)
{
    va_list arguments;
    (void)fputs("kvist: ", stderr);
    va_start(arguments, format);
    (void)vfprintf(stderr, format, arguments);
    va_end(arguments);
    (void)fprintf(stderr, "; see kvist %s --help\n", command->name);
    return KVIST_EXIT_USAGE;
}

int kvist_tool_fail(const struct kvist_tool *tool, const struct kvist_error *err)
{
    int exit_code = KVIST_EXIT_FAILED;
    const char *advice = "";
    if (err->status == KVIST_UNAVAILABLE) {
        exit_code = KVIST_EXIT_UNREACHABLE;
        advice = tool->socket_given
                     ? "\nIs kvistd running there? Start it, or name its socket with --socket."
                     : "\nStart it (systemctl start kvistd), or name its socket with --socket or "
                       "KVIST_SOCKET.";
    } else if (err->status == KVIST_TIMED_OUT) {
        exit_code = KVIST_EXIT_UNREACHABLE;
    } else if (err->status == KVIST_DENIED && strcmp(err->origin, "connect") == 0) {
        exit_code = KVIST_EXIT_UNREACHABLE;
        advice = "\nRun it as a user who may use the socket: root, or a member of its group.";
    }
    (void)fprintf(stderr,
                  "kvist: %s%s\n",
                  err->text[0] != '\0' ? err->text : kvist_status_text(err->status),
                  advice);
    return exit_code;
}

int kvist_tool_finish(int exit_code)
{
    if (fflush(stdout) != 0 || ferror(stdout)) {
        struct kvist_error err = KVIST_ERROR_INIT;
        (void)kvist_error_set_errno(&err, errno, "stdout", "cannot write the output");
        (void)fprintf(stderr, "kvist: %s\n", err.text);
        return KVIST_EXIT_FAILED;
    }
    return exit_code;
}

/* --- Asking -------------------------------------------------------------------------------- */

struct kvist_request *kvist_tool_connect(const struct kvist_tool *tool, int *exit_out)
{
    struct kvist_request *request = NULL;
    struct kvist_error err = KVIST_ERROR_INIT;
    if (kvist_request_open(tool->socket_path, tool->timeout_us, &request, &err) != KVIST_OK) {
        *exit_out = kvist_tool_fail(tool, &err);
    }
    return request;
}

Kvist__Wire__Envelope *kvist_tool_ask(const struct kvist_tool *tool,
                                      struct kvist_request *request,
                                      Kvist__Wire__Envelope *envelope,
                                      Kvist__Wire__Envelope__BodyCase expected,
                                      uint64_t timeout_us,
                                      int *exit_out)
{
    Kvist__Wire__Envelope *reply = NULL;
    struct kvist_error err = KVIST_ERROR_INIT;
    if (kvist_request_call(request, envelope, expected, timeout_us, &reply, &err) != KVIST_OK) {
        *exit_out = kvist_tool_fail(tool, &err);
    }
    return reply;
}

/* --- Sizes --------------------------------------------------------------------------------- */

static const char size_letters[] = "KMGTP";

const char *kvist_tool_size(uint64_t bytes, char text_out[32])
{
    double value = (double)bytes;
    size_t unit = 0;
    while (value >= 1023.95 && unit < sizeof(size_letters) - 1) {
        value /= 1024;
        unit++;
    }
    if (unit == 0) {
        (void)snprintf(text_out, 32, "%llu B", (unsigned long long)bytes);
    } else {
        (void)snprintf(text_out, 32, "%.1f %ciB", value, size_letters[unit - 1]);
    }
    return text_out;
}

bool kvist_tool_parse_size(const char *text, uint64_t *bytes_out)
{
    char *end = NULL;
    double value = strtod(text, &end);
    if (end == text || !(value > 0)) {
        return false;
    }
    if (*end != '\0') {
        const char *letter = strchr(size_letters, *end & ~0x20);
        if (letter == NULL || end[1] != '\0') {
            return false;
        }
        value = ldexp(value, 10 * (int)(letter - size_letters + 1));
    }
    if (value > 1e18 || value < 1) {
        return false;
    }
    *bytes_out = (uint64_t)value;
    return true;
}
