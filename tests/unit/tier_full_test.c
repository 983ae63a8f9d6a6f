/*
 * tier on a file system of its own that is full: misses and a reason, then all well again.
 *
 * The file system is a tmpfs in a mount namespace of this process.
 */
#include "proto/base/clock.h"
#include "storage/tier.h"
#include "tests/support/tier_rig.h"
#include "tests/support/unit.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define MIB (1ULL << 20)

static struct kvist_rig rig;
static char mount_path[] = "full-XXXXXX";
static char tier_path[64];
static char filler_path[64];

static void setup(void)
{
    kvist_rig_init(&rig, 1024 * MIB); /* far more than there is */
    KVIST_TEST_FATAL(mount("tmpfs", mount_path, "tmpfs", 0, "size=160m") == 0);
    (void)snprintf(tier_path, sizeof(tier_path), "%s/tier", mount_path);
    (void)snprintf(filler_path, sizeof(filler_path), "%s/filler", mount_path);
    rig.options.path = tier_path;
    rig.options.extent_bytes = 4 * MIB;
}

static void teardown(void)
{
    kvist_rig_fini(&rig);
    KVIST_TEST_EQUAL(umount2(mount_path, MNT_DETACH), 0);
}

static uint64_t room_bytes(void)
{
    struct statvfs room;
    KVIST_TEST_FATAL(statvfs(mount_path, &room) == 0);
    return room.f_bavail * room.f_frsize;
}

