#include "tests/model/machine_internal.h"

#include <stdio.h>
#include <stdlib.h>

struct kvist_machine kvist_machine = {.weakened = UINT32_MAX};

void kvist_machine_require(bool holds, const char *what)
{
    if (!holds) {
        (void)fprintf(stderr, "model: %s\n", what);
        abort();
    }
}

/* --- Views --------------------------------------------------------------------------------- */

static void join(const struct state *state, struct view *view, const struct view *other)
{
    for (uint32_t at = 0; at < kvist_machine.shared_count; at++) {
        if (kvist_machine_place(state, at, other->seen[at]) >
            kvist_machine_place(state, at, view->seen[at])) {
            view->seen[at] = other->seen[at];
        }
    }
    for (uint32_t index = 0; index < THREADS_MAX; index++) {
        if (other->clock[index] > view->clock[index]) {
            view->clock[index] = other->clock[index];
        }
    }
}

static bool is_within(const struct state *state, const struct view *view, const struct view *other)
{
    for (uint32_t at = 0; at < kvist_machine.shared_count; at++) {
        if (kvist_machine_place(state, at, view->seen[at]) >
            kvist_machine_place(state, at, other->seen[at])) {
            return false;
        }
    }
    for (uint32_t index = 0; index < THREADS_MAX; index++) {
        if (view->clock[index] > other->clock[index]) {
            return false;
        }
    }
    return true;
}

static const struct message *
message_at(const struct state *state, uint32_t location, uint32_t place)
{
    const struct list *list = &state->lists[location];
    return &state->messages[list->message[list->order[place]]];
}

uint64_t kvist_machine_value(const struct state *state, uint32_t location, uint32_t place)
{
    return message_at(state, location, place)->value;
}

/* What is done after this is not in the views that were given away before. */
static void tick(struct thread *thread)
{
    kvist_machine_require(thread->current.clock[kvist_machine.self] < UINT8_MAX,
                          "a clock runs over");
    thread->current.clock[kvist_machine.self]++;
    thread->acquired.clock[kvist_machine.self] = thread->current.clock[kvist_machine.self];
}

/* --- Leaving a thread ---------------------------------------------------------------------- */

static _Noreturn void leave(void)
{
    longjmp(kvist_machine.out, 1);
}

static _Noreturn void fail(const char *what)
{
    kvist_machine.result->failed = true;
    (void)snprintf(kvist_machine.result->what,
                   sizeof(kvist_machine.result->what),
                   "%s, thread %u: %s",
                   kvist_machine.program->name,
                   kvist_machine.self,
                   what);
    leave();
}

static bool is_replayed(uint64_t *value_out)
{
    const struct thread *thread = kvist_machine_self();
    if (kvist_machine.cursor == thread->log_count) {
        return false;
    }
    *value_out = thread->log[kvist_machine.cursor++];
    return true;
}

static void write_log(uint64_t value)
{
    struct thread *thread = kvist_machine_self();
    kvist_machine_require(thread->log_count < LOG_MAX, "a thread takes too many steps");
    thread->log[thread->log_count++] = value;
    thread->log_hash = kvist_machine_mix(thread->log_hash, value);
    kvist_machine.cursor++;
}

/* A step that others can tell: it is taken where it was chosen, else it is what comes next. */
static uint32_t choose(const struct step *step, const struct kvist_model_site *site)
{
    if (kvist_machine.choice == NO_CHOICE) {
        kvist_machine_self()->next = *step;
        leave();
    }
    uint32_t choice = kvist_machine.choice;
    kvist_machine.choice = NO_CHOICE;
    kvist_machine.trace[kvist_machine.depth] = (struct trace_step){
        .thread = kvist_machine.self, .site = *site, .kind = step->kind, .value = step->value};
    return choice;
}

/* --- Places -------------------------------------------------------------------------------- */

static bool is_modelled(const void *address)
{
    for (uint32_t index = 0; kvist_machine.program != NULL && index < KVIST_MODEL_REGIONS_MAX;
         index++) {
        const struct kvist_model_region *region = &kvist_machine.program->regions[index];
        const char *base = region->base;
        if (base != NULL && (const char *)address >= base &&
            (const char *)address < base + region->bytes) {
            return true;
        }
    }
    return false;
}

static struct place *find_place(const void *address, uint64_t initial)
{
    for (uint32_t index = 0; index < kvist_machine.place_count; index++) {
        if (kvist_machine.places[index].address == address) {
            return &kvist_machine.places[index];
        }
    }
    kvist_machine_require(kvist_machine.place_count < PLACES_MAX, "too many locations");
    uint32_t index = kvist_machine.place_count++;
    kvist_machine.places[index] =
        (struct place){.address = address, .initial = initial, .shared = PRIVATE};
    for (uint32_t depth = 0; depth <= kvist_machine.depth; depth++) {
        kvist_machine.states[depth].owned[index] = initial;
    }
    return &kvist_machine.places[index];
}

