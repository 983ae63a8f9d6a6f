#include "daemon/config_parse.h"
#include "proto/base/check.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define NAME_BYTES_MAX 64
#define NAME_FAR       4U /* edits and sections away from every setting: nothing to propose */
#define HELP_COLUMNS   96

enum config_kind { KIND_TEXT, KIND_SIZE, KIND_COUNT, KIND_MODE, KIND_CHOICE };
enum config_life { LIFE_LIVE, LIFE_RESTART };

struct config_row {
    const char *section;
    const char *name;
    enum config_kind kind;
    uint64_t min;
    uint64_t max;
    const char *fallback;
    const char *choices;
    enum config_life life;
    const char *help;
    size_t offset;
    size_t bytes;
};

static const struct config_row rows[] = {
#define KVIST_CONFIG(section, name, kind, min, max, fallback, choices, live, help)                 \
    {#section,                                                                                     \
     #name,                                                                                        \
     KIND_##kind,                                                                                  \
     min,                                                                                          \
     max,                                                                                          \
     fallback,                                                                                     \
     choices,                                                                                      \
     LIFE_##live,                                                                                  \
     help,                                                                                         \
     offsetof(struct kvist_config, section##_##name),                                              \
     sizeof(((struct kvist_config *)NULL)->section##_##name)},
#include "daemon/config.def"
#undef KVIST_CONFIG
};

#define ROW_COUNT KVIST_ARRAY_COUNT(rows)

struct parser {
    struct kvist_config *config;
    struct kvist_config_origin origin;
    char section[NAME_BYTES_MAX];
    unsigned seen_line[ROW_COUNT]; /* where a row was given; 0: not yet */
};

enum kvist_status kvist_config_refuse(struct kvist_error *err,
                                      const struct kvist_config_origin *origin,
                                      const char *format,
                                      ...)
{
    char text[KVIST_ERROR_TEXT_BYTES];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    if (origin->line == 0) {
        return kvist_error_set(err, KVIST_INVALID, 0, "config", "%s: %s", origin->file, text);
    }
    return kvist_error_set(
        err, KVIST_INVALID, 0, "config", "%s:%u: %s", origin->file, origin->line, text);
}

/* --- Values ---------------------------------------------------------------------------------- */

const char *kvist_size_format(uint64_t bytes, char text_out[32])
{
    static const char suffixes[] = {'\0', 'K', 'M', 'G', 'T'};
    size_t suffix = 0;
    while (suffix + 1 < sizeof(suffixes) && bytes != 0 && bytes % 1024 == 0) {
        bytes /= 1024;
        suffix++;
    }
    (void)snprintf(text_out, 32, "%llu%c", (unsigned long long)bytes, suffixes[suffix]);
    return text_out;
}

bool kvist_config_parse_number(const char *text, int base, bool suffixed, uint64_t *value_out)
{
    if (!isdigit((unsigned char)text[0])) {
        return false;
    }
    char *end = NULL;
    errno = 0;
    unsigned long long value = strtoull(text, &end, base);
    if (errno != 0) {
        return false;
    }
    unsigned shift = 0;
    if (suffixed && *end != '\0') {
        static const char suffixes[] = "KMGT";
        const char *suffix = strchr(suffixes, toupper((unsigned char)*end));
        if (suffix == NULL) {
            return false;
        }
        shift = 10U * (unsigned)(suffix - suffixes + 1);
        end++;
    }
    if (*end != '\0' || (value << shift) >> shift != value) {
        return false;
    }
    *value_out = value << shift;
    return true;
}

/* Position of a word in "a|b|c". */
static bool find_choice(const char *choices, const char *word, uint64_t *index_out)
{
    size_t length = strlen(word);
    uint64_t index = 0;
    for (const char *at = choices; length != 0; index++) {
        size_t span = strcspn(at, "|");
        if (span == length && strncmp(at, word, length) == 0) {
            *index_out = index;
            return true;
        }
        if (at[span] == '\0') {
            return false;
        }
        at += span + 1;
    }
    return false;
}

/* What may stand there, as the second half of a sentence. */
static void describe_range(const struct config_row *row, char *text_out, size_t bytes)
{
    char min[32];
    char max[32];
    const char *also = row->choices[0] != '\0' ? " or " : "";
    switch (row->kind) {
    case KIND_TEXT:
        (void)snprintf(text_out, bytes, "at most %llu bytes", (unsigned long long)row->max);
        if (row->min != 0) {
            (void)snprintf(text_out, bytes, "1 to %llu bytes", (unsigned long long)row->max);
        }
        return;
    case KIND_SIZE:
        (void)snprintf(text_out,
                       bytes,
                       "%s to %s (K, M, G, T are understood)%s%s",
                       kvist_size_format(row->min, min),
                       kvist_size_format(row->max, max),
                       also,
                       row->choices);
        return;
    case KIND_COUNT:
        (void)snprintf(text_out,
                       bytes,
                       "%llu to %llu%s%s",
                       (unsigned long long)row->min,
                       (unsigned long long)row->max,
                       also,
                       row->choices);
        return;
    case KIND_MODE:
        (void)snprintf(text_out,
                       bytes,
                       "octal, %04llo to %04llo",
                       (unsigned long long)row->min,
                       (unsigned long long)row->max);
        return;
    case KIND_CHOICE:
        (void)snprintf(text_out, bytes, "one of %s", row->choices);
        return;
    }
}

static bool parse_value(const struct config_row *row, const char *text, uint64_t *value_out)
{
    switch (row->kind) {
    case KIND_CHOICE:
        return find_choice(row->choices, text, value_out);
    case KIND_SIZE:
    case KIND_COUNT:
        if (row->choices[0] != '\0' && strcmp(row->choices, text) == 0) {
            *value_out = 0;
            return true;
        }
        return kvist_config_parse_number(text, 10, row->kind == KIND_SIZE, value_out) &&
               *value_out >= row->min && *value_out <= row->max;
    case KIND_MODE:
        return kvist_config_parse_number(text, 8, false, value_out) && *value_out >= row->min &&
               *value_out <= row->max;
    case KIND_TEXT:
        break;
    }
    return false;
}

static enum kvist_status set_row(struct kvist_config *config,
                                 const struct config_row *row,
                                 const char *text,
                                 const struct kvist_config_origin *origin,
                                 struct kvist_error *err)
{
    char range[160];
    describe_range(row, range, sizeof(range));
    char *field = (char *)config + row->offset;
    if (row->kind == KIND_TEXT) {
        size_t length = strlen(text);
        if (length < row->min || length > row->max) {
            return kvist_config_refuse(err,
                                       origin,
                                       "%s.%s has %zu bytes; allowed: %s",
                                       row->section,
                                       row->name,
                                       length,
                                       range);
        }
        memcpy(field, text, length + 1);
        return KVIST_OK;
    }
    uint64_t value = 0;
    if (!parse_value(row, text, &value)) {
        return kvist_config_refuse(
            err,
            origin,
            "%s.%s = \"%.40s\" cannot be; allowed: %s%s",
            row->section,
            row->name,
            text,
            range,
            strpbrk(text, "#;") != NULL ? "; a comment needs a line of its own" : "");
    }
    memcpy(field, &value, sizeof(value));
    return KVIST_OK;
}

/* --- Names ----------------------------------------------------------------------------------- */

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Edits (insert, drop, replace) that turn one word into the other. */
static size_t edit_distance(const char *from, const char *to)
{
    size_t row[NAME_BYTES_MAX + 1];
    size_t to_length = smaller(strlen(to), NAME_BYTES_MAX);
    for (size_t column = 0; column <= to_length; column++) {
        row[column] = column;
    }
    for (size_t line = 1; from[line - 1] != '\0' && line <= NAME_BYTES_MAX; line++) {
        size_t diagonal = row[0];
        row[0] = line;
        for (size_t column = 1; column <= to_length; column++) {
            size_t replaced = diagonal + (from[line - 1] != to[column - 1]);
            diagonal = row[column];
            row[column] = smaller(replaced, smaller(row[column], row[column - 1]) + 1);
        }
    }
    return row[to_length];
}

static const struct config_row *find_row(const char *section, const char *name)
{
    for (size_t index = 0; index < ROW_COUNT; index++) {
        if (strcmp(rows[index].section, section) == 0 && strcmp(rows[index].name, name) == 0) {
            return &rows[index];
        }
    }
    return NULL;
}

static enum kvist_status refuse_unknown(const char *section,
                                        const char *name,
                                        const struct kvist_config_origin *origin,
                                        struct kvist_error *err)
{
    const struct config_row *nearest = &rows[0];
    size_t least = SIZE_MAX;
    for (size_t index = 0; index < ROW_COUNT; index++) {
        size_t distance = edit_distance(name, rows[index].name) +
                          (strcmp(section, rows[index].section) != 0 ? 2U : 0U);
        if (distance < least) {
            least = distance;
            nearest = &rows[index];
        }
    }
    if (least > NAME_FAR) {
        return kvist_config_refuse(
            err, origin, "there is no setting %.40s.%.40s; see kvistd --help", section, name);
    }
    return kvist_config_refuse(err,
                               origin,
                               "there is no setting %.40s.%.40s; did you mean %s.%s?",
                               section,
                               name,
                               nearest->section,
                               nearest->name);
}

/* --- The file -------------------------------------------------------------------------------- */

static char *trim(char *text)
{
    text += strspn(text, " \t\r\n");
    size_t length = strlen(text);
    while (length > 0 && strchr(" \t\r\n", text[length - 1]) != NULL) {
        text[--length] = '\0';
    }
    return text;
}

static enum kvist_status take_section(struct parser *parser, char *text, struct kvist_error *err)
{
    char *end = strchr(text, ']');
    if (end == NULL || end[1] != '\0' || end - text > NAME_BYTES_MAX) {
        return kvist_config_refuse(
            err, &parser->origin, "\"%.40s\" is no section; write [name]", text);
    }
    *end = '\0';
    const char *name = trim(text + 1);
    bool known = strcmp(name, "tenants") == 0;
    for (size_t index = 0; index < ROW_COUNT && !known; index++) {
        known = strcmp(name, rows[index].section) == 0;
    }
    if (!known) {
        return kvist_config_refuse(
            err,
            &parser->origin,
            "there is no section [%.40s]; there are daemon, memory, nvme, limits, tenants",
            name);
    }
    (void)snprintf(parser->section, sizeof(parser->section), "%s", name);
    return KVIST_OK;
}

static enum kvist_status take_line(struct parser *parser, char *line, struct kvist_error *err)
{
    static const char mark[] = "\xef\xbb\xbf"; /* some editors begin a file with it */
    bool marked = parser->origin.line == 1 && strncmp(line, mark, sizeof(mark) - 1) == 0;
    char *text = trim(marked ? line + sizeof(mark) - 1 : line);
    if (text[0] == '\0' || text[0] == '#' || text[0] == ';') {
        return KVIST_OK;
    }
    if (text[0] == '[') {
        return take_section(parser, text, err);
    }
    char *equals = strchr(text, '=');
    if (equals == NULL) {
        return kvist_config_refuse(
            err, &parser->origin, "\"%.40s\" is no setting; write name = value", text);
    }
    *equals = '\0';
    const char *name = trim(text);
    const char *value = trim(equals + 1);
    if (parser->section[0] == '\0') {
        return kvist_config_refuse(err, &parser->origin, "%.40s stands before any [section]", name);
    }
    if (strcmp(parser->section, "tenants") == 0) {
        return kvist_config_set_tenant(parser->config, name, value, &parser->origin, err);
    }
    const struct config_row *row = find_row(parser->section, name);
    if (row == NULL) {
        return refuse_unknown(parser->section, name, &parser->origin, err);
    }
    unsigned *seen = &parser->seen_line[row - rows];
    if (*seen != 0) {
        return kvist_config_refuse(err,
                                   &parser->origin,
                                   "%s.%s was given in line %u already; remove one",
                                   row->section,
                                   row->name,
                                   *seen);
    }
    *seen = parser->origin.line;
    return set_row(parser->config, row, value, &parser->origin, err);
}

static enum kvist_status check_line(const struct kvist_config_origin *origin,
                                    const char *line,
                                    size_t length,
                                    struct kvist_error *err)
{
    if (length >= KVIST_CONFIG_LINE_BYTES) {
        return kvist_config_refuse(err, origin, "line over %d bytes", KVIST_CONFIG_LINE_BYTES - 1);
    }
    if (strlen(line) != length) {
        return kvist_config_refuse(err, origin, "line with a NUL byte: this is no text file");
    }
    if (origin->line > KVIST_CONFIG_LINES_MAX) {
        return kvist_config_refuse(err, origin, "over %d lines", KVIST_CONFIG_LINES_MAX);
    }
    return KVIST_OK;
}

static enum kvist_status
read_lines(struct kvist_config *config, FILE *file, const char *path, struct kvist_error *err)
{
    struct parser parser = {.config = config, .origin = {.file = path}};
    enum kvist_status status = KVIST_OK;
    char *line = NULL;
    size_t capacity = 0;
    ssize_t length = 0;
    while (status == KVIST_OK && (length = getline(&line, &capacity, file)) > 0) {
        parser.origin.line++;
        status = check_line(&parser.origin, line, (size_t)length, err);
        if (status == KVIST_OK) {
            status = take_line(&parser, line, err);
        }
    }
    if (status == KVIST_OK && ferror(file)) {
        status = kvist_error_set_errno(err, errno, "read", "cannot read %s", path);
    }
    free(line);
    return status;
}

static enum kvist_status
read_file(struct kvist_config *config, const char *path, bool must_exist, struct kvist_error *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && errno == ENOENT && !must_exist) {
        return KVIST_OK;
    }
    struct stat info;
    if (fd < 0 || fstat(fd, &info) != 0) {
        int error_number = errno;
        if (fd >= 0) {
            (void)close(fd);
        }
        return kvist_error_set_errno(
            err, error_number, "open", "cannot open the configuration %s", path);
    }
    if (!S_ISREG(info.st_mode) || info.st_size > KVIST_CONFIG_FILE_BYTES) {
        (void)close(fd);
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "config",
                               "the configuration %s is not a file, or over %d bytes",
                               path,
                               KVIST_CONFIG_FILE_BYTES);
    }
    FILE *file = fdopen(fd, "r");
    if (file == NULL) {
        (void)close(fd);
        return kvist_error_set(err, KVIST_NO_MEMORY, 0, "config", "no memory to read %s", path);
    }
    enum kvist_status status = read_lines(config, file, path, err);
    (void)fclose(file);
    return status;
}

/* --- The whole ------------------------------------------------------------------------------- */

static enum kvist_status override(struct kvist_config *config,
                                  const struct kvist_config_override *override,
                                  struct kvist_error *err)
{
    struct kvist_config_origin origin = {.file = override->flag};
    char line[KVIST_CONFIG_LINE_BYTES];
    int length = snprintf(line, sizeof(line), "%s", override->assignment);
    char *dot = strchr(line, '.');
    char *equals = strchr(line, '=');
    if (length < 0 || (size_t)length >= sizeof(line) || dot == NULL || equals == NULL ||
        dot > equals) {
        return kvist_config_refuse(err,
                                   &origin,
                                   "\"%.60s\" is no setting; write section.name=value",
                                   override->assignment);
    }
    *dot = '\0';
    *equals = '\0';
    const char *section = trim(line);
    const char *name = trim(dot + 1);
    if (strcmp(section, "tenants") == 0) {
        return kvist_config_set_tenant(config, name, trim(equals + 1), &origin, err);
    }
    const struct config_row *row = find_row(section, name);
    return row != NULL ? set_row(config, row, trim(equals + 1), &origin, err)
                       : refuse_unknown(section, name, &origin, err);
}

/* What no row alone can say. */
static enum kvist_status check_together(const struct kvist_config *config, struct kvist_error *err)
{
    if (config->daemon_socket[0] != '/') {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "config",
                               "daemon.socket = %s is not an absolute path",
                               config->daemon_socket);
    }
    for (size_t index = 0; index < config->limits_count; index++) {
        if (strcmp(config->limits[index].socket, config->daemon_socket) == 0) {
            return kvist_error_set(err,
                                   KVIST_INVALID,
                                   0,
                                   "config",
                                   "tenants.%s: %s is daemon.socket already: name another path",
                                   config->limits[index].tenant,
                                   config->daemon_socket);
        }
    }
    if (config->nvme_path[0] != '\0' && config->nvme_path[0] != '/') {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "config",
                               "nvme.path = %s is not an absolute path",
                               config->nvme_path);
    }
    if (config->nvme_path[0] != '\0' && config->nvme_bytes == 0) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "config",
                               "nvme.path is set and nvme.bytes is not: say how many bytes kvistd "
                               "may use there (nvme.bytes = 500G)");
    }
    if (config->nvme_path[0] == '\0' && config->nvme_bytes != 0) {
        return kvist_error_set(err,
                               KVIST_INVALID,
                               0,
                               "config",
                               "nvme.bytes is set and nvme.path is not: name the directory, or "
                               "remove nvme.bytes");
    }
    return KVIST_OK;
}

