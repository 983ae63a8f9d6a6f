#include "client/tool/bench_daemon.h"

#include "proto/base/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define READY_US_MAX 60000000U
#define STOP_US_MAX  10000000U
#define PATH_BYTES   4096U

/* --- Finding ------------------------------------------------------------------------------- */

static bool is_program(const char *directory, const char *below, char path_out[PATH_BYTES])
{
    int length = snprintf(path_out, PATH_BYTES, "%s%s", directory, below);
    return length > 0 && length < (int)PATH_BYTES && access(path_out, X_OK) == 0;
}

static bool find_in_path(char path_out[PATH_BYTES])
{
    const char *list = getenv("PATH"); /* NOLINT(concurrency-mt-unsafe): one thread */
    while (list != NULL && *list != '\0') {
        size_t length = strcspn(list, ":");
        char directory[PATH_BYTES];
        (void)snprintf(directory, sizeof(directory), "%.*s", (int)length, list);
        if (length > 0 && length < sizeof(directory) &&
            is_program(directory, "/kvistd", path_out)) {
            return true;
        }
        list += length + (list[length] == ':');
    }
    return false;
}

bool kvist_bench_daemon_find(const char *given, char path_out[PATH_BYTES])
{
    char directory[PATH_BYTES];
    if (given != NULL) {
        return is_program(given, "", path_out);
    }
    ssize_t length = readlink("/proc/self/exe", directory, sizeof(directory) - 1);
    if (length > 0) {
        directory[length] = '\0';
        *strrchr(directory, '/') = '\0';
        if (is_program(directory, "/kvistd", path_out) ||
            is_program(directory, "/../daemon/kvistd", path_out) ||
            is_program(directory, "/../sbin/kvistd", path_out)) {
            return true;
        }
    }
    return find_in_path(path_out);
}

/* --- Starting ------------------------------------------------------------------------------ */

static int open_notify(const char *directory)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    (void)snprintf(address.sun_path, sizeof(address.sun_path), "%s/notify", directory);
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof(address)) != 0) {
        (void)close(fd);
        fd = -1;
    }
    return fd;
}