/* Once a location turns out to be shared, everything is explored anew. */
static void note_access(struct place *place, bool writes)
{
    uint32_t bit = 1U << kvist_machine.self;
    place->readers |= bit;
    place->writers |= writes ? bit : 0;
    bool several = (place->readers & (place->readers - 1)) != 0;
    if (place->shared == PRIVATE && several && place->writers != 0) {
        kvist_machine_require(kvist_machine.shared_count < SHARED_MAX, "too many shared locations");
        kvist_machine.restart = true;
        leave();
    }
}

/* --- Orders -------------------------------------------------------------------------------- */

static uint32_t find_order(const struct kvist_model_site *site, enum memory_order order)
{
    const char *role = kvist_machine.program->roles[kvist_machine.self];
    role = role != NULL ? role : "";
    for (uint32_t index = 0; index < kvist_machine.order_count; index++) {
        const struct kvist_model_order *known = &kvist_machine.orders[index];
        if (known->line == site->line && strcmp(known->what, site->what) == 0 &&
            strcmp(known->role, role) == 0 && strcmp(known->file, site->file) == 0) {
            return index;
        }
    }
    kvist_machine_require(kvist_machine.order_count < KVIST_MODEL_ORDERS_MAX,
                          "too many places with an order");
    struct kvist_model_order *fresh = &kvist_machine.orders[kvist_machine.order_count];
    (void)snprintf(fresh->file, sizeof(fresh->file), "%s", site->file);
    (void)snprintf(fresh->function, sizeof(fresh->function), "%s", site->function);
    (void)snprintf(fresh->what, sizeof(fresh->what), "%s", site->what);
    (void)snprintf(fresh->role, sizeof(fresh->role), "%s", role);
    fresh->line = site->line;
    fresh->order = order;
    return kvist_machine.order_count++;
}

static enum memory_order order_of(const struct kvist_model_site *site, enum memory_order order)
{
    if (order == memory_order_relaxed) {
        return order;
    }
    uint32_t index = find_order(site, order);
    kvist_machine.result->met[index] = true;
    return index == kvist_machine.weakened ? kvist_machine.weakened_order : order;
}

static bool acquires(enum memory_order order)
{
    return order == memory_order_acquire || order == memory_order_acq_rel ||
           order == memory_order_seq_cst;
}

static bool releases(enum memory_order order)
{
    return order == memory_order_release || order == memory_order_acq_rel ||
           order == memory_order_seq_cst;
}

/* --- Loads --------------------------------------------------------------------------------- */

static bool is_dominated(const struct state *state, uint32_t location, uint32_t first, uint32_t at)
{
    const struct message *message = message_at(state, location, at);
    for (uint32_t place = first; place < at; place++) {
        const struct message *older = message_at(state, location, place);
        if (older->value == message->value && is_within(state, &older->view, &message->view)) {
            return true;
        }
    }
    return false;
}

uint32_t kvist_machine_readable(const struct state *state,
                                const struct thread *thread,
                                uint32_t location,
                                uint8_t places_out[LIST_MAX])
{
    uint32_t count = 0;
    uint32_t first = kvist_machine_place(state, location, thread->current.seen[location]);
    for (uint32_t place = first; place < state->lists[location].count; place++) {
        if (!is_dominated(state, location, first, place)) {
            places_out[count++] = (uint8_t)place;
        }
    }
    return count;
}

static uint64_t
load_shared(uint32_t location, enum memory_order order, const struct kvist_model_site *site)
{
    struct step step = {.kind = STEP_LOAD, .order = order, .at = location};
    uint32_t choice = choose(&step, site);
    struct thread *thread = kvist_machine_self();
    uint8_t places[LIST_MAX];
    kvist_machine_require(choice <
                              kvist_machine_readable(kvist_machine.now, thread, location, places),
                          "no such message");
    const struct message *message = message_at(kvist_machine.now, location, places[choice]);
    thread->current.seen[location] = kvist_machine.now->lists[location].order[places[choice]];
    join(kvist_machine.now, &thread->acquired, &message->view);
    if (acquires(order)) {
        join(kvist_machine.now, &thread->current, &message->view);
    }
    kvist_machine.trace[kvist_machine.depth].value = message->value;
    return message->value;
}

