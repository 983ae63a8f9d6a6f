#include "client/tool/replay_trace.h"

#include "proto/base/check.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define DEPTH_MAX 32U /* of values that are skipped */

/* --- Numbering ------------------------------------------------------------------------------- */

struct numbers { /* open addressing; a number of UINT32_MAX is an empty place */
    uint64_t *ids;
    uint32_t *numbers;
    uint32_t place_count; /* a power of two */
    uint32_t count;
};

static uint32_t place_of(const struct numbers *table, uint64_t id)
{
    uint32_t mask = table->place_count - 1;
    uint64_t spread = (id ^ (id >> 32)) * 0xbf58476d1ce4e5b9ULL;
    uint32_t place = (uint32_t)(spread ^ (spread >> 32)) & mask;
    while (table->numbers[place] != UINT32_MAX && table->ids[place] != id) {
        place = (place + 1) & mask;
    }
    return place;
}

static bool grow_numbers(struct numbers *table)
{
    struct numbers next = {.place_count = table->place_count == 0 ? 4096 : table->place_count * 2,
                           .count = table->count};
    next.ids = malloc(next.place_count * sizeof(next.ids[0]));
    next.numbers = malloc(next.place_count * sizeof(next.numbers[0]));
    if (next.ids == NULL || next.numbers == NULL) {
        free(next.ids);
        free(next.numbers);
        return false;
    }
    memset(next.numbers, 0xff, next.place_count * sizeof(next.numbers[0]));
    for (uint32_t old = 0; old < table->place_count; old++) {
        if (table->numbers[old] != UINT32_MAX) {
            uint32_t place = place_of(&next, table->ids[old]);
            next.ids[place] = table->ids[old];
            next.numbers[place] = table->numbers[old];
        }
    }
    free(table->ids);
    free(table->numbers);
    *table = next;
    return true;
}

static bool number_of(struct numbers *table, uint64_t id, uint32_t *number_out)
{
    if (table->count >= table->place_count / 2 && !grow_numbers(table)) {
        return false;
    }
    uint32_t place = place_of(table, id);
    if (table->numbers[place] == UINT32_MAX) {
        table->ids[place] = id;
        table->numbers[place] = table->count++;
    }
    *number_out = table->numbers[place];
    return true;
}

/* --- One line (RFC 8259, of which what is skipped is checked as far as to find its end) ------- */

struct reader {
    const char *at;
    const char *wrong; /* the first thing that was, or NULL */
    bool no_memory;
    uint32_t block_room; /* of trace->blocks */
    uint32_t end_room;
    struct numbers numbers;
    struct kvist_replay_trace trace;
};

static bool fail(struct reader *reader, const char *what)
{
    reader->wrong = reader->wrong == NULL ? what : reader->wrong;
    return false;
}

static char peek(struct reader *reader)
{
    reader->at += strspn(reader->at, " \t\r\n");
    return *reader->at;
}

static bool accept(struct reader *reader, char letter)
{
    bool there = peek(reader) == letter;
    reader->at += there;
    return there;
}

static bool read_text(struct reader *reader, const char **start_out, size_t *length_out)
{
    if (!accept(reader, '"')) {
        return fail(reader, "a name is no text");
    }
    const char *start = reader->at;
    while (*reader->at != '"') {
        reader->at += *reader->at == '\\';
        if ((unsigned char)*reader->at < 0x20) {
            return fail(reader, "a text does not end");
        }
        reader->at++;
    }
    *start_out = start;
    *length_out = (size_t)(reader->at - start);
    reader->at++;
    return true;
}

static bool skip_digits(struct reader *reader)
{
    size_t length = strspn(reader->at, "0123456789");
    reader->at += length;
    return length > 0;
}