enum kvist_status kvist_config_load(const char *path,
                                    const struct kvist_config_override *overrides,
                                    size_t override_count,
                                    struct kvist_config *config_out,
                                    struct kvist_error *err)
{
    struct kvist_config *config = calloc(1, sizeof(*config));
    if (config == NULL) {
        return kvist_error_set(err, KVIST_NO_MEMORY, ENOMEM, "config", "no memory");
    }
    enum kvist_status status = KVIST_OK;
    const struct kvist_config_origin origin = {.file = "default"};
    for (size_t index = 0; index < ROW_COUNT && status == KVIST_OK; index++) {
        status = set_row(config, &rows[index], rows[index].fallback, &origin, err);
    }
    if (status == KVIST_OK) {
        status = read_file(config, path != NULL ? path : KVIST_CONFIG_PATH, path != NULL, err);
    }
    for (size_t index = 0; index < override_count && status == KVIST_OK; index++) {
        status = override(config, &overrides[index], err);
    }
    if (status == KVIST_OK) {
        status = check_together(config, err);
    }
    if (status == KVIST_OK) {
        *config_out = *config;
    }
    free(config);
    return status;
}

static const char *socket_of(const struct kvist_config *config, const char *tenant)
{
    const struct kvist_tenant_limits *limits = kvist_config_limits(config, tenant);
    return limits != NULL ? limits->socket : "";
}

