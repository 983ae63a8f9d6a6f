/* tier: files that are written over by the next extent of their tenant. */
#include "proto/base/fault.h"
#include "storage/extent_file.h"
#include "storage/record.h"
#include "tests/support/tier_rig.h"
#include "tests/support/unit.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MIB         (1ULL << 20)
#define CAP         (64 * MIB)
#define BLOCK_BYTES 65536U
#define NUMBERS     1500U /* more than the tier holds */
#define WRITES_MAX  20000U
#define FILES_MAX   64U

static struct kvist_rig rig;
static struct kvist_tier_pool pool;
static uint64_t written; /* writes so far: block `written % NUMBERS` has version `written` */

/* A file that was an extent, and is another. */
struct reused {
    int fd;
    uint32_t before;
    uint32_t now;   /* 0: its name is gone, and with it the file */
    uint8_t *bytes; /* what the one before held */
    size_t byte_count;
};

static void setup(void)
{
    kvist_rig_init(&rig, CAP);
    kvist_rig_start(&rig);
    pool = kvist_rig_pool(1, BLOCK_BYTES, 1);
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &pool), KVIST_OK);
    written = 0;
}

static void teardown(void)
{
    (void)kvist_fault_disarm();
    kvist_rig_fini(&rig);
}

static void write_one(void)
{
    written++;
    KVIST_TEST_STATUS(kvist_rig_write(&rig, &pool, written % NUMBERS, written, BLOCK_BYTES),
                      KVIST_OK);
}

static int directory_open(void)
{
    char path[KVIST_RIG_PATH_BYTES + 16];
    (void)snprintf(path, sizeof(path), "%s/extents", rig.path);
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    KVIST_TEST_FATAL(fd >= 0);
    return fd;
}

static void name_of(uint32_t number, char name_out[16])
{
    (void)snprintf(name_out, 16, "%08u", number);
}

/* Numbers of all files, in no order. */
static size_t list(uint32_t numbers_out[FILES_MAX])
{
    size_t count = 0;
    DIR *listing = fdopendir(directory_open());
    KVIST_TEST_FATAL(listing != NULL);
    const struct dirent *entry = NULL;
    while ((entry = readdir(listing)) != NULL) { /* NOLINT(concurrency-mt-unsafe): own DIR */
        uint32_t number = kvist_extent_file_number(entry->d_name);
        if (number != 0) {
            KVIST_TEST_FATAL(count < FILES_MAX);
            numbers_out[count++] = number;
        }
    }
    (void)closedir(listing);
    return count;
}

static uint32_t oldest(void)
{
    uint32_t numbers[FILES_MAX];
    size_t count = list(numbers);
    uint32_t least = UINT32_MAX;
    for (size_t index = 0; index < count; index++) {
        least = numbers[index] < least ? numbers[index] : least;
    }
    return least;
}

static int extent_open(uint32_t number)
{
    char name[16];
    int directory_fd = directory_open();
    name_of(number, name);
    int fd = openat(directory_fd, name, O_RDWR | O_CLOEXEC);
    (void)close(directory_fd);
    return fd;
}

/* The number that an open file has now; 0: none. */
static uint32_t number_of(int fd)
{
    struct stat held;
    struct stat state;
    uint32_t numbers[FILES_MAX];
    size_t count = list(numbers);
    int directory_fd = directory_open();
    uint32_t found = 0;
    KVIST_TEST_FATAL(fstat(fd, &held) == 0);
    for (size_t index = 0; index < count; index++) {
        char name[16];
        name_of(numbers[index], name);
        if (fstatat(directory_fd, name, &state, 0) == 0 && state.st_ino == held.st_ino) {
            found = numbers[index];
        }
    }
    (void)close(directory_fd);
    return found;
}

/* Write until the oldest extent of a full tier is gone. */
static struct reused turn_over(void)
{
    struct reused reused = {.before = oldest()};
    struct stat state;
    reused.fd = extent_open(reused.before);
    KVIST_TEST_FATAL(reused.fd >= 0 && fstat(reused.fd, &state) == 0);
    reused.byte_count = (size_t)state.st_size;
    reused.bytes = malloc(reused.byte_count);
    KVIST_TEST_FATAL(reused.bytes != NULL);
    KVIST_TEST_FATAL(pread(reused.fd, reused.bytes, reused.byte_count, 0) ==
                     (ssize_t)reused.byte_count);
    while ((reused.now = number_of(reused.fd)) == reused.before) {
        KVIST_TEST_FATAL(written < WRITES_MAX);
        write_one();
    }
    return reused;
}

