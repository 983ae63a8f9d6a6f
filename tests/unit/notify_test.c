/* A manager that does not read: nothing waits for it, all comes in order, and nothing grows. */
#include "daemon/fdstore.h"
#include "daemon/notify.h"
#include "proto/base/check.h"
#include "tests/support/unit.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static struct {
    int manager;
    struct kvist_notify notify;
    struct kvist_fdstore fdstore;
} rig;

static size_t open_files(void)
{
    DIR *folder = opendir("/proc/self/fd");
    size_t count = 0;
    while (folder != NULL && readdir(folder) != NULL) {
        count++;
    }
    KVIST_TEST_FATAL(folder != NULL && closedir(folder) == 0);
    return count;
}

static void setup(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    (void)snprintf(
        address.sun_path + 1, sizeof(address.sun_path) - 1, "kvist-notify-%d", (int)getpid());
    size_t length = 1 + strlen(address.sun_path + 1);
    rig.manager = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    KVIST_TEST_FATAL(bind(rig.manager,
                          (struct sockaddr *)&address,
                          (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length)) == 0);
    address.sun_path[0] = '@';
    (void)setenv("NOTIFY_SOCKET", address.sun_path, 1);
    (void)setenv("FDSTORE", "1024", 1);
    kvist_notify_init(&rig.notify);
    kvist_fdstore_init(&rig.fdstore, &rig.notify);
    KVIST_TEST_FATAL(rig.fdstore.max == 1024);
}

static void teardown(void)
{
    kvist_fdstore_fini(&rig.fdstore);
    kvist_notify_fini(&rig.notify);
    (void)close(rig.manager);
}

/* One message, "" when there is none. @return the fd that came with it, or -1 */
static int hear(char text_out[KVIST_NOTIFY_TEXT_BYTES])
{
    char control[CMSG_SPACE(sizeof(int))];
    struct iovec words = {.iov_base = text_out, .iov_len = KVIST_NOTIFY_TEXT_BYTES - 1};
    struct msghdr message = {.msg_iov = &words,
                             .msg_iovlen = 1,
                             .msg_control = control,
                             .msg_controllen = sizeof(control)};
    ssize_t length = recvmsg(rig.manager, &message, MSG_CMSG_CLOEXEC);
    text_out[length > 0 ? length : 0] = '\0';
    int fd = -1;
    const struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (length > 0 && header != NULL && header->cmsg_type == SCM_RIGHTS) {
        memcpy(&fd, CMSG_DATA(header), sizeof(fd));
    }
    return fd;
}

/* Hear all, and what comes of it. @return how many messages there were */
static size_t hear_all(char (*texts)[KVIST_NOTIFY_TEXT_BYTES], size_t max)
{
    size_t count = 0;
    for (;;) {
        char text[KVIST_NOTIFY_TEXT_BYTES];
        int fd = hear(text);
        if (fd >= 0) {
            (void)close(fd);
        }
        if (text[0] == '\0' && rig.notify.waiting == 0) {
            return count;
        }
        if (text[0] == '\0') {
            kvist_notify_turn(&rig.notify);
            continue;
        }
        if (count < max) {
            memcpy(texts[count], text, sizeof(text));
        }
        count++;
    }
}

static void fill_manager(void)
{
    while (kvist_notify_alive(&rig.notify)) {
    }
    KVIST_TEST_EQUAL(rig.notify.waiting, 0);
}

static void all_comes_in_order(void)
{
    fill_manager();
    enum { COUNT = 2000 };
    for (unsigned index = 0; index < COUNT; index++) {
        char text[32];
        (void)snprintf(text, sizeof(text), "X_N=%u", index);
        KVIST_TEST_STATUS(kvist_notify_send(&rig.notify, text, -1), KVIST_OK);
    }
    KVIST_TEST_EQUAL(rig.notify.waiting, COUNT);
    unsigned next = 0;
    while (next < COUNT) {
        char text[KVIST_NOTIFY_TEXT_BYTES];
        KVIST_TEST_EQUAL(hear(text), -1);
        if (text[0] == '\0') {
            kvist_notify_turn(&rig.notify);
        } else if (strcmp(text, "WATCHDOG=1") != 0) {
            KVIST_TEST_EQUAL(strtoul(text + 4, NULL, 10), next);
            next++;
        }
    }
    KVIST_TEST_EQUAL(rig.notify.waiting, 0);
    KVIST_TEST_EQUAL(rig.notify.dropped_total, 0);
}

static void words_are_bounded(void)
{
    fill_manager();
    for (unsigned index = 0; index < 1000; index++) {
        kvist_notify_status(&rig.notify, "one after another");
    }
    KVIST_TEST_EQUAL(rig.notify.waiting, 1);
    for (unsigned index = 0; index < 1000; index++) {
        kvist_notify_reloading(&rig.notify);
        kvist_notify_ready(&rig.notify, "again");
    }
    KVIST_TEST_EQUAL(rig.notify.waiting, KVIST_NOTIFY_WORDS_MAX);
    KVIST_TEST_EQUAL(rig.notify.dropped_total, 2001 - KVIST_NOTIFY_WORDS_MAX);
    KVIST_TEST_STATUS(kvist_notify_send(&rig.notify, "X_MORE=1", -1), KVIST_OK);
    while (kvist_notify_send(&rig.notify, "X_MORE=1", -1) == KVIST_OK) {
        KVIST_TEST_FATAL(rig.notify.waiting <= KVIST_NOTIFY_WAITING_MAX);
    }
    KVIST_TEST_EQUAL(rig.notify.waiting, KVIST_NOTIFY_WAITING_MAX);
    (void)hear_all(NULL, 0);
}