/* Someone else's file takes all the space, but for so many bytes. */
static void fill(uint64_t spare_bytes)
{
    int fd = open(filler_path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    KVIST_TEST_FATAL(fd >= 0);
    KVIST_TEST_FATAL(posix_fallocate(fd, 0, (off_t)(room_bytes() - spare_bytes)) == 0);
    (void)close(fd);
}

static uint64_t write_some(const struct kvist_tier_pool *pool, uint64_t first, uint64_t count)
{
    uint64_t stored = 0;
    for (uint64_t number = first; number < first + count; number++) {
        stored += kvist_rig_write(&rig, pool, number, 1, 65536) == KVIST_OK ? 1 : 0;
    }
    return stored;
}

static uint64_t read_some(const struct kvist_tier_pool *pool, uint64_t first, uint64_t count)
{
    uint64_t found = 0;
    for (uint64_t number = first; number < first + count; number++) {
        enum kvist_status status = kvist_rig_read(&rig, pool, number);
        KVIST_TEST_TRUE(status == KVIST_OK || status == KVIST_NOT_FOUND);
        found += status == KVIST_OK ? 1 : 0;
    }
    return found;
}

static void a_cap_above_the_disk_is_no_crash(void)
{
    struct kvist_tier_pool pool = kvist_rig_pool(1, 65536, 1);
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    uint64_t stored = write_some(&pool, 0, 2000);
    KVIST_TEST_TRUE(stored > 1000 && stored < 2000);
    KVIST_TEST_TRUE(strstr(kvist_rig_stats(&rig).degraded, "No space left") != NULL);
    KVIST_TEST_TRUE(kvist_rig_stats(&rig).write_errors_total >= 2000 - stored);
    KVIST_TEST_EQUAL(read_some(&pool, 0, 2000), stored);
    kvist_rig_close(&rig);
    kvist_rig_start(&rig);
    KVIST_TEST_EQUAL(rig.loaded_count, stored);
}

/* The disk is so full that the index cannot write its log. */
static void a_disk_that_fills_up_and_empties_again(void)
{
    struct kvist_tier_pool pool = kvist_rig_pool(1, 65536, 1);
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    KVIST_TEST_EQUAL(write_some(&pool, 0, 70), 70);
    fill(0);
    uint64_t stored = write_some(&pool, 100, 300);
    KVIST_TEST_TRUE(stored < 200);
    KVIST_TEST_TRUE(kvist_rig_stats(&rig).degraded[0] != '\0');
    KVIST_TEST_EQUAL(read_some(&pool, 0, 70), 70);
    pool.generation = 2;
    (void)kvist_rig_put_pool(&rig, &pool); /* may or may not be durable now */
    kvist_rig_turn_for(&rig, 1100000);
    (void)write_some(&pool, 500, 10);
    KVIST_TEST_EQUAL(unlink(filler_path), 0);
    kvist_rig_turn_for(&rig, 1100000);
    KVIST_TEST_EQUAL(write_some(&pool, 1000, 100), 100);
    KVIST_TEST_EQUAL(read_some(&pool, 1000, 100), 100);
    CU_ASSERT_STRING_EQUAL(kvist_rig_stats(&rig).degraded, "");
    kvist_rig_close(&rig);
    kvist_rig_start(&rig);
    KVIST_TEST_EQUAL(rig.last_pool.generation, 2);
    KVIST_TEST_TRUE(rig.loaded_count >= 100 && rig.loaded_count <= 110);
}

/* No block is taken any more; a clear is, at once and durably, and gives the space back. */
static void a_clear_needs_little_room(void)
{
    struct kvist_tier_pool pool = kvist_rig_pool(1, 65536, 1);
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    KVIST_TEST_EQUAL(write_some(&pool, 0, 300), 300);
    fill(4 * MIB);
    KVIST_TEST_STATUS(kvist_rig_write(&rig, &pool, 1000, 1, 65536), KVIST_NO_SPACE);
    pool.generation = 2;
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    for (unsigned round = 0; room_bytes() < 16 * MIB && round < 100; round++) {
        kvist_rig_turn_for(&rig, 100000);
    }
    KVIST_TEST_TRUE(room_bytes() >= 16 * MIB);
    KVIST_TEST_EQUAL(read_some(&pool, 0, 300), 0);
    KVIST_TEST_EQUAL(unlink(filler_path), 0);
    KVIST_TEST_EQUAL(write_some(&pool, 2000, 1), 1);
    kvist_rig_close(&rig);
    kvist_rig_start(&rig);
    KVIST_TEST_EQUAL(rig.last_pool.generation, 2);
    KVIST_TEST_EQUAL(rig.loaded_count, 1);
}

static void a_full_disk_at_start_says_so(void)
{
    struct kvist_tier_pool pool = kvist_rig_pool(1, 65536, 1);
    kvist_rig_start(&rig);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    KVIST_TEST_EQUAL(write_some(&pool, 0, 70), 70);
    kvist_rig_close(&rig);
    fill(0);
    KVIST_TEST_STATUS(kvist_rig_open(&rig), KVIST_UNAVAILABLE);
    KVIST_TEST_TRUE(rig.tier == NULL && strstr(rig.err.text, "No space left") != NULL);
    KVIST_TEST_EQUAL(unlink(filler_path), 0);
    kvist_rig_start(&rig);
    KVIST_TEST_EQUAL(rig.loaded_count, 70);
    KVIST_TEST_EQUAL(read_some(&pool, 0, 70), 70);
}

/* A mount namespace, in a user namespace where this user may not have one. */
static bool namespace_enter(void)
{
    if (unshare(CLONE_NEWNS) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) {
        return false;
    }
    return mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0;
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"a cap above the disk is no crash", a_cap_above_the_disk_is_no_crash},
        {"a disk that fills up and empties again", a_disk_that_fills_up_and_empties_again},
        {"a clear needs little room", a_clear_needs_little_room},
        {"a full disk at start says so", a_full_disk_at_start_says_so},
    };
    if (!namespace_enter()) {
        (void)printf("skipped: no mount namespace here (%s)\n", strerror(errno));
        return 77;
    }
    if (mkdtemp(mount_path) == NULL) {
        return EXIT_FAILURE;
    }
    int result =
        kvist_unit_main("tier_full", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown);
    (void)rmdir(mount_path);
    return result;
}
