/*
 * main - run worlds, one a seed, and see that nothing breaks that must hold.
 *
 *   sim [--seed N] [--first N] [--seeds N] [--steps N] [--jobs N] [--kept FILE] [--verbose]
 *
 *   --seed N     one seed, with a trace
 *   --first N, --seeds N   so many, from N on
 *   --steps N    operations of a seed
 *   --jobs N     processes to share them out among
 *   --kept FILE  seeds that failed once, one a line, `#` begins a comment: these come first
 *
 * A seed that fails prints itself.
 */
#include "tests/sim/sim.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static void failed(int number)
{
    char text[160];
    int length =
        snprintf(text,
                 sizeof(text),
                 "sim: seed %llu failed in step %u (%s); see it with: sim --steps %u --seed "
                 "%llu\n",
                 (unsigned long long)kvist_sim_run.seed,
                 kvist_sim_run.step,
                 kvist_sim_run.operation,
                 kvist_sim_run.steps,
                 (unsigned long long)kvist_sim_run.seed);
    (void)!write(STDERR_FILENO, text, (size_t)length);
    (void)signal(number, SIG_DFL);
    (void)raise(number);
}

static void run_kept(const char *path)
{
    char line[256];
    FILE *file = fopen(path, "re");
    KVIST_SIM_REQUIRE(file != NULL);
    while (fgets(line, sizeof(line), file) != NULL) {
        char *end = line;
        uint64_t seed = strtoull(line, &end, 10);
        if (end != line) {
            kvist_sim_run_seed(seed, false);
        }
    }
    (void)fclose(file);
}

/* @return whether all were well */
static bool run_jobs(uint64_t first, uint64_t count, uint32_t jobs)
{
    bool well = true;
    (void)fflush(stdout);
    for (uint32_t job = 0; job < jobs; job++) {
        if (fork() == 0) {
            for (uint64_t seed = first + job; seed < first + count; seed += jobs) {
                kvist_sim_run_seed(seed, false);
            }
            exit(EXIT_SUCCESS);
        }
    }
    for (uint32_t job = 0; job < jobs; job++) {
        int status = 0;
        well = wait(&status) > 0 && status == 0 && well;
    }
    return well;
}

static void report(bool well)
{
    const struct {
        const char *what;
        const _Atomic uint64_t *count;
    } lines[] = {
        {"seeds", &kvist_sim_run.totals->seeds},
        {"commits", &kvist_sim_run.totals->commits},
        {"hits compared", &kvist_sim_run.totals->hits},
        {"evictions", &kvist_sim_run.totals->evictions},
        {"found leased and kept", &kvist_sim_run.totals->kept_leased},
        {"spills", &kvist_sim_run.totals->spills},
        {"promotions", &kvist_sim_run.totals->promotions},
        {"segments revoked", &kvist_sim_run.totals->revokes},
        {"maps replaced", &kvist_sim_run.totals->maps},
        {"clears", &kvist_sim_run.totals->clears},
        {"restarts warm", &kvist_sim_run.totals->adoptions},
        {"cold", &kvist_sim_run.totals->cold},
        {"faults", &kvist_sim_run.totals->faults},
    };
    for (size_t index = 0; index < sizeof(lines) / sizeof(lines[0]); index++) {
        (void)printf("%s %llu, ", lines[index].what, (unsigned long long)*lines[index].count);
    }
    (void)printf("%u steps each: %s\n", kvist_sim_run.steps, well ? "passed" : "FAILED");
}

int main(int count, char **arguments)
{
    struct kvist_sim_totals *totals =
        mmap(NULL, sizeof(*totals), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    KVIST_SIM_REQUIRE(totals != MAP_FAILED);
    kvist_sim_run.totals = totals;
    uint64_t first = 1;
    uint64_t seeds = 1;
    uint32_t jobs = 1;
    bool verbose = false;
    const char *kept = NULL;
    kvist_sim_run.steps = 200;
    for (int index = 1; index < count; index++) {
        const char *name = arguments[index];
        const char *value = index + 1 < count ? arguments[index + 1] : "";
        if (strcmp(name, "--verbose") == 0) {
            verbose = true;
            continue;
        }
        uint64_t number = strtoull(value, NULL, 10);
        if (strcmp(name, "--seed") == 0) {
            first = number;
            verbose = true;
        } else if (strcmp(name, "--first") == 0) {
            first = number;
        } else if (strcmp(name, "--seeds") == 0) {
            seeds = number;
        } else if (strcmp(name, "--steps") == 0) {
            kvist_sim_run.steps = (uint32_t)number;
        } else if (strcmp(name, "--jobs") == 0) {
            jobs = (uint32_t)number;
        } else if (strcmp(name, "--kept") == 0) {
            kept = value;
        } else {
            (void)fprintf(stderr,
                          "usage: sim [--seed N] [--first N] [--seeds N] [--steps N] [--jobs N] "
                          "[--kept FILE] [--verbose]\n");
            return EXIT_FAILURE;
        }
        index++;
    }
    static const int signals[] = {SIGABRT, SIGSEGV, SIGBUS, SIGALRM};
    for (size_t index = 0; index < sizeof(signals) / sizeof(signals[0]); index++) {
        (void)signal(signals[index], failed);
    }
    if (kept != NULL) {
        run_kept(kept);
    }
    if (verbose) {
        for (uint64_t seed = first; seed < first + seeds; seed++) {
            kvist_sim_run_seed(seed, true);
        }
        return EXIT_SUCCESS;
    }
    bool well = run_jobs(first, seeds, jobs == 0 ? 1 : jobs);
    report(well);
    return well ? EXIT_SUCCESS : EXIT_FAILURE;
}
