/*
 * reuse - the block goes first whose room promises the fewest hits.
 *
 * Role        Blocks are classed by their uses (once, twice, three times, more) and by the epochs
 *             since the last one; an epoch is as many uses as a sixteenth of the blocks. For each
 *             class and age it counts how many blocks were there and how many of them were used
 *             again. Evicted blocks count as well, as long as their ghosts are remembered: so it
 *             sees the uses that it missed, and not only those that its own choices left to see.
 *             That gives the rate of reuse at each age, and from there the Gittins index: over all
 *             times that a block could be kept from now, the best ratio of expected hits to
 *             expected room and time. The lowest index goes first; but what was used in this epoch,
 *             or a quarter of one ago, goes last, whatever was learned: it may just be on its way
 *             to whoever waits for it.
 *             Before anything was seen the rate falls with age, and less the more uses there were:
 *             it begins as an LRU of what was used once, then of what was used more.
 *             As it knows when each block was used last, evicted or not, it also knows which uses
 *             an LRU would have had as hits. When those are clearly more (what was learned does not
 *             hold any longer), an LRU's order is used for a while.
 * Order       each class has a list for each age, to which blocks are added as they are used: a
 *             chain that is touched from its tail lies in one list and goes from its tail
 * Measured    hits in %, `kvist replay --sweep` on the trace that the Mooncake paper published
 *             (12,031 requests of a chat service), cache as a share of the distinct blocks; min
 *             knows the future:
 *                       1 %    3 %    5 %   10 %   20 %   40 %
 *               lru     5.3   12.6   19.6   27.9   34.5   36.0
 *               s3fifo  7.7   15.2   19.2   24.4   30.7   36.0
 *               reuse  10.3   17.8   22.2   28.9   34.6   36.0
 *               min    24.6   34.8   36.6   36.6   36.6   36.6
 *             Of seven synthetic workloads (tests/support/traces.c) with five seeds at the same
 *             sizes, 204 points, it is 1.9 points above the better of the two on average, up to 28
 *             (a loop); below it by more than 0.3 at 3: chats that just fit into an LRU (one seed
 *             of five, -1.0 and -2.5), agents in 584 slots (-0.5). Sparing the newest costs up to
 *             0.3 points; without, a workload that never came back taught it to evict a block
 *             before whoever had committed it could find it. In pools of a few hundred slots, where
 *             what the daemon keeps free (`--headroom`) is as long as a chain, s3fifo finds more: 3
 *             points in 560 slots, 7 in 512 of which grants held half.
 * Tried       ghosts in buckets that forget each on its own (up to 3 points less: chains come back
 *             in parts); classes by the last interval instead of uses (2 to 3 less on Zipf); rates
 *             by shares of uses instead of occurrence and exposure (1 less when the workload
 *             changes); ARC, SLRU, W-TinyLFU with a fixed and a climbing window (all below the
 *             better of the two somewhere, by 2 to 11)
 * Source      J. Gittins, "Bandit processes and dynamic allocation indices", 1979; estimating the
 *             rates from what was evicted: Beckmann et al., "LHD", NSDI '18
 */
#include "proto/shm/layout.h"
#include "storage/policy/ghosts.h"
#include "storage/policy/list.h"
#include "storage/policy/policy.h"

#include <math.h>
#include <stdlib.h>

#define REUSE_MAGIC        0x52455553U
#define CLASSES            4U   /* of uses; the last is "or more" */
#define EPOCHS             128U /* that are told apart: eight times as many uses as blocks */
#define EPOCH_OF_BLOCKS    16U
#define EPOCH_USES_MIN     16U
#define LISTS              (CLASSES * EPOCHS)
#define GHOSTS_OF_SLOT     4U
#define NOTE_USES_BITS     3U
#define NOTE_EPOCH_MASK    (UINT32_MAX >> NOTE_USES_BITS)
#define FADE               0.99865 /* an epoch: what was seen 512 epochs ago counts half */
#define PRIOR_REUSES       4.0     /* what is assumed weighs as much as so many reuses */
#define PRIOR_RATE         0.1     /* an epoch, at an age of one; it falls as age grows */
#define PRIOR_AGE_AT_START 4.0
#define NEW_STAYS          1e9   /* more than any index */
#define TURN_FADE          0.985 /* an epoch: hits are compared over about 67 */
#define TURN_MARGIN        0.01  /* of all uses: what an LRU must be better by */
#define TURN_EPOCHS_MIN    64U   /* that its order is used then; */
#define TURN_EPOCHS_MAX    1024U /* twice as long each time, up to this, */
#define TURN_EPOCHS_STOOD  128U  /* unless ours stood for so long in between */

