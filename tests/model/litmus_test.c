/* litmus: the machine of machine.h gives every outcome of the classic tests that C11 allows, and no
 * other. Names and verdicts as in the literature (Batty et al. 2011, Lahav et al. 2017). */
#include "tests/model/machine.h"
#include "tests/support/unit.h"

#include <stdatomic.h>

static struct {
    _Atomic uint32_t x;
    _Atomic uint32_t y;
    _Atomic uint32_t z;
} cell;

static enum memory_order load_order;
static enum memory_order store_order;
static enum memory_order fence_order; /* relaxed: no fence */
static uint64_t bytes;                /* data, known to the machine by its address alone */

static uint32_t load(const _Atomic uint32_t *object)
{
    return atomic_load_explicit(object, load_order);
}

static void store(_Atomic uint32_t *object, uint32_t value)
{
    atomic_store_explicit(object, value, store_order);
}

static void fence(void)
{
    if (fence_order != memory_order_relaxed) {
        atomic_thread_fence(fence_order);
    }
}

static void note(uint32_t first, uint32_t second)
{
    kvist_model_note((uint16_t)(first << 4 | second));
}

static void set_orders(enum memory_order stores, enum memory_order loads, enum memory_order fences)
{
    store_order = stores;
    load_order = loads;
    fence_order = fences;
}

#define RELAXED memory_order_relaxed
#define ACQUIRE memory_order_acquire
#define RELEASE memory_order_release
#define SEQ_CST memory_order_seq_cst

typedef void thread_fn(void);

static struct kvist_model_result result;

static void explore(thread_fn *a, thread_fn *b, thread_fn *c, thread_fn *d, thread_fn *finished)
{
    uint32_t count = d != NULL ? 4 : c != NULL ? 3 : 2;
    const struct kvist_model_program program = {
        .name = "litmus",
        .thread_count = count,
        .threads = {a, b, c, d},
        .regions = {{&cell, sizeof(cell)}},
        .finished = finished,
    };
    kvist_model_explore(&program, &result);
    KVIST_TEST_TRUE(!result.failed);
}

static bool is_possible(uint64_t outcome)
{
    for (uint32_t index = 0; index < result.outcome_count; index++) {
        if (result.outcomes[index] == outcome) {
            return true;
        }
    }
    return false;
}

/* The notes of two threads. */
static uint64_t both(uint64_t a, uint64_t b)
{
    return a | b << 16;
}

/* --- Message passing ------------------------------------------------------------------------ */

static void mp_writer(void)
{
    atomic_store_explicit(&cell.x, 1, memory_order_relaxed);
    if (store_order == RELAXED) {
        fence();
    }
    store(&cell.y, 1);
}

static void mp_reader(void)
{
    uint32_t y = load(&cell.y);
    if (load_order == RELAXED) {
        fence();
    }
    note(y, atomic_load_explicit(&cell.x, memory_order_relaxed));
}

static void message_passing(void)
{
    static const struct {
        enum memory_order stores;
        enum memory_order loads;
        enum memory_order fences;
        bool stale; /* y was seen, and x was not */
    } cases[] = {
        {RELAXED, RELAXED, RELAXED, true},
        {RELEASE, RELAXED, RELAXED, true},
        {RELAXED, ACQUIRE, RELAXED, true},
        {RELEASE, ACQUIRE, RELAXED, false},
        {RELAXED, RELAXED, SEQ_CST, false},
        {RELAXED, RELAXED, memory_order_acq_rel, false},
        {RELAXED, RELAXED, RELEASE, true},
        {RELAXED, RELAXED, ACQUIRE, true},
        {RELAXED, ACQUIRE, RELEASE, false},
        {RELEASE, RELAXED, ACQUIRE, false},
    };
    for (size_t index = 0; index < sizeof(cases) / sizeof(cases[0]); index++) {
        set_orders(cases[index].stores, cases[index].loads, cases[index].fences);
        explore(mp_writer, mp_reader, NULL, NULL, NULL);
        KVIST_TEST_EQUAL(is_possible(both(0, 0x10)), cases[index].stale);
        KVIST_TEST_EQUAL(result.outcome_count, cases[index].stale ? 4 : 3);
    }
}

/* A later relaxed store of the releasing thread does not carry what was released (C20). */
static void sequence_writer(void)
{
    atomic_store_explicit(&cell.x, 1, memory_order_relaxed);
    atomic_store_explicit(&cell.y, 1, memory_order_release);
    atomic_store_explicit(&cell.y, 2, memory_order_relaxed);
}

static void release_sequences_end(void)
{
    set_orders(RELAXED, ACQUIRE, RELAXED);
    explore(sequence_writer, mp_reader, NULL, NULL, NULL);
    KVIST_TEST_TRUE(is_possible(both(0, 0x20)));
    KVIST_TEST_TRUE(!is_possible(both(0, 0x10)));
}

