#include <kvist/error.h>

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *name;
    const char *text;
    enum kvist_retry retry;
} status_table[] = {
#define KVIST_STATUS_ROW(name, number, retry, text) [number] = {#name, text, KVIST_RETRY_##retry},
    KVIST_STATUS_TABLE(KVIST_STATUS_ROW)
#undef KVIST_STATUS_ROW
};

#define STATUS_COUNT (sizeof(status_table) / sizeof(status_table[0]))

const char *kvist_status_name(enum kvist_status status)
{
    return (size_t)status < STATUS_COUNT ? status_table[status].name : "UNKNOWN";
}

const char *kvist_status_text(enum kvist_status status)
{
    return (size_t)status < STATUS_COUNT ? status_table[status].text : "unknown status";
}

enum kvist_retry kvist_status_retry(enum kvist_status status)
{
    return (size_t)status < STATUS_COUNT ? status_table[status].retry : KVIST_RETRY_NEVER;
}

enum kvist_status kvist_status_from_wire(unsigned number)
{
    return number < STATUS_COUNT ? (enum kvist_status)number : KVIST_PROTOCOL;
}

enum kvist_status kvist_status_from_errno(int error_number)
{
    switch (error_number) {
    case 0:
        return KVIST_OK;
    case ENOMEM:
        return KVIST_NO_MEMORY;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
        return KVIST_NO_SPACE;
    case ENOENT:
    case ENOTDIR:
        return KVIST_NOT_FOUND;
    case EEXIST:
    case EADDRINUSE:
        return KVIST_EXISTS;
    case EAGAIN:
    case EBUSY:
    case EMFILE:
    case ENFILE:
        return KVIST_BUSY;
    case EACCES:
    case EPERM:
    case EROFS:
        return KVIST_DENIED;
    case ECONNREFUSED:
        return KVIST_UNAVAILABLE;
    case ETIMEDOUT:
        return KVIST_TIMED_OUT;
    case EPIPE:
    case ECONNRESET:
    case ENOTCONN:
        return KVIST_CLOSED;
    case EINVAL:
    case ENAMETOOLONG:
        return KVIST_INVALID;
    case ENOSYS:
    case EOPNOTSUPP:
        return KVIST_UNSUPPORTED;
    default:
        return KVIST_SYSTEM;
    }
}

enum kvist_status kvist_error_set(struct kvist_error *err,
                                  enum kvist_status status,
                                  int32_t code,
                                  const char *origin,
                                  const char *format,
                                  ...)
{
    if (err == NULL) {
        return status;
    }
    err->status = status;
    err->code = code;
    err->origin = origin;
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(err->text, sizeof(err->text), format, arguments);
    va_end(arguments);
    return status;
}

enum kvist_status kvist_error_set_errno(
    struct kvist_error *err, int error_number, const char *origin, const char *format, ...)
{
    enum kvist_status status = kvist_status_from_errno(error_number);
    if (err == NULL) {
        return status;
    }
    err->status = status;
    err->code = error_number;
    err->origin = origin;
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(err->text, sizeof(err->text), format, arguments);
    va_end(arguments);
    size_t length = strlen(err->text);
    (void)snprintf(err->text + length,
                   sizeof(err->text) - length,
                   ": %s",
                   strerrordesc_np(error_number) ? strerrordesc_np(error_number) : "unknown error");
    return status;
}