/* Ages, in epochs, for which the rate is estimated: from here to the next. */
static const uint8_t age_starts[] = {0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91};
#define AGES KVIST_ARRAY_COUNT(age_starts)

struct reuse_class {
    uint32_t there[EPOCHS]; /* blocks and ghosts, by the epoch of their last use */
    double reused[AGES];    /* fading counts */
    double exposed[AGES];   /* blocks times epochs that they were there */
};

struct kvist_policy {
    uint32_t magic;
    uint32_t slot_max; /* sentinels: slot_max + class * EPOCHS + epoch % EPOCHS */
    uint32_t member_count;
    uint32_t epoch;
    uint32_t epoch_uses; /* how long it is; grows with the pool */
    uint32_t epoch_left; /* uses until the next one */
    uint64_t uses_total; /* at the start of the epoch */
    struct kvist_ghosts *ghosts;
    uint32_t *notes; /* [slot_max] */
    struct reuse_class classes[CLASSES];
    uint64_t starts[EPOCHS]; /* uses_total, by epoch */
    uint8_t ages[EPOCHS];    /* in age_starts, by epoch */
    bool lru_has[EPOCHS];    /* an LRU would still have what was last used then */
    double hits;             /* fading counts: ours, and those that an LRU would have had */
    double lru_hits;
    bool by_lru;            /* its order is used */
    uint32_t turn_left;     /* epochs that it is used, or that ours has to stand */
    uint32_t turn_next;     /* how long it is used the next time */
    uint16_t order[LISTS];  /* class * EPOCHS + epoch % EPOCHS, the first to go first */
    uint16_t places[LISTS]; /* and where in it each stands */
    struct kvist_list_link links[];
};

/* --- Notes: epoch of the last use, and uses -------------------------------------------------- */

static uint32_t note_of(const struct kvist_policy *policy, uint32_t uses)
{
    return policy->epoch << NOTE_USES_BITS | uses;
}

static uint32_t note_uses(uint32_t note)
{
    return note & ((1U << NOTE_USES_BITS) - 1);
}

static struct reuse_class *note_class(struct kvist_policy *policy, uint32_t note)
{
    return &policy->classes[note_uses(note) - 1];
}

/* Epoch % EPOCHS; the oldest that is told apart stands for those before it. */
static uint32_t note_epoch(const struct kvist_policy *policy, uint32_t note)
{
    uint32_t since = (policy->epoch - (note >> NOTE_USES_BITS)) & NOTE_EPOCH_MASK;
    return (policy->epoch - (since < EPOCHS ? since : EPOCHS - 1)) % EPOCHS;
}

static uint32_t *note_there(struct kvist_policy *policy, uint32_t note)
{
    return &note_class(policy, note)->there[note_epoch(policy, note)];
}

static uint32_t sentinel_of(const struct kvist_policy *policy, uint32_t note)
{
    return policy->slot_max + (note_uses(note) - 1) * EPOCHS + note_epoch(policy, note);
}

static void forget(struct kvist_policy *policy, uint32_t note)
{
    uint32_t *there = note_there(policy, note);
    KVIST_CHECK(*there > 0);
    (*there)--;
}

/* --- Ranking --------------------------------------------------------------------------------- */

static double age_width(uint32_t age)
{
    return (age + 1 < AGES ? age_starts[age + 1] : EPOCHS) - age_starts[age];
}

/* Reuses of a block in an epoch. What was seen of few blocks leans on the class of fewer uses. */
static void estimate(const struct reuse_class *class, double rates[AGES])
{
    for (uint32_t age = 0; age < AGES; age++) {
        rates[age] =
            (class->reused[age] + PRIOR_REUSES) / (class->exposed[age] + PRIOR_REUSES / rates[age]);
    }
}

/* The best ratio of hits to room and time over all times to keep a block of that age. */
static double index_of(const double rates[AGES], uint32_t age)
{
    double best = 0;
    double hits = 0;
    double room = 0;
    double left = 1;
    for (; age < AGES; age++) {
        double next = left * exp(-rates[age] * age_width(age));
        hits += left - next;
        room += (left - next) / rates[age];
        left = next;
        best = hits / room > best ? hits / room : best;
    }
    return best;
}

