/*
 * Fuzz target: bytes of a frame, as a message of either side.
 *
 * Input: a byte for the side, then the frame. What unpacks takes no more memory than it may, and
 * is within the limits that the other direction checks too: it can be packed, and unpacks again.
 */
#include "proto/wire/message.h"
#include "tests/fuzz/fuzz.h"

#include <fcntl.h>
#include <stdbool.h>

/* Of libc alone: a sanitizer's allocator counts elsewhere. */
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
size_t __sanitizer_get_current_allocated_bytes(void);
#define ALLOCATED_BYTES() __sanitizer_get_current_allocated_bytes()
#endif
#endif
#ifndef ALLOCATED_BYTES
#define ALLOCATED_BYTES() ((size_t)0)
#endif

static int null_fd = -1;

static void check_again(const Kvist__Wire__Envelope *envelope, bool from_client)
{
    size_t length = kvist__wire__envelope__get_packed_size(envelope);
    uint8_t *packed = malloc(length + 1);
    Kvist__Wire__Envelope *again = NULL;
    struct kvist_error err = KVIST_ERROR_INIT;
    KVIST_FUZZ_REQUIRE(packed != NULL);
    KVIST_FUZZ_REQUIRE(kvist__wire__envelope__pack(envelope, packed) == length);
    /* protobuf-c takes an unknown field of number 0 once, where its tag is longer than it must be.
     */
    if (kvist_message_unpack(packed, length, from_client, &again, &err) == KVIST_OK) {
        KVIST_FUZZ_REQUIRE(again->id == envelope->id && again->body_case == envelope->body_case);
        KVIST_FUZZ_REQUIRE(kvist__wire__envelope__get_packed_size(again) == length);
    }
    kvist_message_free(&again);
    free(packed);
}