/* Sockets stay as they were at start. */
static void compare_sockets(const struct kvist_config *config,
                            const struct kvist_config *fresh,
                            kvist_config_differs_fn *differs,
                            void *ctx)
{
    for (size_t index = 0; index < fresh->limits_count; index++) {
        const struct kvist_tenant_limits *at = &fresh->limits[index];
        if (strcmp(at->socket, socket_of(config, at->tenant)) != 0) {
            differs(ctx, "tenants", at->tenant);
        }
    }
    for (size_t index = 0; index < config->limits_count; index++) {
        const struct kvist_tenant_limits *at = &config->limits[index];
        if (at->socket[0] != '\0' && kvist_config_limits(fresh, at->tenant) == NULL) {
            differs(ctx, "tenants", at->tenant);
        }
    }
}

void kvist_config_reload(struct kvist_config *config,
                         const struct kvist_config *fresh,
                         kvist_config_differs_fn *differs,
                         void *ctx)
{
    for (size_t index = 0; index < ROW_COUNT; index++) {
        char *field = (char *)config + rows[index].offset;
        const char *fresh_field = (const char *)fresh + rows[index].offset;
        if (rows[index].life == LIFE_LIVE) {
            memcpy(field, fresh_field, rows[index].bytes);
        } else if (rows[index].kind == KIND_TEXT ? strcmp(field, fresh_field) != 0
                                                 : memcmp(field, fresh_field, 8) != 0) {
            differs(ctx, rows[index].section, rows[index].name);
        }
    }
    compare_sockets(config, fresh, differs, ctx);
    memcpy(config->rules, fresh->rules, sizeof(config->rules));
    config->rule_count = fresh->rule_count;
    memcpy(config->limits, fresh->limits, sizeof(config->limits));
    config->limits_count = fresh->limits_count;
}