static uint64_t load(const void *address,
                     uint64_t initial,
                     enum memory_order order,
                     const struct kvist_model_site *site)
{
    uint64_t value = 0;
    if (is_replayed(&value)) {
        return value;
    }
    kvist_machine_require(order == memory_order_relaxed || order == memory_order_acquire,
                          "a seq_cst access");
    order = order_of(site, order);
    struct place *place = find_place(address, initial);
    note_access(place, false);
    value = place->shared == PRIVATE ? kvist_machine.now->owned[place - kvist_machine.places]
                                     : load_shared(place->shared, order, site);
    write_log(value);
    return value;
}

uint32_t kvist_model_load_u32(const _Atomic uint32_t *object,
                              enum memory_order order,
                              const struct kvist_model_site *site)
{
    uint32_t value = *object;
    return is_modelled(object) ? (uint32_t)load(object, value, order, site) : value;
}

uint64_t kvist_model_load_u64(const _Atomic uint64_t *object,
                              enum memory_order order,
                              const struct kvist_model_site *site)
{
    uint64_t value = *object;
    return is_modelled(object) ? load(object, value, order, site) : value;
}

bool kvist_model_load_bool(const _Atomic bool *object,
                           enum memory_order order,
                           const struct kvist_model_site *site)
{
    (void)order;
    (void)site;
    kvist_machine_require(!is_modelled(object), "a bool in shared memory");
    return *object;
}

/* --- Stores -------------------------------------------------------------------------------- */

void kvist_machine_insert(struct state *state,
                          uint32_t location,
                          uint32_t place,
                          const struct message *message)
{
    struct list *list = &state->lists[location];
    kvist_machine_require(list->count < LIST_MAX && state->message_count < MESSAGES_MAX,
                          "too many messages");
    uint8_t number = (uint8_t)list->count++;
    for (uint32_t at = number; at > place; at--) {
        list->order[at] = list->order[at - 1];
        list->place[list->order[at]] = (uint8_t)at;
    }
    list->order[place] = number;
    list->place[number] = (uint8_t)place;
    list->message[number] = (uint16_t)state->message_count;
    struct message *fresh = &state->messages[state->message_count++];
    *fresh = *message;
    fresh->view.seen[location] = number;
    uint64_t hash =
        kvist_machine_hash_view(kvist_machine_mix(location, message->value), &fresh->view);
    state->memory_hash += kvist_machine_mix(hash, ((uint64_t)place << 32) | number);
}

static void store_shared(uint32_t location,
                         uint64_t value,
                         enum memory_order order,
                         const struct kvist_model_site *site)
{
    struct step step = {.kind = STEP_STORE, .order = order, .at = location, .value = value};
    uint32_t choice = choose(&step, site);
    struct thread *thread = kvist_machine_self();
    struct message message = {.value = value};
    message.view = releases(order) ? thread->current : thread->released;
    uint32_t place =
        kvist_machine_place(kvist_machine.now, location, thread->current.seen[location]) + 1 +
        choice;
    kvist_machine_insert(kvist_machine.now, location, place, &message);
    uint8_t number = (uint8_t)(kvist_machine.now->lists[location].count - 1);
    thread->current.seen[location] = number;
    thread->acquired.seen[location] = number;
    if (releases(order)) {
        tick(thread);
    }
}

static void store(const void *address,
                  uint64_t initial,
                  uint64_t value,
                  enum memory_order order,
                  const struct kvist_model_site *site)
{
    uint64_t ignored = 0;
    if (is_replayed(&ignored)) {
        return;
    }
    kvist_machine_require(order == memory_order_relaxed || order == memory_order_release,
                          "a seq_cst access");
    order = order_of(site, order);
    struct place *place = find_place(address, initial);
    note_access(place, true);
    if (place->shared == PRIVATE) {
        kvist_machine.now->owned[place - kvist_machine.places] = value;
    } else {
        store_shared(place->shared, value, order, site);
    }
    write_log(0);
}

void kvist_model_store_u32(_Atomic uint32_t *object,
                           uint32_t value,
                           enum memory_order order,
                           const struct kvist_model_site *site)
{
    if (is_modelled(object)) {
        store(object, *object, value, order, site);
    } else {
        *object = value;
    }
}

void kvist_model_store_u64(_Atomic uint64_t *object,
                           uint64_t value,
                           enum memory_order order,
                           const struct kvist_model_site *site)
{
    if (is_modelled(object)) {
        store(object, *object, value, order, site);
    } else {
        *object = value;
    }
}

/* --- Fences -------------------------------------------------------------------------------- */

static void exchange_globally(const struct kvist_model_site *site)
{
    struct step step = {.kind = STEP_FENCE, .order = memory_order_seq_cst};
    (void)choose(&step, site);
    struct thread *thread = kvist_machine_self();
    struct view *global = &kvist_machine.now->global;
    join(kvist_machine.now, global, &thread->current);
    memset(global->clock, 0, sizeof(global->clock));
    join(kvist_machine.now, &thread->current, global);
    join(kvist_machine.now, &thread->acquired, global);
}