/* In the child: become kvistd, logging to a file beside its socket. */
_Noreturn static void become(const char *path,
                             const struct kvist_bench_daemon *daemon,
                             uint64_t arena_bytes,
                             pid_t parent)
{
    char file[128];
    char arena[32];
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    (void)signal(SIGPIPE, SIG_DFL);
    if (getppid() != parent) {
        _exit(127); /* it died before the line above */
    }
    (void)snprintf(file, sizeof(file), "%s/notify", daemon->directory);
    (void)setenv("NOTIFY_SOCKET", file, 1); /* NOLINT(concurrency-mt-unsafe): one thread */
    (void)snprintf(file, sizeof(file), "%s/log", daemon->directory);
    int log = open(file, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (log >= 0) {
        (void)dup2(log, STDOUT_FILENO);
        (void)dup2(log, STDERR_FILENO);
    }
    (void)snprintf(file, sizeof(file), "%s/conf", daemon->directory);
    (void)snprintf(arena, sizeof(arena), "%llu", (unsigned long long)arena_bytes);
    (void)execl(path,
                path,
                "--config",
                file,
                "--socket",
                daemon->socket_path,
                "--metrics",
                "off",
                "--log-level",
                "warn",
                "--arena",
                arena,
                (char *)NULL);
    _exit(127);
}

static enum kvist_status prepare(struct kvist_bench_daemon *daemon, struct kvist_error *err)
{
    char file[128];
    (void)snprintf(daemon->directory, sizeof(daemon->directory), "/tmp/kvist-bench-XXXXXX");
    if (mkdtemp(daemon->directory) == NULL) {
        daemon->directory[0] = '\0';
        return kvist_error_set_errno(err, errno, "mkdtemp", "cannot make a directory in /tmp");
    }
    (void)snprintf(
        daemon->socket_path, sizeof(daemon->socket_path), "%s/kvist.sock", daemon->directory);
    (void)snprintf(file, sizeof(file), "%s/conf", daemon->directory);
    int conf = open(file, O_WRONLY | O_CREAT | O_CLOEXEC, 0600); /* empty: not the host's own */
    daemon->notify_fd = open_notify(daemon->directory);
    if (conf < 0 || daemon->notify_fd < 0) {
        return kvist_error_set_errno(err, errno, "open", "cannot make files in /tmp");
    }
    (void)close(conf);
    return KVIST_OK;
}

/* The last line of the daemon's log: why it did not start. */
static void last_line(const struct kvist_bench_daemon *daemon, char text_out[200])
{
    char file[128];
    char line[200];
    (void)snprintf(file, sizeof(file), "%s/log", daemon->directory);
    (void)snprintf(text_out, 200, "it left no log");
    FILE *log = fopen(file, "re");
    while (log != NULL && fgets(line, sizeof(line), log) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        memcpy(text_out, line, sizeof(line));
    }
    if (log != NULL) {
        (void)fclose(log);
    }
}

static bool has_ended(pid_t pid)
{
    siginfo_t info = {.si_pid = 0};
    return waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid;
}

static enum kvist_status wait_ready(struct kvist_bench_daemon *daemon, struct kvist_error *err)
{
    char text[200];
    uint64_t deadline_us = kvist_clock_now_us() + READY_US_MAX;
    while (kvist_clock_now_us() < deadline_us) {
        struct pollfd ready = {.fd = daemon->notify_fd, .events = POLLIN};
        (void)poll(&ready, 1, 50);
        ssize_t length = recv(daemon->notify_fd, text, sizeof(text) - 1, 0);
        if (length > 0) {
            text[length] = '\0';
            if (strstr(text, "READY=1") != NULL) {
                return KVIST_OK;
            }
        } else if (has_ended(daemon->pid)) {
            last_line(daemon, text);
            return kvist_error_set(
                err, KVIST_SYSTEM, 0, "kvistd", "kvistd did not start: %.180s", text);
        }
    }
    return kvist_error_set(err, KVIST_TIMED_OUT, 0, "kvistd", "kvistd was not ready in a minute");
}

enum kvist_status kvist_bench_daemon_start(const char *path,
                                           uint64_t arena_bytes,
                                           struct kvist_bench_daemon *daemon_out,
                                           struct kvist_error *err)
{
    struct kvist_bench_daemon daemon = {.pid = 0, .notify_fd = -1};
    enum kvist_status status = prepare(&daemon, err);
    if (status == KVIST_OK) {
        pid_t self = getpid();
        daemon.pid = fork();
        if (daemon.pid == 0) {
            become(path, &daemon, arena_bytes, self);
        }
        status = daemon.pid > 0 ? wait_ready(&daemon, err)
                                : kvist_error_set_errno(err, errno, "fork", "cannot start kvistd");
    }
    if (status != KVIST_OK) {
        kvist_bench_daemon_stop(&daemon);
        return status;
    }
    *daemon_out = daemon;
    return KVIST_OK;
}

/* --- Stopping ------------------------------------------------------------------------------ */

static void remove_files(const struct kvist_bench_daemon *daemon)
{
    static const char *const names[] = {"conf", "log", "notify", "kvist.sock", "kvist.sock.lock"};
    char file[128];
    for (size_t index = 0; index < sizeof(names) / sizeof(names[0]); index++) {
        (void)snprintf(file, sizeof(file), "%s/%s", daemon->directory, names[index]);
        (void)unlink(file);
    }
    (void)rmdir(daemon->directory);
}

void kvist_bench_daemon_stop(struct kvist_bench_daemon *daemon)
{
    if (daemon->pid > 0) {
        uint64_t deadline_us = kvist_clock_now_us() + STOP_US_MAX;
        (void)kill(daemon->pid, SIGTERM);
        while (!has_ended(daemon->pid) && kvist_clock_now_us() < deadline_us) {
            struct timespec pause = {.tv_nsec = 10000000};
            (void)nanosleep(&pause, NULL);
        }
        (void)kill(daemon->pid, SIGKILL);
        (void)waitpid(daemon->pid, NULL, 0);
    }
    if (daemon->notify_fd >= 0) {
        (void)close(daemon->notify_fd);
    }
    if (daemon->directory[0] != '\0') {
        remove_files(daemon);
    }
    *daemon = (struct kvist_bench_daemon){.notify_fd = -1};
}