/* The oldest first, whatever its class. */
static void write_lru_order(struct kvist_policy *policy)
{
    uint32_t place = 0;
    for (uint32_t since = EPOCHS; since > 0; since--) {
        for (uint32_t class = 0; class < CLASSES; class ++) {
            uint32_t list = class * EPOCHS + (policy->epoch - since + 1) % EPOCHS;
            policy->places[list] = (uint16_t)place;
            policy->order[place++] = (uint16_t)list;
        }
    }
}

struct rank {
    double index;
    uint32_t class;
    uint32_t age; /* in age_starts */
};

static void write_order(struct kvist_policy *policy, const struct rank *ranks)
{
    uint32_t place = 0;
    for (uint32_t at = 0; at < CLASSES * AGES; at++) {
        for (uint32_t since = EPOCHS; since > 0; since--) {
            uint32_t epoch = (policy->epoch - since + 1) % EPOCHS;
            if (policy->ages[epoch] == ranks[at].age) {
                uint32_t list = ranks[at].class * EPOCHS + epoch;
                policy->places[list] = (uint16_t)place;
                policy->order[place++] = (uint16_t)list;
            }
        }
    }
}

/* What is left of an epoch when the one before is new no longer. */
static uint32_t new_until(const struct kvist_policy *policy)
{
    return policy->epoch_uses - policy->epoch_uses / 4;
}

static void rank_lists(struct kvist_policy *policy)
{
    struct rank ranks[CLASSES * AGES];
    double rates[AGES];
    for (uint32_t age = 0; age < AGES; age++) {
        rates[age] = PRIOR_RATE / (age_starts[age] + age_width(age) / 2 + PRIOR_AGE_AT_START);
    }
    uint32_t stay = policy->epoch_left > new_until(policy) ? 2 : 1;
    uint32_t count = 0;
    for (uint32_t class = 0; class < CLASSES; class ++) {
        estimate(&policy->classes[class], rates);
        for (uint32_t left = AGES; left > 0; left--) {
            struct rank rank = {index_of(rates, left - 1), class, left - 1};
            rank.index += left <= stay ? NEW_STAYS : 0;
            uint32_t at = count++;
            for (; at > 0 && ranks[at - 1].index > rank.index; at--) {
                ranks[at] = ranks[at - 1];
            }
            ranks[at] = rank;
        }
    }
    write_order(policy, ranks);
}

/* --- Epochs ---------------------------------------------------------------------------------- */

static void count_exposed(const struct kvist_policy *policy, struct reuse_class *class)
{
    for (uint32_t epoch = 0; epoch < EPOCHS; epoch++) {
        double there = class->there[epoch];
        /* What was used in this epoch has been there for half of it. */
        class->exposed[policy->ages[epoch]] += epoch == policy->epoch % EPOCHS ? there / 2 : there;
    }
}

/* What was seen with fewer blocks says less. */
static void fade(struct reuse_class *class, double growth)
{
    for (uint32_t age = 0; age < AGES; age++) {
        class->reused[age] *= FADE / (growth * growth);
        class->exposed[age] *= FADE / (growth * growth);
    }
}

static void set_ages(struct kvist_policy *policy)
{
    for (uint32_t since = 0; since < EPOCHS; since++) {
        uint32_t epoch = (policy->epoch - since) % EPOCHS;
        uint64_t uses = policy->uses_total - policy->starts[epoch];
        uint32_t age = 0;
        while (age + 1 < AGES && uses >= (uint64_t)age_starts[age + 1] * policy->epoch_uses) {
            age++;
        }
        policy->ages[epoch] = (uint8_t)age;
    }
}

/* The oldest two become one, and make place for the new one. */
static void begin_epoch(struct kvist_policy *policy)
{
    policy->epoch = (policy->epoch + 1) & NOTE_EPOCH_MASK;
    uint32_t place = policy->epoch % EPOCHS;
    uint32_t oldest = (place + 1) % EPOCHS;
    for (uint32_t class = 0; class < CLASSES; class ++) {
        uint32_t *there = policy->classes[class].there;
        there[oldest] += there[place];
        there[place] = 0;
        uint32_t first = policy->slot_max + class * EPOCHS;
        kvist_list_join(policy->links, first + oldest, first + place);
    }
    policy->starts[place] = policy->uses_total;
}

