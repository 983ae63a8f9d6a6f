/* machine: memory of the host and of cgroups, from trees made here; the NVMe directory. */
#include "daemon/machine.h"
#include "proto/base/check.h"
#include "tests/support/unit.h"

#include <ftw.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static char root[64];
static struct kvist_error err;

static void put(const char *name, const char *text)
{
    char path[512];
    (void)snprintf(path, sizeof(path), "%s/%s", root, name);
    for (char *slash = strchr(path + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        (void)mkdir(path, 0700);
        *slash = '/';
    }
    FILE *file = fopen(path, "w");
    KVIST_TEST_FATAL(file != NULL);
    (void)fputs(text, file);
    KVIST_TEST_FATAL(fclose(file) == 0);
}

static void setup(void)
{
    (void)snprintf(root, sizeof(root), "/tmp/kvist-machine-XXXXXX");
    KVIST_TEST_FATAL(mkdtemp(root) != NULL);
    err = (struct kvist_error)KVIST_ERROR_INIT;
}

static int remove_one(const char *path, const struct stat *info, int kind, struct FTW *walk)
{
    (void)info;
    (void)kind;
    (void)walk;
    return remove(path);
}

static void teardown(void)
{
    /* NOLINTNEXTLINE(concurrency-mt-unsafe): one thread */
    KVIST_TEST_EQUAL(nftw(root, remove_one, 8, FTW_DEPTH | FTW_PHYS), 0);
}

static void memory_is_what_host_and_cgroups_leave(void)
{
    struct kvist_machine machine;
    KVIST_TEST_STATUS(kvist_machine_read(root, &machine, &err), KVIST_NOT_FOUND);
    put("proc/meminfo", "MemTotal: 9 kB\nMemFree: 1 kB\n");
    KVIST_TEST_STATUS(kvist_machine_read(root, &machine, &err), KVIST_SYSTEM);
    put("proc/meminfo", "MemTotal:   9000000 kB\nMemAvailable:    1000000 kB\n");
    KVIST_TEST_STATUS(kvist_machine_read(root, &machine, &err), KVIST_OK);
    KVIST_TEST_EQUAL(machine.available_bytes, 1000000ULL << 10);
    KVIST_TEST_EQUAL(machine.cgroup_bytes, UINT64_MAX);
    put("proc/self/cgroup", "12:pids:/old\n0::/a/b\n");
    put("sys/fs/cgroup/a/b/memory.max", "max\n");
    KVIST_TEST_STATUS(kvist_machine_read(root, &machine, &err), KVIST_OK);
    KVIST_TEST_EQUAL(machine.cgroup_bytes, UINT64_MAX);
    put("sys/fs/cgroup/a/memory.max", "500000000\n");
    KVIST_TEST_STATUS(kvist_machine_read(root, &machine, &err), KVIST_OK);
    KVIST_TEST_EQUAL(machine.cgroup_bytes, 500000000);
    put("sys/fs/cgroup/memory.max", "400000000\n"); /* as in a container: its own root */
    KVIST_TEST_STATUS(kvist_machine_read(root, &machine, &err), KVIST_OK);
    KVIST_TEST_EQUAL(machine.cgroup_bytes, 400000000);
}

static void memory_limits_of_the_first_cgroups_count_too(void)
{
    struct kvist_machine machine;
    put("proc/meminfo", "MemAvailable:    1000000 kB\n");
    put("proc/self/cgroup", "9:cpu,cpuacct:/other\n8:memory:/a/b\n1:name=systemd:/x\n0::/\n");
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"); /* none */
    put("sys/fs/cgroup/memory/other/memory.limit_in_bytes", "1\n");
    KVIST_TEST_STATUS(kvist_machine_read(root, &machine, &err), KVIST_OK);
    KVIST_TEST_EQUAL(machine.cgroup_bytes, 9223372036854771712ULL);
    put("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "300000000\n");
    KVIST_TEST_STATUS(kvist_machine_read(root, &machine, &err), KVIST_OK);
    KVIST_TEST_EQUAL(machine.cgroup_bytes, 300000000);
    put("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "200000000\n");
    KVIST_TEST_STATUS(kvist_machine_read(root, &machine, &err), KVIST_OK);
    KVIST_TEST_EQUAL(machine.cgroup_bytes, 200000000);
    put("proc/self/cgroup", "8:pids,memory:/a/b\nnonsense\n7:hugememory:/z\n\n");
    KVIST_TEST_STATUS(kvist_machine_read(root, &machine, &err), KVIST_OK);
    KVIST_TEST_EQUAL(machine.cgroup_bytes, 200000000);
    /* In a container the group's own name is not in the mount, and its root is the group. */
    put("proc/self/cgroup", "8:memory:/docker/0123\n");
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "100000000\n");
    KVIST_TEST_STATUS(kvist_machine_read(root, &machine, &err), KVIST_OK);
    KVIST_TEST_EQUAL(machine.cgroup_bytes, 100000000);
}

static void an_arena_fits_or_is_refused(void)
{
    static struct kvist_config config;
    struct kvist_machine machine = {.available_bytes = 8ULL << 30, .cgroup_bytes = UINT64_MAX};
    config.memory_arena_bytes = 0;
    KVIST_TEST_STATUS(kvist_machine_fit_memory(&machine, &config, &err), KVIST_OK);
    KVIST_TEST_EQUAL(config.memory_arena_bytes, 2ULL << 30);
    config.memory_arena_bytes = 8ULL << 30;
    KVIST_TEST_STATUS(kvist_machine_fit_memory(&machine, &config, &err), KVIST_OK);
    config.memory_arena_bytes++;
    KVIST_TEST_STATUS(kvist_machine_fit_memory(&machine, &config, &err), KVIST_INVALID);
    KVIST_TEST_TRUE(strstr(err.text, "available memory (8192 MiB)") != NULL);
    machine.cgroup_bytes = 8ULL << 30; /* kvistd itself has to fit in as well */
    config.memory_arena_bytes = 8ULL << 30;
    KVIST_TEST_STATUS(kvist_machine_fit_memory(&machine, &config, &err), KVIST_INVALID);
    machine.cgroup_bytes = 1ULL << 30;
    KVIST_TEST_STATUS(kvist_machine_fit_memory(&machine, &config, &err), KVIST_INVALID);
    KVIST_TEST_TRUE(strstr(err.text, "memory limit of kvistd's cgroup") != NULL);
    config.memory_arena_bytes = 0;
    KVIST_TEST_STATUS(kvist_machine_fit_memory(&machine, &config, &err), KVIST_OK);
    KVIST_TEST_EQUAL(config.memory_arena_bytes, 240ULL << 20);
    const uint64_t beside = 992ULL << 20; /* 32 MiB of the GiB, and of the rest a part of 33 */
    KVIST_TEST_EQUAL(kvist_machine_arena_max(&machine), beside - beside / 33);
    config.memory_arena_bytes = beside - beside / 33;
    KVIST_TEST_STATUS(kvist_machine_fit_memory(&machine, &config, &err), KVIST_OK);
    config.memory_arena_bytes++;
    KVIST_TEST_STATUS(kvist_machine_fit_memory(&machine, &config, &err), KVIST_INVALID);
    KVIST_TEST_TRUE(strstr(err.text, "(961 MiB)") != NULL);
    machine.cgroup_bytes = 49ULL << 20; /* a quarter is below the least arena, all is not */
    config.memory_arena_bytes = 0;
    KVIST_TEST_STATUS(kvist_machine_fit_memory(&machine, &config, &err), KVIST_OK);
    KVIST_TEST_EQUAL(config.memory_arena_bytes, KVIST_ARENA_BYTES_MIN);
    machine.cgroup_bytes = 48ULL << 20;
    config.memory_arena_bytes = 0;
    KVIST_TEST_STATUS(kvist_machine_fit_memory(&machine, &config, &err), KVIST_INVALID);
    KVIST_TEST_EQUAL(config.memory_arena_bytes, 0);
}

static void a_directory_fits_or_is_refused(void)
{
    static struct kvist_config config;
    config.nvme_bytes = 64ULL << 20;
    KVIST_TEST_STATUS(kvist_machine_fit_nvme(&config, &err), KVIST_OK);
    (void)snprintf(config.nvme_path, sizeof(config.nvme_path), "%s", root);
    KVIST_TEST_STATUS(kvist_machine_fit_nvme(&config, &err), KVIST_OK);
    (void)snprintf(config.nvme_path, sizeof(config.nvme_path), "%s/new//", root);
    KVIST_TEST_STATUS(kvist_machine_fit_nvme(&config, &err), KVIST_OK);
    (void)snprintf(config.nvme_path, sizeof(config.nvme_path), "/new");
    KVIST_TEST_STATUS(kvist_machine_fit_nvme(&config, &err),
                      geteuid() == 0 ? KVIST_OK : KVIST_DENIED);
    (void)snprintf(config.nvme_path, sizeof(config.nvme_path), "%s/a/b", root);
    KVIST_TEST_STATUS(kvist_machine_fit_nvme(&config, &err), KVIST_NOT_FOUND);
    KVIST_TEST_TRUE(strstr(err.text, "create it") != NULL);
    put("file", "x");
    (void)snprintf(config.nvme_path, sizeof(config.nvme_path), "%s/file", root);
    KVIST_TEST_STATUS(kvist_machine_fit_nvme(&config, &err), KVIST_INVALID);
    (void)snprintf(config.nvme_path, sizeof(config.nvme_path), "%s", root);
    config.nvme_bytes = 1ULL << 60;
    KVIST_TEST_STATUS(kvist_machine_fit_nvme(&config, &err), KVIST_INVALID);
    KVIST_TEST_TRUE(strstr(err.text, "in all") != NULL);
}

static void huge_pages_are_offered_or_not(void)
{
    KVIST_TEST_TRUE(!kvist_machine_has_huge_pages(root));
    static const struct {
        const char *text;
        bool offered;
    } cases[] = {
        {"always within_size advise [never] deny force\n", false},
        {"always within_size advise never [deny] force\n", false},
        {"always within_size [advise] never deny force\n", true},
        {"[always] within_size advise never deny force\n", true},
        {"", false},
    };
    for (size_t index = 0; index < KVIST_ARRAY_COUNT(cases); index++) {
        put("sys/kernel/mm/transparent_hugepage/shmem_enabled", cases[index].text);
        KVIST_TEST_EQUAL(kvist_machine_has_huge_pages(root), cases[index].offered);
    }
}

static void open_files_go_up_to_what_is_allowed(void)
{
    struct rlimit limit;
    KVIST_TEST_FATAL(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    struct rlimit lower = {.rlim_cur = 32, .rlim_max = limit.rlim_max};
    KVIST_TEST_FATAL(setrlimit(RLIMIT_NOFILE, &lower) == 0);
    KVIST_TEST_EQUAL(kvist_machine_raise_files(), limit.rlim_max);
    KVIST_TEST_EQUAL(kvist_machine_raise_files(), limit.rlim_max);
    KVIST_TEST_STATUS(kvist_machine_check_files(KVIST_FILES_MIN, NULL), KVIST_OK);
    KVIST_TEST_STATUS(kvist_machine_check_files(KVIST_FILES_MIN - 1, &err), KVIST_INVALID);
    KVIST_TEST_TRUE(strstr(err.text, "LimitNOFILE") != NULL);
    KVIST_TEST_EQUAL(kvist_machine_segments_max(KVIST_FILES_MIN), 64);
    KVIST_TEST_EQUAL(kvist_machine_segments_max(1024), 448);
    KVIST_TEST_EQUAL(kvist_machine_segments_max(UINT64_MAX), UINT32_MAX);
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"memory is what host and cgroups leave", memory_is_what_host_and_cgroups_leave},
        {"memory limits of the first cgroups count too",
         memory_limits_of_the_first_cgroups_count_too},
        {"an arena fits or is refused", an_arena_fits_or_is_refused},
        {"a directory fits or is refused", a_directory_fits_or_is_refused},
        {"huge pages are offered or not", huge_pages_are_offered_or_not},
        {"open files go up to what is allowed", open_files_go_up_to_what_is_allowed},
    };
    return kvist_unit_main("machine", cases, KVIST_ARRAY_COUNT(cases), setup, teardown);
}