static bool skip_number(struct reader *reader)
{
    reader->at += *reader->at == '-';
    bool leads = reader->at[0] == '0' && reader->at[1] >= '0' && reader->at[1] <= '9';
    bool good = skip_digits(reader) && !leads;
    if (good && *reader->at == '.') {
        reader->at++;
        good = skip_digits(reader);
    }
    if (good && (*reader->at == 'e' || *reader->at == 'E')) {
        reader->at++;
        reader->at += *reader->at == '+' || *reader->at == '-';
        good = skip_digits(reader);
    }
    return good;
}

static bool skip_plain(struct reader *reader)
{
    static const char *const words[] = {"true", "false", "null"};
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(words); index++) {
        if (strncmp(reader->at, words[index], strlen(words[index])) == 0) {
            reader->at += strlen(words[index]);
            return true;
        }
    }
    return skip_number(reader) || fail(reader, "a value is missing or is none of JSON's");
}

/* Any value; nested ones by counting what is open. */
static bool skip_value(struct reader *reader)
{
    char closers[DEPTH_MAX];
    uint32_t depth = 0;
    do {
        char letter = peek(reader);
        const char *start = NULL;
        size_t length = 0;
        if (depth > 0 && letter == closers[depth - 1]) {
            reader->at++;
            depth--;
        } else if (letter == '{' || letter == '[') {
            if (depth == DEPTH_MAX) {
                return fail(reader, "values are nested too deep");
            }
            closers[depth++] = letter == '{' ? '}' : ']';
            reader->at++;
        } else if (depth > 0 && (letter == ',' || letter == ':')) {
            reader->at++;
        } else if (letter == '"' ? !read_text(reader, &start, &length) : !skip_plain(reader)) {
            return false;
        }
    } while (depth > 0);
    return true;
}

static bool add(uint32_t **list, uint32_t *room, uint32_t count, uint32_t value)
{
    if (count == *room) {
        uint32_t larger = *room == 0 ? 4096 : *room * 2;
        uint32_t *grown = realloc(*list, larger * sizeof(**list));
        if (grown == NULL) {
            return false;
        }
        *list = grown;
        *room = larger;
    }
    (*list)[count] = value;
    return true;
}

static bool read_id(struct reader *reader)
{
    struct kvist_replay_trace *trace = &reader->trace;
    char *end = NULL;
    char letter = peek(reader);
    errno = 0;
    unsigned long long id = strtoull(reader->at, &end, 10);
    bool leads = letter == '0' && end > reader->at + 1;
    if (letter < '0' || letter > '9' || leads || errno != 0 || strspn(end, ".eE") > 0) {
        return fail(reader, "hash_ids has what is no unsigned integer of 64 bits");
    }
    reader->at = end;
    uint32_t number = 0;
    if (trace->access_count == KVIST_REPLAY_ACCESSES_MAX) {
        return fail(reader, "the trace is too long: 2^29 blocks of requests are the most");
    }
    if (!number_of(&reader->numbers, id, &number) ||
        !add(&trace->blocks, &reader->block_room, trace->access_count, number)) {
        reader->no_memory = true;
        return false;
    }
    trace->access_count++;
    return true;
}

static bool read_ids(struct reader *reader)
{
    if (!accept(reader, '[')) {
        return fail(reader, "hash_ids is no array");
    }
    if (accept(reader, ']')) {
        return true;
    }
    do {
        if (!read_id(reader)) {
            return false;
        }
    } while (accept(reader, ','));
    return accept(reader, ']') || fail(reader, "hash_ids does not end");
}

static bool read_line(struct reader *reader)
{
    bool found = false;
    if (!accept(reader, '{')) {
        return fail(reader, "a line is no JSON object");
    }
    do {
        const char *name = NULL;
        size_t length = 0;
        if (!read_text(reader, &name, &length)) {
            return false;
        }
        if (!accept(reader, ':')) {
            return fail(reader, "a name has no value");
        }
        bool ids = length == 8 && memcmp(name, "hash_ids", 8) == 0;
        if (ids && found) {
            return fail(reader, "hash_ids is there twice");
        }
        found = found || ids;
        if (ids ? !read_ids(reader) : !skip_value(reader)) {
            return false;
        }
    } while (accept(reader, ','));
    if (!accept(reader, '}') || peek(reader) != '\0') {
        return fail(reader, "the object does not end, or something follows it");
    }
    return found || fail(reader, "there is no hash_ids");
}

