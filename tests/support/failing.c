/*
 * failing - makes the n-th system or library call of a program fail; to be preloaded.
 *
 * Role        stands between a program and libc for the calls below, and counts those that come
 *             from the program's own code: what libraries call among themselves is not touched.
 *             The program needs no change, and nothing that it calls can be forgotten.
 * Use         LD_PRELOAD=libkvist_failing.so KVIST_FAILING=CALL:N[+] program
 *               CALL  a name of the table, or `any`
 *               N     which call of it fails, from 1; with + all after it, too; 0: none
 *             KVIST_FAILING_COUNT=FILE: a line `CALL COUNT` for each is written there at the end
 * Threads     any; with several the n-th is the n-th to come
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

/* Name, what it returns, its parameters, their names, how it fails. */
#define CALLS(X)                                                                                   \
    X(memfd_create, int, (const char *a, unsigned b), (a, b), EMFILE, -1)                          \
    X(ftruncate, int, (int a, off_t b), (a, b), ENOMEM, -1)                                        \
    X(fchmod, int, (int a, mode_t b), (a, b), EPERM, -1)                                           \
    X(fstat, int, (int a, struct stat *b), (a, b), EIO, -1)                                        \
    X(mmap,                                                                                        \
      void *,                                                                                      \
      (void *a, size_t b, int c, int d, int e, off_t f),                                           \
      (a, b, c, d, e, f),                                                                          \
      ENOMEM,                                                                                      \
      MAP_FAILED)                                                                                  \
    X(madvise, int, (void *a, size_t b, int c), (a, b, c), ENOMEM, -1)                             \
    X(eventfd, int, (unsigned a, int b), (a, b), EMFILE, -1)                                       \
    X(socket, int, (int a, int b, int c), (a, b, c), EMFILE, -1)                                   \
    X(bind, int, (int a, const struct sockaddr *b, socklen_t c), (a, b, c), EADDRINUSE, -1)        \
    X(listen, int, (int a, int b), (a, b), EADDRINUSE, -1)                                         \
    X(accept4, int, (int a, struct sockaddr *b, socklen_t *c, int d), (a, b, c, d), EMFILE, -1)    \
    X(getsockopt,                                                                                  \
      int,                                                                                         \
      (int a, int b, int c, void *d, socklen_t *e),                                                \
      (a, b, c, d, e),                                                                             \
      ENOPROTOOPT,                                                                                 \
      -1)                                                                                          \
    X(sendmsg, ssize_t, (int a, const struct msghdr *b, int c), (a, b, c), ENOBUFS, -1)            \
    X(recvmsg, ssize_t, (int a, struct msghdr *b, int c), (a, b, c), ECONNRESET, -1)               \
    X(read, ssize_t, (int a, void *b, size_t c), (a, b, c), EIO, -1)                               \
    X(write, ssize_t, (int a, const void *b, size_t c), (a, b, c), EIO, -1)                        \
    X(pread, ssize_t, (int a, void *b, size_t c, off_t d), (a, b, c, d), EIO, -1)                  \
    X(pwrite, ssize_t, (int a, const void *b, size_t c, off_t d), (a, b, c, d), ENOSPC, -1)        \
    X(preadv, ssize_t, (int a, const struct iovec *b, int c, off_t d), (a, b, c, d), EIO, -1)      \
    X(pwritev, ssize_t, (int a, const struct iovec *b, int c, off_t d), (a, b, c, d), ENOSPC, -1)  \
    X(fsync, int, (int a), (a), EIO, -1)                                                           \
    X(fdatasync, int, (int a), (a), EIO, -1)                                                       \
    X(fallocate, int, (int a, int b, off_t c, off_t d), (a, b, c, d), ENOSPC, -1)                  \
    X(mkdir, int, (const char *a, mode_t b), (a, b), EACCES, -1)                                   \
    X(unlink, int, (const char *a), (a), EACCES, -1)                                               \
    X(unlinkat, int, (int a, const char *b, int c), (a, b, c), EACCES, -1)                         \
    X(rename, int, (const char *a, const char *b), (a, b), EACCES, -1)                             \
    X(fstatvfs, int, (int a, struct statvfs *b), (a, b), EIO, -1)                                  \
    X(getrandom, ssize_t, (void *a, size_t b, unsigned c), (a, b, c), ENOSYS, -1)                  \
    X(epoll_create1, int, (int a), (a), EMFILE, -1)                                                \
    X(dup, int, (int a), (a), EMFILE, -1)

enum call {
#define X(name, type, parameters, arguments, number, failed) CALL_##name,
    CALLS(X)
#undef X
        CALL_malloc,
    CALL_calloc,
    CALL_realloc,
    CALL_strdup,
    CALL_open,
    CALL_openat,
    CALL_fcntl,
    CALL_pthread_create,
    CALL_COUNT
};

static const char *const names[CALL_COUNT] = {
#define X(name, type, parameters, arguments, number, failed) #name,
    CALLS(X)
#undef X
        "malloc",
    "calloc",
    "realloc",
    "strdup",
    "open",
    "openat",
    "fcntl",
    "pthread_create"};

static struct {
    uintptr_t first; /* of the program's code */
    uintptr_t end;
    bool any;
    enum call call;
    uint64_t nth;
    bool forever;
    _Atomic uint64_t passes[CALL_COUNT];
    _Atomic uint64_t all;
} failing;

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *memory, size_t bytes);