void kvist_model_fence(enum memory_order order, const struct kvist_model_site *site)
{
    uint64_t ignored = 0;
    if (kvist_machine.program == NULL || is_replayed(&ignored)) {
        return;
    }
    order = order_of(site, order);
    struct thread *thread = kvist_machine_self();
    if (acquires(order)) {
        thread->current = thread->acquired;
    }
    if (order == memory_order_seq_cst) {
        exchange_globally(site);
    }
    if (releases(order)) {
        thread->released = thread->current;
        tick(thread);
    }
    write_log(0);
}

/* --- Data and messages --------------------------------------------------------------------- */

static struct datum *find_datum(const uint64_t *at)
{
    uint32_t index = 0;
    while (index < kvist_machine.data_count && kvist_machine.data[index] != at) {
        index++;
    }
    kvist_machine_require(index < DATA_MAX, "too much data");
    if (index == kvist_machine.data_count) {
        kvist_machine.data[kvist_machine.data_count++] = at;
        for (uint32_t depth = 0; depth <= kvist_machine.depth; depth++) {
            kvist_machine.states[depth].data[index] = (struct datum){.written = false};
        }
    }
    return &kvist_machine.now->data[index];
}

static bool is_after(const struct thread *thread, uint32_t other, uint8_t clock)
{
    return other == kvist_machine.self || thread->current.clock[other] >= clock;
}

uint64_t kvist_model_data_read(const uint64_t *at)
{
    uint64_t value = 0;
    if (is_replayed(&value)) {
        return value;
    }
    struct datum *datum = find_datum(at);
    const struct thread *thread = kvist_machine_self();
    if (!is_after(thread, datum->writer, datum->write_clock)) {
        fail("data is read while it may be written");
    }
    datum->read_clock[kvist_machine.self] = thread->current.clock[kvist_machine.self];
    value = datum->written ? datum->value : *at;
    write_log(value);
    return value;
}

void kvist_model_data_write(const uint64_t *at, uint64_t value)
{
    uint64_t ignored = 0;
    if (is_replayed(&ignored)) {
        return;
    }
    struct datum *datum = find_datum(at);
    const struct thread *thread = kvist_machine_self();
    bool after = is_after(thread, datum->writer, datum->write_clock);
    for (uint32_t other = 0; other < THREADS_MAX; other++) {
        after = after && is_after(thread, other, datum->read_clock[other]);
    }
    if (!after) {
        fail("data is written while it may be in use");
    }
    datum->value = value;
    datum->written = true;
    datum->writer = kvist_machine.self;
    datum->write_clock = thread->current.clock[kvist_machine.self];
    write_log(0);
}

void kvist_model_send(uint32_t channel)
{
    uint64_t ignored = 0;
    if (is_replayed(&ignored)) {
        return;
    }
    kvist_machine_require(channel < CHANNELS_MAX && !kvist_machine.now->sent[channel],
                          "no such message to send");
    kvist_machine.now->sent[channel] = true;
    kvist_machine.now->mail[channel] = kvist_machine_self()->current;
    tick(kvist_machine_self());
    write_log(0);
}

void kvist_model_receive(uint32_t channel)
{
    static const struct kvist_model_site site = {.file = "", .function = "", .what = "message"};
    uint64_t ignored = 0;
    if (is_replayed(&ignored)) {
        return;
    }
    kvist_machine_require(channel < CHANNELS_MAX, "no such message to receive");
    struct step step = {.kind = STEP_RECEIVE, .at = channel};
    (void)choose(&step, &site);
    join(kvist_machine.now, &kvist_machine_self()->current, &kvist_machine.now->mail[channel]);
    join(kvist_machine.now, &kvist_machine_self()->acquired, &kvist_machine.now->mail[channel]);
    write_log(0);
}

void kvist_model_stop(void)
{
    kvist_machine_self()->ended = true;
    leave();
}

void kvist_model_note(uint16_t bits)
{
    kvist_machine_self()->note = bits;
}

void kvist_model_check(bool holds, const char *what)
{
    if (!holds) {
        fail(what);
    }
}

/* --- Weakening ----------------------------------------------------------------------------- */

uint32_t kvist_model_orders(const struct kvist_model_order **orders_out)
{
    *orders_out = kvist_machine.orders;
    return kvist_machine.order_count;
}

void kvist_model_weaken(uint32_t index, enum memory_order order)
{
    kvist_machine.weakened = index;
    kvist_machine.weakened_order = order;
}