/* What was used since the last use of a block is what an LRU has put before it. */
static void see_what_lru_has(struct kvist_policy *policy)
{
    uint64_t newer = 0;
    for (uint32_t since = 0; since < EPOCHS; since++) {
        uint32_t epoch = (policy->epoch - since) % EPOCHS;
        for (uint32_t class = 0; class < CLASSES; class ++) {
            newer += policy->classes[class].there[epoch];
        }
        policy->lru_has[epoch] = newer <= policy->member_count;
    }
}

/* Whose order is used from here. */
static void take_turns(struct kvist_policy *policy)
{
    policy->hits *= TURN_FADE;
    policy->lru_hits *= TURN_FADE;
    policy->turn_left -= policy->turn_left > 0;
    double window = policy->epoch_uses / (1 - TURN_FADE);
    if (policy->by_lru && policy->turn_left == 0) {
        policy->by_lru = false;
        policy->turn_left = TURN_EPOCHS_STOOD;
        policy->hits = 0;
        policy->lru_hits = 0;
    } else if (!policy->by_lru && policy->lru_hits - policy->hits > window * TURN_MARGIN) {
        policy->by_lru = true;
        policy->turn_left = policy->turn_next;
        policy->turn_next =
            policy->turn_next * 2 < TURN_EPOCHS_MAX ? policy->turn_next * 2 : TURN_EPOCHS_MAX;
    } else if (!policy->by_lru && policy->turn_left == 0) {
        policy->turn_next = TURN_EPOCHS_MIN;
    }
}

static void next_epoch(struct kvist_policy *policy)
{
    uint32_t uses = policy->member_count / EPOCH_OF_BLOCKS;
    uses = uses > EPOCH_USES_MIN ? uses : EPOCH_USES_MIN;
    double growth = uses > policy->epoch_uses ? (double)uses / policy->epoch_uses : 1;
    for (uint32_t class = 0; class < CLASSES; class ++) {
        count_exposed(policy, &policy->classes[class]);
        fade(&policy->classes[class], growth);
    }
    policy->uses_total += policy->epoch_uses;
    policy->epoch_uses = uses;
    policy->epoch_left = uses;
    begin_epoch(policy);
    set_ages(policy);
    see_what_lru_has(policy);
    take_turns(policy);
    if (policy->by_lru) {
        write_lru_order(policy);
    } else {
        rank_lists(policy);
    }
}

static void count_use(struct kvist_policy *policy)
{
    if (--policy->epoch_left == 0) {
        next_epoch(policy);
    } else if (policy->epoch_left == new_until(policy) && !policy->by_lru) {
        rank_lists(policy);
    }
}

/* --- The policy ------------------------------------------------------------------------------ */

static void reuse_destroy(struct kvist_policy **policy)
{
    if (*policy != NULL) {
        KVIST_CHECK((*policy)->magic == REUSE_MAGIC);
        (*policy)->magic = 0;
        kvist_ghosts_destroy(&(*policy)->ghosts);
        free((*policy)->notes);
        free(*policy);
        *policy = NULL;
    }
}

static uint32_t ghosts_for(uint32_t slots)
{
    return slots < UINT32_MAX / GHOSTS_OF_SLOT ? slots * GHOSTS_OF_SLOT : UINT32_MAX - 1;
}

static enum kvist_status reuse_create(uint32_t slot_max, struct kvist_policy **policy_out)
{
    struct kvist_policy *policy =
        calloc(1, sizeof(*policy) + ((size_t)slot_max + LISTS) * sizeof(policy->links[0]));
    if (policy == NULL) {
        return KVIST_NO_MEMORY;
    }
    policy->magic = REUSE_MAGIC;
    policy->slot_max = slot_max;
    policy->epoch_uses = EPOCH_USES_MIN;
    policy->turn_next = TURN_EPOCHS_MIN;
    policy->epoch_left = EPOCH_USES_MIN;
    policy->notes = calloc(slot_max, sizeof(policy->notes[0]));
    enum kvist_status status = policy->notes == NULL ? KVIST_NO_MEMORY : KVIST_OK;
    if (status == KVIST_OK) {
        status = kvist_ghosts_create(ghosts_for(slot_max), &policy->ghosts);
    }
    if (status != KVIST_OK) {
        reuse_destroy(&policy);
        return status;
    }
    for (uint32_t list = 0; list < LISTS; list++) {
        kvist_list_init(policy->links, slot_max + list);
    }
    rank_lists(policy);
    *policy_out = policy;
    return KVIST_OK;
}