static bool fails(enum call call, const void *caller)
{
    uintptr_t at = (uintptr_t)caller;
    if (at < failing.first || at >= failing.end) {
        return false;
    }
    uint64_t pass = atomic_fetch_add(&failing.passes[call], 1) + 1;
    uint64_t all = atomic_fetch_add(&failing.all, 1) + 1;
    pass = failing.any ? all : pass;
    return failing.nth != 0 && (failing.any || failing.call == call) &&
           (pass == failing.nth || (failing.forever && pass > failing.nth));
}

#define EXPORT __attribute__((visibility("default")))

#define X(name, type, parameters, arguments, number, failed)                                       \
    EXPORT type name parameters                                                                    \
    {                                                                                              \
        static type(*real) parameters;                                                             \
        if (real == NULL) {                                                                        \
            *(void **)&real = dlsym(RTLD_NEXT, #name);                                             \
        }                                                                                          \
        if (fails(CALL_##name, __builtin_return_address(0))) {                                     \
            errno = number;                                                                        \
            return failed;                                                                         \
        }                                                                                          \
        return real arguments;                                                                     \
    }
CALLS(X)
#undef X

EXPORT void *malloc(size_t bytes)
{
    return fails(CALL_malloc, __builtin_return_address(0)) ? NULL : __libc_malloc(bytes);
}

EXPORT void *calloc(size_t count, size_t bytes)
{
    return fails(CALL_calloc, __builtin_return_address(0)) ? NULL : __libc_calloc(count, bytes);
}

EXPORT void *realloc(void *memory, size_t bytes)
{
    return fails(CALL_realloc, __builtin_return_address(0)) ? NULL : __libc_realloc(memory, bytes);
}

EXPORT char *strdup(const char *text)
{
    size_t bytes = strlen(text) + 1;
    char *copy = fails(CALL_strdup, __builtin_return_address(0)) ? NULL : __libc_malloc(bytes);
    return copy != NULL ? memcpy(copy, text, bytes) : NULL;
}

static bool makes(int flags)
{
    return (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE;
}

EXPORT int open(const char *path, int flags, ...)
{
    static int (*real)(const char *, int, ...);
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = makes(flags) ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    if (real == NULL) {
        *(void **)&real = dlsym(RTLD_NEXT, "open");
    }
    if (fails(CALL_open, __builtin_return_address(0))) {
        errno = EMFILE;
        return -1;
    }
    return real(path, flags, mode);
}

EXPORT int openat(int folder, const char *path, int flags, ...)
{
    static int (*real)(int, const char *, int, ...);
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = makes(flags) ? va_arg(arguments, mode_t) : 0;
    va_end(arguments);
    if (real == NULL) {
        *(void **)&real = dlsym(RTLD_NEXT, "openat");
    }
    if (fails(CALL_openat, __builtin_return_address(0))) {
        errno = EMFILE;
        return -1;
    }
    return real(folder, path, flags, mode);
}

EXPORT int fcntl(int fd, int command, ...)
{
    static int (*real)(int, int, ...);
    va_list arguments;
    va_start(arguments, command);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    if (real == NULL) {
        *(void **)&real = dlsym(RTLD_NEXT, "fcntl");
    }
    if (fails(CALL_fcntl, __builtin_return_address(0))) {
        errno = EMFILE;
        return -1;
    }
    return real(fd, command, argument);
}

EXPORT int pthread_create(pthread_t *thread,
                          const pthread_attr_t *attributes,
                          void *(*run)(void *),
                          void *argument)
{
    static int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    if (real == NULL) {
        *(void **)&real = dlsym(RTLD_NEXT, "pthread_create");
    }
    return fails(CALL_pthread_create, __builtin_return_address(0))
               ? EAGAIN
               : real(thread, attributes, run, argument);
}

/* --- What is wanted -------------------------------------------------------------------------- */

static int note_program(struct dl_phdr_info *info, size_t bytes, void *ctx)
{
    (void)bytes;
    (void)ctx;
    for (int index = 0; index < info->dlpi_phnum; index++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[index];
        if (part->p_type == PT_LOAD && (part->p_flags & PF_X) != 0) {
            failing.first = info->dlpi_addr + part->p_vaddr;
            failing.end = failing.first + part->p_memsz;
        }
    }
    return 1; /* the first one is the program */
}

static void refuse(const char *text)
{
    (void)fprintf(stderr, "failing: KVIST_FAILING=%s is not CALL:N[+]\n", text);
    _exit(125);
}

__attribute__((constructor)) static void begin(void)
{
    const char *text = getenv("KVIST_FAILING");
    const char *colon = text != NULL ? strchr(text, ':') : NULL;
    if (text == NULL) {
        return;
    }
    if (colon == NULL) {
        refuse(text);
    }
    size_t length = (size_t)(colon - text);
    char *end = NULL;
    failing.any = length == 3 && memcmp(text, "any", 3) == 0;
    failing.call = CALL_COUNT;
    for (int call = 0; call < CALL_COUNT; call++) {
        if (strlen(names[call]) == length && memcmp(names[call], text, length) == 0) {
            failing.call = (enum call)call;
        }
    }
    failing.nth = strtoull(colon + 1, &end, 10);
    failing.forever = *end == '+';
    if (end == colon + 1 || (!failing.any && failing.call == CALL_COUNT)) {
        refuse(text);
    }
    (void)dl_iterate_phdr(note_program, NULL);
}

__attribute__((destructor)) static void end(void)
{
    const char *path = getenv("KVIST_FAILING_COUNT");
    FILE *file = path != NULL ? fopen(path, "we") : NULL;
    if (file == NULL) {
        return;
    }
    for (int call = 0; call < CALL_COUNT; call++) {
        (void)fprintf(file, "%s %llu\n", names[call], (unsigned long long)failing.passes[call]);
    }
    (void)fclose(file);
}