static void reused_close(struct reused *reused)
{
    free(reused->bytes);
    (void)close(reused->fd);
}

/* Fill the tier; write on until a file has been used again, and hold it. */
static struct reused reuse(void)
{
    while (oldest() == UINT32_MAX || oldest() == 1) {
        KVIST_TEST_FATAL(written < WRITES_MAX);
        write_one();
    }
    for (;;) {
        struct reused reused = turn_over();
        if (reused.now != 0) {
            return reused;
        }
        reused_close(&reused);
    }
}

/* What can be read is what was written last. @return how many blocks */
static uint64_t verify(void)
{
    uint64_t visible = 0;
    for (uint64_t number = 0; number < NUMBERS; number++) {
        enum kvist_status status = kvist_rig_read(&rig, &pool, number);
        uint64_t version = 0;
        memcpy(&version, rig.memory + 8, sizeof(version));
        if (status == KVIST_OK) {
            visible++;
            KVIST_TEST_TRUE(version % NUMBERS == number && version + NUMBERS > written);
        } else {
            KVIST_TEST_TRUE(status == KVIST_NOT_FOUND || status == KVIST_CORRUPT);
        }
    }
    KVIST_TEST_TRUE(kvist_rig_du(rig.path) <= CAP);
    return visible;
}

static void a_full_tier_writes_over_its_files(void)
{
    struct reused reused = reuse();
    KVIST_TEST_TRUE(reused.now > reused.before);
    KVIST_TEST_TRUE(verify() > 400);
    for (uint32_t count = 0; count < 500; count++) {
        write_one();
    }
    KVIST_TEST_TRUE(verify() > 400);
    KVIST_TEST_EQUAL(kvist_rig_stats(&rig).corrupt_total, 0);
    KVIST_TEST_EQUAL(kvist_rig_stats(&rig).write_errors_total, 0);
    reused_close(&reused);
}

/* Files are removed instead: it could not be written over, or the index is not durable. */
static void none_is_used_again(const char *fault)
{
    kvist_fault_arm(fault, 1, true);
    while (oldest() == UINT32_MAX || oldest() == 1) {
        write_one();
    }
    for (uint32_t count = 0; count < 4; count++) {
        struct reused reused = turn_over();
        KVIST_TEST_EQUAL(reused.now, 0);
        reused_close(&reused);
    }
    KVIST_TEST_TRUE(kvist_fault_disarm() > 0);
    KVIST_TEST_TRUE(verify() > 400);
    KVIST_TEST_EQUAL(kvist_rig_stats(&rig).corrupt_total, 0);
}

static void a_file_that_cannot_be_used_again_goes(void)
{
    none_is_used_again("tier.extent.reuse");
}

static void nothing_is_written_over_before_the_index_is_durable(void)
{
    none_is_used_again("tier.index.sync");
}

/* A crash, or a power failure, after some of what makes another extent of a file. */
enum left { OLD_BYTES, OLD_NAME, OLD_HEADER, OLD_NAME_AND_BYTES };

static void left_half(enum left left)
{
    struct reused reused = reuse();
    for (uint32_t count = 0; count < 30; count++) {
        write_one();
    }
    kvist_rig_close(&rig);
    char before[16];
    char now[16];
    int directory_fd = directory_open();
    name_of(reused.before, before);
    name_of(reused.now, now);
    size_t from = left == OLD_BYTES ? KVIST_RECORD_PAGE_BYTES : 0;
    size_t count = left == OLD_HEADER ? KVIST_RECORD_PAGE_BYTES : reused.byte_count - from;
    if (left != OLD_NAME) {
        KVIST_TEST_FATAL(pwrite(reused.fd, reused.bytes + from, count, (off_t)from) ==
                         (ssize_t)count);
    }
    if (left == OLD_NAME || left == OLD_NAME_AND_BYTES) {
        KVIST_TEST_FATAL(renameat(directory_fd, now, directory_fd, before) == 0);
    }
    (void)close(directory_fd);
    reused_close(&reused);
    kvist_rig_start(&rig);
    uint64_t visible = verify();
    uint64_t corrupt = kvist_rig_stats(&rig).corrupt_total;
    KVIST_TEST_EQUAL(visible + corrupt, rig.loaded_count);
    KVIST_TEST_EQUAL(corrupt > 0, left == OLD_BYTES);
    KVIST_TEST_TRUE(visible > 400);
    write_one();
    KVIST_TEST_TRUE(verify() > 400);
}

