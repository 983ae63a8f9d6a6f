/*
 * json - writes one JSON document to a stream.
 *
 * Role        commas, quotes and escapes; the caller opens and closes what it opens. Numbers are
 *             exact; what JSON cannot say (infinities) becomes null; bytes that are no UTF-8 become
 *             U+FFFD.
 * Limits      KVIST_JSON_DEPTH_MAX levels; deeper ones are a programming error and end the process
 * Source      RFC 8259
 */
#ifndef KVIST_TOOL_JSON_H
#define KVIST_TOOL_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define KVIST_JSON_DEPTH_MAX 16U

struct kvist_json {
    FILE *out;
    unsigned depth;
    bool has_member[KVIST_JSON_DEPTH_MAX];
    char closer[KVIST_JSON_DEPTH_MAX];
};

void kvist_json_init(struct kvist_json *json, FILE *out);

/* In an object every value has a name; in an array, and at the top, name is NULL. */
void kvist_json_object(struct kvist_json *json, const char *name);
void kvist_json_array(struct kvist_json *json, const char *name);
/** Close the innermost object or array; a newline follows the last one. */
void kvist_json_close(struct kvist_json *json);

void kvist_json_text(struct kvist_json *json, const char *name, const char *value);
void kvist_json_hex(struct kvist_json *json, const char *name, const void *bytes, size_t length);
void kvist_json_number(struct kvist_json *json, const char *name, uint64_t value);
void kvist_json_real(struct kvist_json *json, const char *name, double value);
void kvist_json_bool(struct kvist_json *json, const char *name, bool value);

#endif
