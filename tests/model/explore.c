#include "tests/model/machine_internal.h"

#include <stdio.h>
#include <stdlib.h>

/* --- States that were seen ------------------------------------------------------------------ */

uint64_t kvist_machine_hash_view(uint64_t hash, const struct view *view)
{
    uint64_t words[sizeof(*view) / 8];
    memcpy(words, view, sizeof(words));
    for (size_t index = 0; index < sizeof(words) / 8; index++) {
        hash = kvist_machine_mix(hash, words[index]);
    }
    return hash;
}

static bool seen_insert(uint64_t hash)
{
    if ((kvist_machine.seen_count + 1) * 2 > kvist_machine.seen_capacity) {
        size_t capacity =
            kvist_machine.seen_capacity == 0 ? 1U << 12 : kvist_machine.seen_capacity * 2;
        uint64_t *old = kvist_machine.seen;
        size_t old_capacity = kvist_machine.seen_capacity;
        kvist_machine.seen = calloc(capacity, sizeof(*kvist_machine.seen));
        kvist_machine_require(kvist_machine.seen != NULL, "no memory for states");
        kvist_machine.seen_capacity = capacity;
        kvist_machine.seen_count = 0;
        for (size_t index = 0; index < old_capacity; index++) {
            if (old[index] != 0) {
                (void)seen_insert(old[index]);
            }
        }
        free(old);
    }
    hash |= hash == 0;
    size_t at = hash & (kvist_machine.seen_capacity - 1);
    while (kvist_machine.seen[at] != 0) {
        if (kvist_machine.seen[at] == hash) {
            return false;
        }
        at = (at + 1) & (kvist_machine.seen_capacity - 1);
    }
    kvist_machine.seen[at] = hash;
    kvist_machine.seen_count++;
    return true;
}

static uint64_t hash_state(const struct state *state)
{
    uint64_t hash = kvist_machine_hash_view(state->memory_hash, &state->global);
    for (uint32_t index = 0; index < kvist_machine.program->thread_count; index++) {
        const struct thread *thread = &state->threads[index];
        hash = kvist_machine_mix(hash, thread->log_hash);
        hash = kvist_machine_mix(hash, thread->view_hash);
        hash = kvist_machine_mix(hash, thread->log_count);
    }
    return hash;
}

/* --- Exploring ----------------------------------------------------------------------------- */

/* Call a thread from its start up to its next step, by way of `choice` for the one that it is at.
 * @return false when the exploration is over */
static bool run_thread(uint32_t index, uint32_t choice)
{
    kvist_machine.self = index;
    kvist_machine.cursor = 0;
    kvist_machine.choice = choice;
    kvist_machine_self()->next = (struct step){.kind = STEP_NONE};
    if (setjmp(kvist_machine.out) == 0) {
        kvist_machine.program->threads[index]();
        kvist_machine_self()->ended = true;
    }
    struct thread *thread = kvist_machine_self();
    thread->view_hash = kvist_machine_hash_view(
        kvist_machine_hash_view(kvist_machine_hash_view(1, &thread->current), &thread->acquired),
        &thread->released);
    return !kvist_machine.result->failed && !kvist_machine.restart;
}

static uint32_t count_choices(const struct state *state, const struct thread *thread)
{
    uint8_t places[LIST_MAX];
    switch (thread->next.kind) {
    case STEP_LOAD:
        return kvist_machine_readable(state, thread, thread->next.at, places);
    case STEP_STORE:
        return state->lists[thread->next.at].count -
               kvist_machine_place(state, thread->next.at, thread->current.seen[thread->next.at]);
    case STEP_FENCE:
        return 1;
    case STEP_RECEIVE:
        return state->sent[thread->next.at] ? 1 : 0;
    case STEP_NONE:
        break;
    }
    return 0;
}

static void copy_state(struct state *target, const struct state *source)
{
    memcpy(target, source, offsetof(struct state, lists));
    memcpy(target->lists, source->lists, kvist_machine.shared_count * sizeof(source->lists[0]));
    memcpy(target->owned, source->owned, kvist_machine.place_count * sizeof(source->owned[0]));
    memcpy(target->data, source->data, kvist_machine.data_count * sizeof(source->data[0]));
    for (uint32_t index = 0; index < kvist_machine.program->thread_count; index++) {
        const struct thread *thread = &source->threads[index];
        memcpy(&target->threads[index],
               thread,
               offsetof(struct thread, log) + thread->log_count * sizeof(thread->log[0]));
    }
    memcpy(target->messages, source->messages, source->message_count * sizeof(source->messages[0]));
}

/* @return false when the exploration is over */
static bool finish_execution(void)
{
    struct kvist_model_result *result = kvist_machine.result;
    uint64_t outcome = 0;
    result->executions++;
    for (uint32_t index = 0; index < kvist_machine.program->thread_count; index++) {
        outcome |= (uint64_t)kvist_machine.now->threads[index].note << (16 * index);
    }
    uint32_t known = 0;
    while (known < result->outcome_count && result->outcomes[known] != outcome) {
        known++;
    }
    if (known == result->outcome_count) {
        kvist_machine_require(known < KVIST_MODEL_OUTCOMES_MAX, "too many outcomes");
        result->outcomes[result->outcome_count++] = outcome;
    }
    if (kvist_machine.program->finished != NULL && setjmp(kvist_machine.out) == 0) {
        kvist_machine.program->finished();
    }
    return !result->failed;
}