static void old_bytes_are_no_blocks(void)
{
    left_half(OLD_BYTES);
}

static void a_new_header_under_the_old_name_goes(void)
{
    left_half(OLD_NAME);
}

static void an_old_header_under_the_new_name_goes(void)
{
    left_half(OLD_HEADER);
}

static void an_old_file_that_came_back_is_empty(void)
{
    left_half(OLD_NAME_AND_BYTES);
}

/* What a tenant's file held is never in reach of another's. */
static void no_tenant_gets_anothers_file(void)
{
    struct reused reused = reuse();
    uint32_t numbers[FILES_MAX];
    int fds[FILES_MAX];
    size_t count = list(numbers);
    uint32_t left = 0;
    for (size_t index = 0; index < count; index++) {
        fds[index] = extent_open(numbers[index]);
    }
    struct kvist_tier_pool other = kvist_rig_pool(2, BLOCK_BYTES, 1);
    (void)snprintf(other.tenant, sizeof(other.tenant), "other");
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &other), KVIST_OK);
    for (uint64_t number = 0; number < NUMBERS; number++) {
        KVIST_TEST_STATUS(kvist_rig_write(&rig, &other, number, 1, BLOCK_BYTES), KVIST_OK);
    }
    int directory_fd = directory_open();
    for (size_t index = 0; index < count; index++) {
        uint32_t number = fds[index] >= 0 ? number_of(fds[index]) : 0;
        char tenant[KVIST_TENANT_BYTES_MAX + 1];
        uint64_t file_bytes = 0;
        int fd = -1;
        if (number != 0) {
            left++;
            KVIST_TEST_FATAL(
                kvist_extent_file_open(directory_fd, false, number, tenant, &file_bytes, &fd) == 0);
            KVIST_TEST_TRUE(strcmp(tenant, pool.tenant) == 0);
            (void)close(fd);
        }
        if (fds[index] >= 0) {
            (void)close(fds[index]);
        }
    }
    (void)close(directory_fd);
    KVIST_TEST_TRUE(left > 0 && left < count);
    reused_close(&reused);
}

/* A file that waits for its tenant goes when another one needs the room, and that one's wait then. */
static void anothers_file_is_in_nobodys_way(void)
{
    struct reused reused = reuse();
    struct kvist_tier_pool other = kvist_rig_pool(2, BLOCK_BYTES, 1);
    (void)snprintf(other.tenant, sizeof(other.tenant), "other");
    KVIST_TEST_STATUS(kvist_rig_put_pool(&rig, &other), KVIST_OK);
    uint32_t used_again = 0;
    for (uint64_t round = 0; round < 4; round++) {
        uint32_t numbers[FILES_MAX];
        int fds[FILES_MAX];
        size_t count = list(numbers);
        for (size_t index = 0; index < count; index++) {
            fds[index] = extent_open(numbers[index]);
        }
        for (uint64_t number = 0; number < NUMBERS / 4; number++) {
            KVIST_TEST_STATUS(kvist_rig_write(&rig, &other, number, 1 + round, BLOCK_BYTES),
                              KVIST_OK);
        }
        for (size_t index = 0; index < count; index++) {
            uint32_t number = fds[index] >= 0 ? number_of(fds[index]) : 0;
            used_again += number != 0 && number != numbers[index];
            (void)close(fds[index]);
        }
    }
    KVIST_TEST_TRUE(used_again > 7); /* 6 when it stays until blocks have gone for it, else 10 */
    reused_close(&reused);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"a full tier writes over its files", a_full_tier_writes_over_its_files},
        {"a file that cannot be used again goes", a_file_that_cannot_be_used_again_goes},
        {"nothing is written over before the index is durable",
         nothing_is_written_over_before_the_index_is_durable},
        {"old bytes are no blocks", old_bytes_are_no_blocks},
        {"a new header under the old name goes", a_new_header_under_the_old_name_goes},
        {"an old header under the new name goes", an_old_header_under_the_new_name_goes},
        {"an old file that came back is empty", an_old_file_that_came_back_is_empty},
        {"no tenant gets another's file", no_tenant_gets_anothers_file},
        {"another's file is in nobody's way", anothers_file_is_in_nobodys_way},
    };
    return kvist_unit_main("tier_reuse", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown);
}