/* --- Store buffering, load buffering --------------------------------------------------------- */

static void sb_left(void)
{
    store(&cell.x, 1);
    fence();
    note(load(&cell.y), 0);
}

static void sb_right(void)
{
    store(&cell.y, 1);
    fence();
    note(load(&cell.x), 0);
}

static void store_buffering(void)
{
    static const enum memory_order fences[] = {
        RELAXED, ACQUIRE, RELEASE, memory_order_acq_rel, SEQ_CST};
    for (size_t index = 0; index < sizeof(fences) / sizeof(fences[0]); index++) {
        set_orders(RELEASE, ACQUIRE, fences[index]);
        explore(sb_left, sb_right, NULL, NULL, NULL);
        KVIST_TEST_EQUAL(is_possible(0), fences[index] != SEQ_CST);
        KVIST_TEST_EQUAL(result.outcome_count, fences[index] == SEQ_CST ? 3 : 4);
    }
}

static void sb_right_bare(void)
{
    store(&cell.y, 1);
    note(load(&cell.x), 0);
}

static void store_buffering_with_one_fence(void)
{
    set_orders(RELAXED, RELAXED, SEQ_CST);
    explore(sb_left, sb_right_bare, NULL, NULL, NULL);
    KVIST_TEST_TRUE(is_possible(0));
}

static void lb_left(void)
{
    note(load(&cell.x), 0);
    store(&cell.y, 1);
}

static void lb_right(void)
{
    note(load(&cell.y), 0);
    store(&cell.x, 1);
}

/* C11 allows it for relaxed accesses; RC11, and this machine, do not. */
static void load_buffering(void)
{
    set_orders(RELAXED, RELAXED, RELAXED);
    explore(lb_left, lb_right, NULL, NULL, NULL);
    KVIST_TEST_TRUE(!is_possible(both(0x10, 0x10)));
    KVIST_TEST_EQUAL(result.outcome_count, 3);
}

/* --- Several readers, several writers -------------------------------------------------------- */

static void write_x(void)
{
    store(&cell.x, 1);
}

static void write_y(void)
{
    store(&cell.y, 1);
}

static void read_x_y(void)
{
    uint32_t x = load(&cell.x);
    fence();
    note(x, load(&cell.y));
}

static void read_y_x(void)
{
    uint32_t y = load(&cell.y);
    fence();
    note(y, load(&cell.x));
}

static void independent_reads(void)
{
    const uint64_t opposed = both(0x10, 0x10) << 32;
    set_orders(RELEASE, ACQUIRE, RELAXED);
    explore(write_x, write_y, read_x_y, read_y_x, NULL);
    KVIST_TEST_TRUE(is_possible(opposed));
    set_orders(RELAXED, RELAXED, SEQ_CST);
    explore(write_x, write_y, read_x_y, read_y_x, NULL);
    KVIST_TEST_TRUE(!is_possible(opposed));
    KVIST_TEST_EQUAL(result.outcome_count, 15);
}

static void wrc_middle(void)
{
    uint32_t x = load(&cell.x);
    fence();
    store(&cell.y, 1);
    note(x, 0);
}

static void write_to_read_causality(void)
{
    set_orders(RELEASE, ACQUIRE, RELAXED);
    explore(write_x, wrc_middle, read_y_x, NULL, NULL);
    KVIST_TEST_TRUE(!is_possible(both(0, 0x10) | 0x10ULL << 32));
    set_orders(RELAXED, RELAXED, RELAXED);
    explore(write_x, wrc_middle, read_y_x, NULL, NULL);
    KVIST_TEST_TRUE(is_possible(both(0, 0x10) | 0x10ULL << 32));
}

static void w22_left(void)
{
    store(&cell.x, 1);
    fence();
    store(&cell.y, 2);
}

static void w22_right(void)
{
    store(&cell.y, 1);
    fence();
    store(&cell.x, 2);
}

static bool both_first; /* the first stores came last, in both */

static void w22_finished(void)
{
    both_first = both_first || (kvist_model_last(&cell.x) == 1 && kvist_model_last(&cell.y) == 1);
}

static void two_writes_twice(void)
{
    set_orders(RELEASE, RELAXED, RELAXED);
    both_first = false;
    explore(w22_left, w22_right, NULL, NULL, w22_finished);
    KVIST_TEST_TRUE(both_first);
    set_orders(RELAXED, RELAXED, SEQ_CST);
    both_first = false;
    explore(w22_left, w22_right, NULL, NULL, w22_finished);
    KVIST_TEST_TRUE(!both_first);
}

/* --- Coherence ------------------------------------------------------------------------------- */

static void write_x_twice(void)
{
    store(&cell.x, 1);
    store(&cell.x, 2);
}

static void read_x_twice(void)
{
    uint32_t first = load(&cell.x);
    note(first, load(&cell.x));
}