static void start(struct kvist_policy *policy, uint32_t slot, uint32_t uses)
{
    policy->notes[slot] = note_of(policy, uses);
    (*note_there(policy, policy->notes[slot]))++;
    kvist_list_push(policy->links, sentinel_of(policy, policy->notes[slot]), slot);
}

/* A block with that note was used. @return its uses now */
static uint32_t use(struct kvist_policy *policy, uint32_t note)
{
    note_class(policy, note)->reused[policy->ages[note_epoch(policy, note)]]++;
    policy->lru_hits += policy->lru_has[note_epoch(policy, note)];
    forget(policy, note);
    return note_uses(note) < CLASSES ? note_uses(note) + 1 : CLASSES;
}

static void reuse_insert(struct kvist_policy *policy, uint32_t slot, uint64_t key_tag)
{
    KVIST_CHECK(slot < policy->slot_max);
    count_use(policy);
    uint32_t note = kvist_ghosts_take(policy->ghosts, key_tag);
    start(policy, slot, note == 0 ? 1 : use(policy, note));
    policy->member_count++;
    kvist_ghosts_make_room(policy->ghosts, ghosts_for(policy->member_count));
}

static void reuse_touch(struct kvist_policy *policy, uint32_t slot)
{
    KVIST_CHECK(slot < policy->slot_max);
    kvist_list_remove(policy->links, slot);
    count_use(policy);
    policy->hits++;
    start(policy, slot, use(policy, policy->notes[slot]));
}

static void reuse_renew(struct kvist_policy *policy, uint32_t slot)
{
    KVIST_CHECK(slot < policy->slot_max);
    kvist_list_remove(policy->links, slot);
    forget(policy, policy->notes[slot]);
    start(policy, slot, note_uses(policy->notes[slot]));
}

static void reuse_remove(struct kvist_policy *policy, uint32_t slot, uint64_t key_tag, bool evicted)
{
    KVIST_CHECK(slot < policy->slot_max);
    kvist_list_remove(policy->links, slot);
    policy->member_count--;
    uint32_t forgotten = policy->notes[slot];
    if (evicted) {
        forgotten = kvist_ghosts_put(policy->ghosts, key_tag, policy->notes[slot]);
    }
    if (forgotten != 0) {
        forget(policy, forgotten);
    }
}

/* Where the list of a slot stands in the order. */
static uint32_t place_of(const struct kvist_policy *policy, uint32_t slot)
{
    return policy->places[sentinel_of(policy, policy->notes[slot]) - policy->slot_max];
}

static uint32_t reuse_victim(struct kvist_policy *policy, uint32_t after)
{
    uint32_t place = after == KVIST_SLOT_NONE ? 0 : place_of(policy, after);
    uint32_t next = after == KVIST_SLOT_NONE ? policy->slot_max + policy->order[0] : after;
    next = kvist_list_hotter(policy->links, next);
    while (next >= policy->slot_max && ++place < LISTS) {
        next = kvist_list_hotter(policy->links, policy->slot_max + policy->order[place]);
    }
    return next >= policy->slot_max ? KVIST_SLOT_NONE : next;
}

static uint32_t reuse_hottest(const struct kvist_policy *policy, uint32_t after)
{
    uint32_t place = after == KVIST_SLOT_NONE ? LISTS - 1 : place_of(policy, after);
    uint32_t next = after == KVIST_SLOT_NONE ? policy->slot_max + policy->order[place] : after;
    next = kvist_list_colder(policy->links, next);
    while (next >= policy->slot_max && place-- > 0) {
        next = kvist_list_colder(policy->links, policy->slot_max + policy->order[place]);
    }
    return next >= policy->slot_max ? KVIST_SLOT_NONE : next;
}

const struct kvist_policy_ops kvist_policy_reuse = {
    .name = "reuse",
    .create = reuse_create,
    .destroy = reuse_destroy,
    .insert = reuse_insert,
    .touch = reuse_touch,
    .renew = reuse_renew,
    .remove = reuse_remove,
    .victim = reuse_victim,
    .hottest = reuse_hottest,
};