/* --- Printing -------------------------------------------------------------------------------- */

void kvist_config_print_wrapped(FILE *file, const char *text)
{
    size_t column = 0;
    while (*text != '\0') {
        size_t span = strcspn(text, " ");
        if (column != 0 && column + 1 + span > HELP_COLUMNS) {
            (void)fputc('\n', file);
            column = 0;
        }
        (void)fputs(column == 0 ? "# " : " ", file);
        (void)fwrite(text, 1, span, file);
        column += span + 1;
        text += span;
        text += strspn(text, " ");
    }
    (void)fputc('\n', file);
}

void kvist_config_print_example(FILE *file)
{
    (void)fputs("# Configuration of kvistd: every setting, with its default.\n"
                "# Made by `kvistd --print-config`. Flags go over this file (`kvistd --help`).\n"
                "# Settings marked live are taken over by `systemctl reload kvistd` (SIGHUP).\n",
                file);
    const char *section = "";
    for (size_t index = 0; index < ROW_COUNT; index++) {
        const struct config_row *row = &rows[index];
        if (strcmp(section, row->section) != 0) {
            section = row->section;
            (void)fprintf(file, "\n[%s]\n", section);
        } else {
            (void)fputc('\n', file);
        }
        char range[160];
        describe_range(row, range, sizeof(range));
        kvist_config_print_wrapped(file, row->help);
        (void)fprintf(file,
                      "# Allowed: %s. %s.\n#%s =%s%s\n",
                      range,
                      row->life == LIFE_LIVE ? "Live" : "Needs a restart",
                      row->name,
                      row->fallback[0] != '\0' ? " " : "",
                      row->fallback);
    }
    kvist_config_print_tenants(file);
}

void kvist_config_print_help(FILE *file)
{
    for (size_t index = 0; index < ROW_COUNT; index++) {
        char range[160];
        describe_range(&rows[index], range, sizeof(range));
        (void)fprintf(file,
                      "  %s.%s = %s\n      %s\n",
                      rows[index].section,
                      rows[index].name,
                      rows[index].fallback,
                      range);
    }
}