/* --- The stream ------------------------------------------------------------------------------ */

struct line {
    char *text;
    size_t room;
};

/* A line without its end, or the stream's last one; false: wrong, or no memory. The stream may be a
   device that never ends. */
static bool take_line(struct reader *reader, FILE *in, struct line *line, bool *ended_out)
{
    size_t length = 0;
    int letter = getc_unlocked(in);
    *ended_out = letter == EOF;
    for (; letter != EOF && letter != '\n'; letter = getc_unlocked(in)) {
        if (letter == '\0' || length == KVIST_REPLAY_LINE_MAX) {
            return fail(reader, letter == '\0' ? "it is no text" : "it is too long");
        }
        if (length + 1 >= line->room) {
            size_t room = line->room == 0 ? 4096 : line->room * 2;
            char *text = realloc(line->text, room);
            if (text == NULL) {
                reader->no_memory = true;
                return false;
            }
            line->text = text;
            line->room = room;
        }
        line->text[length++] = (char)letter;
    }
    if (length > 0) {
        line->text[length] = '\0';
    }
    reader->at = length > 0 ? line->text : "";
    return true;
}

static bool end_request(struct reader *reader)
{
    struct kvist_replay_trace *trace = &reader->trace;
    if (trace->request_count == KVIST_REPLAY_ACCESSES_MAX) {
        return fail(reader, "the trace is too long: 2^29 requests are the most");
    }
    reader->no_memory =
        !add(&trace->ends, &reader->end_room, trace->request_count, trace->access_count);
    trace->request_count += !reader->no_memory;
    return !reader->no_memory;
}

static enum kvist_status
read_lines(struct reader *reader, FILE *in, struct line *line, struct kvist_error *err)
{
    bool ended = false;
    for (unsigned long long number = 1; !ended; number++) {
        bool good = take_line(reader, in, line, &ended);
        if (ferror(in) != 0) {
            return kvist_error_set(err, KVIST_SYSTEM, errno, "trace", "it cannot be read");
        }
        if (good && peek(reader) == '\0') {
            continue;
        }
        good = good && read_line(reader) && end_request(reader);
        if (reader->no_memory) {
            return kvist_error_set(err, KVIST_NO_MEMORY, 0, "trace", "no memory for the trace");
        }
        if (!good) {
            return kvist_error_set(
                err, KVIST_INVALID, 0, "trace", "line %llu: %s", number, reader->wrong);
        }
    }
    return KVIST_OK;
}

enum kvist_status
kvist_replay_trace_read(FILE *in, struct kvist_replay_trace *trace_out, struct kvist_error *err)
{
    struct reader reader = {.at = NULL};
    struct line line = {.text = NULL};
    enum kvist_status status = read_lines(&reader, in, &line, err);
    free(line.text);
    reader.trace.block_count = reader.numbers.count;
    free(reader.numbers.ids);
    free(reader.numbers.numbers);
    if (status == KVIST_OK && reader.trace.access_count == 0) {
        status = kvist_error_set(err, KVIST_INVALID, 0, "trace", "no request of it has blocks");
    }
    if (status != KVIST_OK) {
        kvist_replay_trace_free(&reader.trace);
        return status;
    }
    *trace_out = reader.trace;
    return KVIST_OK;
}

void kvist_replay_trace_free(struct kvist_replay_trace *trace)
{
    free(trace->blocks);
    free(trace->ends);
    *trace = (struct kvist_replay_trace){.blocks = NULL};
}
