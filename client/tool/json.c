#include "client/tool/json.h"

#include "proto/base/check.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

void kvist_json_init(struct kvist_json *json, FILE *out)
{
    *json = (struct kvist_json){.out = out};
}

/* Length of the UTF-8 sequence at the start of `bytes`, 0: it is none. */
static size_t sequence_length(const unsigned char *bytes)
{
    static const struct {
        unsigned char mask;
        unsigned char lead;
        uint32_t least;
    } rows[] = {{0x80, 0x00, 0}, {0xe0, 0xc0, 0x80}, {0xf0, 0xe0, 0x800}, {0xf8, 0xf0, 0x10000}};
    for (size_t extra = 0; extra < KVIST_ARRAY_COUNT(rows); extra++) {
        if ((bytes[0] & rows[extra].mask) != rows[extra].lead) {
            continue;
        }
        uint32_t point = bytes[0] & (unsigned char)~rows[extra].mask;
        for (size_t index = 1; index <= extra; index++) {
            if ((bytes[index] & 0xc0) != 0x80) { /* the NUL at the end stops here too */
                return 0;
            }
            point = point << 6 | (bytes[index] & 0x3fU);
        }
        bool valid =
            point >= rows[extra].least && point <= 0x10ffff && (point < 0xd800 || point > 0xdfff);
        return valid ? extra + 1 : 0;
    }
    return 0;
}

static void write_text(FILE *out, const char *text)
{
    (void)fputc('"', out);
    for (const unsigned char *at = (const unsigned char *)text; *at != '\0';) {
        size_t length = sequence_length(at);
        if (length == 0) {
            (void)fputs("\\ufffd", out);
            length = 1;
        } else if (*at == '"' || *at == '\\') {
            (void)fprintf(out, "\\%c", *at);
        } else if (*at < 0x20 || *at == 0x7f) {
            (void)fprintf(out, "\\u%04x", (unsigned)*at);
        } else {
            (void)fwrite(at, 1, length, out);
        }
        at += length;
    }
    (void)fputc('"', out);
}

/* What comes before a value: comma, line, name. */
static void begin(struct kvist_json *json, const char *name)
{
    if (json->depth > 0) {
        bool *has_member = &json->has_member[json->depth - 1];
        (void)fputs(*has_member ? ",\n" : "\n", json->out);
        (void)fprintf(json->out, "%*s", (int)json->depth * 2, "");
        *has_member = true;
    }
    if (name != NULL) {
        write_text(json->out, name);
        (void)fputs(": ", json->out);
    }
}

static void open_level(struct kvist_json *json, const char *name, char opener, char closer)
{
    KVIST_CHECK(json->depth < KVIST_JSON_DEPTH_MAX);
    begin(json, name);
    (void)fputc(opener, json->out);
    json->closer[json->depth] = closer;
    json->has_member[json->depth] = false;
    json->depth++;
}

void kvist_json_object(struct kvist_json *json, const char *name)
{
    open_level(json, name, '{', '}');
}

void kvist_json_array(struct kvist_json *json, const char *name)
{
    open_level(json, name, '[', ']');
}

void kvist_json_close(struct kvist_json *json)
{
    KVIST_CHECK(json->depth > 0);
    json->depth--;
    if (json->has_member[json->depth]) {
        (void)fprintf(json->out, "\n%*s", (int)json->depth * 2, "");
    }
    (void)fputc(json->closer[json->depth], json->out);
    if (json->depth == 0) {
        (void)fputc('\n', json->out);
    }
}

void kvist_json_text(struct kvist_json *json, const char *name, const char *value)
{
    begin(json, name);
    write_text(json->out, value);
}

void kvist_json_hex(struct kvist_json *json, const char *name, const void *bytes, size_t length)
{
    const unsigned char *at = bytes;
    begin(json, name);
    (void)fputc('"', json->out);
    for (size_t index = 0; index < length; index++) {
        (void)fprintf(json->out, "%02x", at[index]);
    }
    (void)fputc('"', json->out);
}

void kvist_json_number(struct kvist_json *json, const char *name, uint64_t value)
{
    begin(json, name);
    (void)fprintf(json->out, "%" PRIu64, value);
}

void kvist_json_real(struct kvist_json *json, const char *name, double value)
{
    begin(json, name);
    if (!isfinite(value)) {
        (void)fputs("null", json->out);
        return;
    }
    /* The shortest of both that reads back equal. */
    char text[40];
    (void)snprintf(text, sizeof(text), "%.15g", value);
    if (strtod(text, NULL) < value || strtod(text, NULL) > value) {
        (void)snprintf(text, sizeof(text), "%.17g", value);
    }
    (void)fputs(text, json->out);
}

void kvist_json_bool(struct kvist_json *json, const char *name, bool value)
{
    begin(json, name);
    (void)fputs(value ? "true" : "false", json->out);
}