static void fds_wait_as_duplicates(void)
{
    size_t before = open_files();
    fill_manager();
    int fd = memfd_create("x", MFD_CLOEXEC);
    KVIST_TEST_EQUAL(write(fd, "kept", 4), 4);
    KVIST_TEST_STATUS(kvist_fdstore_keep(&rig.fdstore, "s1", fd), KVIST_OK);
    KVIST_TEST_STATUS(kvist_fdstore_keep(&rig.fdstore, "s2", fd), KVIST_OK);
    KVIST_TEST_EQUAL(rig.fdstore.count, 2);
    KVIST_TEST_EQUAL(close(fd), 0);
    kvist_fdstore_forget(&rig.fdstore, "s1");
    KVIST_TEST_EQUAL(rig.fdstore.count, 1);
    char text[KVIST_NOTIFY_TEXT_BYTES];
    do {
        kvist_notify_turn(&rig.notify);
        fd = hear(text);
    } while (fd < 0);
    KVIST_TEST_TRUE(strcmp(text, "FDSTORE=1\nFDNAME=s2\nFDPOLL=0") == 0);
    char bytes[8] = "";
    KVIST_TEST_EQUAL(pread(fd, bytes, sizeof(bytes), 0), 4);
    KVIST_TEST_TRUE(strcmp(bytes, "kept") == 0);
    KVIST_TEST_EQUAL(close(fd), 0);
    KVIST_TEST_EQUAL(open_files(), before);
    kvist_fdstore_forget(&rig.fdstore, "s2");
    (void)hear(text);
    KVIST_TEST_TRUE(strcmp(text, "FDSTOREREMOVE=1\nFDNAME=s2") == 0);
}

static void what_comes_and_goes_does_not_pile_up(void)
{
    size_t before = open_files();
    fill_manager();
    for (unsigned index = 0; index < 100000; index++) {
        char name[16];
        (void)snprintf(name, sizeof(name), "s%x", index);
        KVIST_TEST_STATUS(kvist_fdstore_keep(&rig.fdstore, name, rig.manager), KVIST_OK);
        kvist_fdstore_forget(&rig.fdstore, name);
    }
    KVIST_TEST_EQUAL(rig.notify.waiting, 0);
    KVIST_TEST_EQUAL(rig.fdstore.count, 0);
    KVIST_TEST_EQUAL(open_files(), before);
    /* A name that is stored, forgotten and stored again: the manager hears all three. */
    KVIST_TEST_STATUS(kvist_notify_send(&rig.notify, "FDSTOREREMOVE=1\nFDNAME=r0", -1), KVIST_OK);
    KVIST_TEST_STATUS(kvist_fdstore_keep(&rig.fdstore, "r0", 1), KVIST_OK);
    KVIST_TEST_EQUAL(rig.notify.waiting, 2);
    (void)hear_all(NULL, 0);
}

static void a_manager_that_is_gone_takes_nothing(void)
{
    KVIST_TEST_EQUAL(close(rig.manager), 0);
    rig.manager = memfd_create("none", MFD_CLOEXEC);
    KVIST_TEST_STATUS(kvist_fdstore_keep(&rig.fdstore, "s1", rig.manager), KVIST_NO_SPACE);
    KVIST_TEST_TRUE(!kvist_notify_alive(&rig.notify));
    kvist_notify_status(&rig.notify, "unheard");
    KVIST_TEST_EQUAL(rig.notify.waiting, 0);
    KVIST_TEST_EQUAL(rig.notify.dropped_total, 2);
}

static void nobody_to_tell(void)
{
    static const char *const addresses[] = {"", "x", "relative", "vsock:2:1"};
    for (size_t index = 0; index <= KVIST_ARRAY_COUNT(addresses); index++) {
        struct kvist_notify notify;
        if (index == KVIST_ARRAY_COUNT(addresses)) {
            (void)unsetenv("NOTIFY_SOCKET");
        } else {
            (void)setenv("NOTIFY_SOCKET", addresses[index], 1);
        }
        kvist_notify_init(&notify);
        KVIST_TEST_TRUE(!kvist_notify_has_manager(&notify));
        kvist_notify_ready(&notify, "x");
        KVIST_TEST_TRUE(kvist_notify_alive(&notify));
        KVIST_TEST_EQUAL(notify.dropped_total + notify.waiting, 0);
        kvist_notify_fini(&notify);
    }
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"all comes in order", all_comes_in_order},
        {"words are bounded", words_are_bounded},
        {"fds wait as duplicates", fds_wait_as_duplicates},
        {"what comes and goes does not pile up", what_comes_and_goes_does_not_pile_up},
        {"a manager that is gone takes nothing", a_manager_that_is_gone_takes_nothing},
        {"nobody to tell", nobody_to_tell},
    };
    return kvist_unit_main("notify", cases, KVIST_ARRAY_COUNT(cases), setup, teardown);
}