/* Take every step that the state at `kvist_machine.depth` has. @return false when it is over */
static bool explore_from(uint32_t depth) // NOLINT(misc-no-recursion): as deep as a program is long
{
    const struct state *state = &kvist_machine.states[depth];
    if (!seen_insert(hash_state(state))) {
        return true;
    }
    kvist_machine.result->states++;
    kvist_machine_require(depth + 1 < DEPTH_MAX, "a program is too long");
    bool moved = false;
    for (uint32_t index = 0; index < kvist_machine.program->thread_count; index++) {
        uint32_t count = count_choices(state, &state->threads[index]);
        for (uint32_t choice = 0; choice < count; choice++) {
            moved = true;
            kvist_machine.depth = depth + 1;
            kvist_machine.now = &kvist_machine.states[depth + 1];
            copy_state(kvist_machine.now, state);
            if (!run_thread(index, choice) || !explore_from(depth + 1)) {
                return false;
            }
        }
    }
    kvist_machine.depth = depth;
    kvist_machine.now = &kvist_machine.states[depth];
    return moved || finish_execution();
}

static void set_up(void)
{
    struct state *state = &kvist_machine.states[0];
    kvist_machine.restart = false;
    kvist_machine.depth = 0;
    kvist_machine.now = state;
    kvist_machine.shared_count = 0;
    kvist_machine.seen_count = 0;
    if (kvist_machine.seen_capacity > 0) {
        memset(kvist_machine.seen, 0, kvist_machine.seen_capacity * sizeof(*kvist_machine.seen));
    }
    memset(state, 0, sizeof(*state));
    for (uint32_t index = 0; index < kvist_machine.place_count; index++) {
        struct place *place = &kvist_machine.places[index];
        bool several = (place->readers & (place->readers - 1)) != 0;
        state->owned[index] = place->initial;
        if (several && place->writers != 0) {
            place->shared = kvist_machine.shared_count++;
            kvist_machine_require(place->shared < SHARED_MAX, "too many shared locations");
            kvist_machine_insert(
                state, place->shared, 0, &(struct message){.value = place->initial});
        }
    }
    for (uint32_t index = 0; index < THREADS_MAX; index++) {
        struct thread *thread = &state->threads[index];
        thread->current.clock[index] = 1;
        thread->acquired.clock[index] = 1;
    }
}

void kvist_model_explore(const struct kvist_model_program *program,
                         struct kvist_model_result *result_out)
{
    kvist_machine.program = program;
    kvist_machine.result = result_out;
    kvist_machine.place_count = 0;
    kvist_machine.data_count = 0;
    if (kvist_machine.states == NULL) {
        kvist_machine.states = calloc(DEPTH_MAX, sizeof(*kvist_machine.states));
        kvist_machine_require(kvist_machine.states != NULL, "no memory for the states");
    }
    do {
        memset(result_out, 0, sizeof(*result_out));
        set_up();
        bool goes_on = true;
        for (uint32_t index = 0; index < program->thread_count && goes_on; index++) {
            goes_on = run_thread(index, NO_CHOICE);
        }
        if (goes_on) {
            (void)explore_from(0);
        }
    } while (kvist_machine.restart);
    free(kvist_machine.seen);
    kvist_machine.seen = NULL;
    kvist_machine.seen_capacity = 0;
    kvist_machine.program = NULL;
}

void kvist_model_print_trace(void)
{
    static const char *const kinds[] = {"", "load", "store", "fence", "receive"};
    for (uint32_t depth = 1; depth <= kvist_machine.depth; depth++) {
        const struct trace_step *step = &kvist_machine.trace[depth];
        (void)printf("    %*s%u %s %s = %llu in %s:%u\n",
                     (int)(step->thread * 4),
                     "",
                     step->thread,
                     kinds[step->kind],
                     step->site.what,
                     (unsigned long long)step->value,
                     step->site.function,
                     step->site.line);
    }
}

uint16_t kvist_model_noted(uint32_t thread)
{
    return kvist_machine.now->threads[thread].note;
}

bool kvist_model_ended(uint32_t thread)
{
    return kvist_machine.now->threads[thread].ended;
}

uint64_t kvist_model_last(const void *object)
{
    for (uint32_t index = 0; index < kvist_machine.place_count; index++) {
        const struct place *place = &kvist_machine.places[index];
        if (place->address == object && place->shared != PRIVATE) {
            const struct list *list = &kvist_machine.now->lists[place->shared];
            return kvist_machine_value(kvist_machine.now, place->shared, list->count - 1);
        }
        if (place->address == object) {
            return kvist_machine.now->owned[index];
        }
    }
    return 0;
}