static void check_put(const Kvist__Wire__Envelope *envelope)
{
    struct kvist_frame_writer *writer = NULL;
    struct kvist_error err = KVIST_ERROR_INIT;
    KVIST_FUZZ_REQUIRE(kvist_frame_writer_create(&writer) == KVIST_OK);
    size_t fd_count = kvist_message_fd_count(envelope);
    KVIST_FUZZ_REQUIRE(fd_count <= 1);
    enum kvist_status status = kvist_message_put(writer, envelope, &null_fd, fd_count, &err);
    KVIST_FUZZ_REQUIRE(status == KVIST_OK ||
                       (status == KVIST_INVALID &&
                        kvist__wire__envelope__get_packed_size(envelope) > KVIST_FRAME_BYTES_MAX));
    kvist_frame_writer_destroy(&writer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kvist_fuzz_input input = {data, size};
    bool from_client = (kvist_fuzz_u8(&input) & 1U) == 0;
    if (input.left == 0 || input.left > KVIST_FRAME_BYTES_MAX) {
        return 0;
    }
    if (null_fd < 0) {
        null_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
    }
    Kvist__Wire__Envelope *envelope = NULL;
    struct kvist_error err = KVIST_ERROR_INIT;
    size_t before = ALLOCATED_BYTES();
    enum kvist_status status =
        kvist_message_unpack(input.at, input.left, from_client, &envelope, &err);
    if (status != KVIST_OK) {
        KVIST_FUZZ_REQUIRE(status == KVIST_PROTOCOL && envelope == NULL && err.text[0] != '\0');
        KVIST_FUZZ_REQUIRE(ALLOCATED_BYTES() == before);
        return 0;
    }
    KVIST_FUZZ_REQUIRE(ALLOCATED_BYTES() - before <= KVIST_MESSAGE_MEMORY_MAX);
    KVIST_FUZZ_REQUIRE(kvist_message_name(envelope)[0] != '\0');
    check_again(envelope, from_client);
    if (envelope->body_case != KVIST__WIRE__ENVELOPE__BODY__NOT_SET) {
        check_put(envelope);
    }
    kvist_message_free(&envelope);
    KVIST_FUZZ_REQUIRE(ALLOCATED_BYTES() == before);
    return 0;
}

/* --- Seeds: one good message of each body, written from the descriptors ---------------------- */

struct seed {
    uint8_t bytes[1024];
    size_t length;
};

static void put_varint(struct seed *seed, uint64_t value)
{
    KVIST_FUZZ_REQUIRE(seed->length + 10 < sizeof(seed->bytes));
    for (; value > 127; value >>= 7) {
        seed->bytes[seed->length++] = (uint8_t)(value | 128U);
    }
    seed->bytes[seed->length++] = (uint8_t)value;
}

static void put_bytes(struct seed *seed, uint32_t field, const void *bytes, size_t length)
{
    put_varint(seed, (uint64_t)field << 3 | 2U);
    put_varint(seed, length);
    KVIST_FUZZ_REQUIRE(seed->length + length <= sizeof(seed->bytes));
    memcpy(seed->bytes + seed->length, bytes, length);
    seed->length += length;
}

static size_t good_length(const char *name)
{
    if (strcmp(name, "session_id") == 0) {
        return 16;
    }
    return strcmp(name, "parent_tag") == 0 ? 8 : KVIST_KEY_BYTES;
}

static uint64_t good_number(const char *name)
{
    if (strcmp(name, "slot_bytes") == 0 || strcmp(name, "map_bytes") == 0 ||
        strcmp(name, "page_bytes") == 0 || strcmp(name, "bytes") == 0) {
        return 65536;
    }
    return strcmp(name, "rank") == 0 || strcmp(name, "scope") == 0 ? 0 : 1;
}

/* NOLINTNEXTLINE(misc-no-recursion): as deep as the messages of kvist.proto are */
static void put_message(struct seed *seed, const ProtobufCMessageDescriptor *about)
{
    static const uint8_t data[KVIST_KEY_BYTES] = {1, 2, 3};
    for (unsigned index = 0; index < about->n_fields; index++) {
        const ProtobufCFieldDescriptor *field = &about->fields[index];
        struct seed below = {.length = 0};
        switch ((int)field->type) {
        case PROTOBUF_C_TYPE_MESSAGE:
            put_message(&below, field->descriptor);
            put_bytes(seed, field->id, below.bytes, below.length);
            break;
        case PROTOBUF_C_TYPE_STRING:
            put_bytes(seed, field->id, "text", 4);
            break;
        case PROTOBUF_C_TYPE_BYTES:
            put_bytes(seed, field->id, data, good_length(field->name));
            break;
        case PROTOBUF_C_TYPE_FIXED64:
        case PROTOBUF_C_TYPE_DOUBLE:
            put_varint(seed, (uint64_t)field->id << 3 | 1U);
            memcpy(seed->bytes + seed->length, data, 8);
            seed->length += 8;
            break;
        default:
            put_varint(seed, (uint64_t)field->id << 3);
            put_varint(seed, good_number(field->name));
        }
    }
}

void kvist_fuzz_seeds(kvist_fuzz_emit_fn *emit, void *ctx)
{
    const ProtobufCMessageDescriptor *envelope = &kvist__wire__envelope__descriptor;
    for (unsigned index = 0; index < envelope->n_fields; index++) {
        const ProtobufCFieldDescriptor *field = &envelope->fields[index];
        if (field->type != PROTOBUF_C_TYPE_MESSAGE) {
            continue;
        }
        struct seed body = {.length = 0};
        put_message(&body, field->descriptor);
        for (uint8_t side = 0; side < 2; side++) {
            /* Whether it is the one side's or the other's, with an id or without. */
            struct seed seed = {.bytes = {side}, .length = 1};
            put_bytes(&seed, field->id, body.bytes, body.length);
            emit(ctx, seed.bytes, seed.length);
            put_varint(&seed, 1U << 3);
            put_varint(&seed, 7);
            emit(ctx, seed.bytes, seed.length);
        }
    }
}