static void reads_do_not_go_back(void)
{
    set_orders(RELAXED, RELAXED, RELAXED);
    explore(write_x_twice, read_x_twice, NULL, NULL, NULL);
    KVIST_TEST_TRUE(is_possible(both(0, 0x01)) && is_possible(both(0, 0x12)));
    KVIST_TEST_TRUE(!is_possible(both(0, 0x10)) && !is_possible(both(0, 0x21)) &&
                    !is_possible(both(0, 0x20)));
    KVIST_TEST_EQUAL(result.outcome_count, 6);
}

static void write_two_read(void)
{
    store(&cell.x, 2);
    note(load(&cell.x), 0);
}

static void writes_have_one_order(void)
{
    set_orders(RELAXED, RELAXED, RELAXED);
    explore(write_x, write_two_read, read_x_twice, read_x_twice, NULL);
    for (uint32_t index = 0; index < result.outcome_count; index++) {
        uint64_t third = result.outcomes[index] >> 32 & 0xffff;
        uint64_t fourth = result.outcomes[index] >> 48;
        KVIST_TEST_TRUE(!(third == 0x12 && fourth == 0x21));
        KVIST_TEST_TRUE((result.outcomes[index] >> 16 & 0xffff) != 0);
    }
    KVIST_TEST_TRUE(is_possible(0x10ULL << 16 | 0x21ULL << 32 | 0x21ULL << 48));
}

/* --- Data ------------------------------------------------------------------------------------ */

static void data_writer(void)
{
    kvist_model_data_write(&bytes, 7);
    store(&cell.x, 1);
}

static void data_reader(void)
{
    if (load(&cell.x) == 1) {
        kvist_model_check(kvist_model_data_read(&bytes) == 7, "stale data");
    }
}

/* Reads, then says so; whoever hears of it writes. The machine takes steps in program order, so
 * only the clocks can tell that the read might come after the write. */
static void data_user(void)
{
    (void)kvist_model_data_read(&bytes);
    store(&cell.x, 1);
}

static void data_reuser(void)
{
    if (load(&cell.x) == 1) {
        kvist_model_data_write(&bytes, 8);
    }
}

static void data_user_told(void)
{
    (void)kvist_model_data_read(&bytes);
    kvist_model_send(0);
}

static void data_reuser_told(void)
{
    kvist_model_receive(0);
    kvist_model_data_write(&bytes, 8);
}

static bool races(thread_fn *a, thread_fn *b)
{
    const struct kvist_model_program program = {
        .name = "data",
        .thread_count = 2,
        .threads = {a, b},
        .regions = {{&cell, sizeof(cell)}},
    };
    kvist_model_explore(&program, &result);
    return result.failed;
}

static void data_races_are_found(void)
{
    thread_fn *const pairs[][2] = {{data_writer, data_reader}, {data_user, data_reuser}};
    for (size_t index = 0; index < 2; index++) {
        set_orders(RELEASE, ACQUIRE, RELAXED);
        KVIST_TEST_TRUE(!races(pairs[index][0], pairs[index][1]));
        set_orders(RELAXED, ACQUIRE, RELAXED);
        KVIST_TEST_TRUE(races(pairs[index][0], pairs[index][1]));
        set_orders(RELEASE, RELAXED, RELAXED);
        KVIST_TEST_TRUE(races(pairs[index][0], pairs[index][1]));
    }
    KVIST_TEST_TRUE(!races(data_user_told, data_reuser_told));
    KVIST_TEST_EQUAL(result.executions, 1);
}

/* Seq_cst fences alone do not make one thing happen before another. */
static void fenced_user(void)
{
    (void)kvist_model_data_read(&bytes);
    store(&cell.x, 1);
    atomic_thread_fence(memory_order_seq_cst);
    note(load(&cell.y), 0);
}

static void fenced_reuser(void)
{
    store(&cell.y, 1);
    atomic_thread_fence(memory_order_seq_cst);
    if (load(&cell.z) == 0) {
        kvist_model_data_write(&bytes, 8);
    }
}

static void fences_alone_do_not_order_data(void)
{
    set_orders(RELAXED, RELAXED, RELAXED);
    KVIST_TEST_TRUE(races(fenced_user, fenced_reuser));
}

int main(void)
{
    static const struct kvist_unit_case cases[] = {
        {"message passing", message_passing},
        {"release sequences end", release_sequences_end},
        {"store buffering", store_buffering},
        {"store buffering with one fence", store_buffering_with_one_fence},
        {"load buffering", load_buffering},
        {"independent reads of independent writes", independent_reads},
        {"write to read causality", write_to_read_causality},
        {"2+2W", two_writes_twice},
        {"reads do not go back", reads_do_not_go_back},
        {"writes have one order", writes_have_one_order},
        {"data races are found", data_races_are_found},
        {"fences alone do not order data", fences_alone_do_not_order_data},
    };
    return kvist_unit_main("litmus", cases, sizeof(cases) / sizeof(cases[0]), NULL, NULL);
}
