/*
 * replay - run a fuzz target over its seeds and its kept corpus, without libFuzzer.
 *
 *   replay_TARGET [FILE|FOLDER ...]     the seeds, then every file
 *   replay_TARGET --write FOLDER        write the seeds into a folder, for libFuzzer to start from
 */
#include "tests/fuzz/fuzz.h"

#include <dirent.h>
#include <errno.h>
#include <sys/stat.h>

#define PATH_BYTES     4096
#define FILE_BYTES_MAX (4L << 20)

static uint64_t runs;

static void fail(const char *what)
{
    (void)fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(EXIT_FAILURE);
}

/* In memory of just that size, so that a sanitizer sees what is read beyond it. */
static void run(const void *bytes, size_t length)
{
    uint8_t *copy = malloc(length > 0 ? length : 1);
    if (copy == NULL) {
        fail("malloc");
    }
    if (length > 0) {
        memcpy(copy, bytes, length);
    }
    (void)LLVMFuzzerTestOneInput(copy, length);
    free(copy);
    runs++;
}

static void run_seed(void *ctx, const void *bytes, size_t length)
{
    (void)ctx;
    run(bytes, length);
}

static void write_seed(void *ctx, const void *bytes, size_t length)
{
    char path[PATH_BYTES];
    (void)snprintf(
        path, sizeof(path), "%s/seed-%03llu", (const char *)ctx, (unsigned long long)runs++);
    FILE *file = fopen(path, "w");
    if (file == NULL || fwrite(bytes, 1, length, file) != length || fclose(file) != 0) {
        fail(path);
    }
}

static void run_file(const char *path, size_t length)
{
    char *bytes = malloc(length + 1);
    FILE *file = fopen(path, "r");
    if (bytes == NULL || file == NULL || fread(bytes, 1, length, file) != length) {
        fail(path);
    }
    (void)fclose(file);
    (void)fprintf(stderr, "%s\n", path); /* the last one is the one that failed */
    run(bytes, length);
    free(bytes);
}

static void run_path(const char *path)
{
    struct stat info;
    if (stat(path, &info) != 0) {
        fail(path);
    }
    if (!S_ISDIR(info.st_mode)) {
        if (info.st_size > FILE_BYTES_MAX) {
            errno = EFBIG;
            fail(path);
        }
        run_file(path, (size_t)info.st_size);
        return;
    }
    struct dirent **entries = NULL;
    int count = scandir(path, &entries, NULL, alphasort);
    if (count < 0) {
        fail(path);
    }
    for (int index = 0; index < count; index++) {
        char below[PATH_BYTES];
        (void)snprintf(below, sizeof(below), "%s/%s", path, entries[index]->d_name);
        if (entries[index]->d_name[0] != '.') {
            run_path(below);
        }
        free(entries[index]);
    }
    free(entries);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--write") == 0) {
        kvist_fuzz_seeds(write_seed, argv[2]);
        return EXIT_SUCCESS;
    }
    kvist_fuzz_seeds(run_seed, NULL);
    for (int index = 1; index < argc; index++) {
        run_path(argv[index]);
    }
    (void)printf("%llu inputs\n", (unsigned long long)runs);
    return runs > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
