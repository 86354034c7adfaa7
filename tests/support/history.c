/* See history.h. Time is one counter, so that "before" is never a guess. */
#include "support/history.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "base/checked.h"

/* version: key << 48 | thread << 40 | number, numbers from 1 on */
#define NUMBER_MASK ((UINT64_C(1) << 40) - 1)
#define ENDED_TAKEN 1u
#define ENDED_NOT_TAKEN 0u

struct store_end {
    _Atomic uint64_t number; /* 0: being written */
    _Atomic uint64_t end;    /* tick << 1 | taken */
};

struct history {
    _Atomic uint64_t tick;
    _Atomic uint64_t purged[HISTORY_KEYS];   /* the last begin of a purge that has returned */
    _Atomic uint64_t begun[HISTORY_THREADS]; /* number of the last store */
    _Atomic uint64_t ended[HISTORY_THREADS];
    struct store_end ring[HISTORY_THREADS][HISTORY_RING];
};

struct history *history_new(void)
{
    return calloc(1, sizeof(struct history));
}

void history_free(struct history *history)
{
    free(history);
}

static uint64_t now(struct history *history)
{
    return atomic_fetch_add(&history->tick, 1) + 1;
}

uint64_t history_store_begin(struct history *history, uint32_t thread, uint32_t key)
{
    uint64_t number = atomic_fetch_add(&history->begun[thread], 1) + 1;

    return (uint64_t)key << 48 | (uint64_t)thread << 40 | number;
}

void history_store_end(struct history *history, uint64_t version, bool taken)
{
    uint32_t thread = (uint32_t)(version >> 40) & 0xff;
    uint64_t number = version & NUMBER_MASK;
    struct store_end *slot = &history->ring[thread][number % HISTORY_RING];

    atomic_store(&slot->number, 0);
    atomic_store(&slot->end, now(history) << 1 | (taken ? ENDED_TAKEN : ENDED_NOT_TAKEN));
    atomic_store(&slot->number, number);
    if (number > atomic_load(&history->ended[thread]))
        atomic_store(&history->ended[thread], number);
}

uint64_t history_purge_begin(struct history *history)
{
    return now(history);
}

void history_purge_end(struct history *history, uint32_t key, uint64_t begun)
{
    uint64_t last = atomic_load(&history->purged[key]);

    while (last < begun && !atomic_compare_exchange_weak(&history->purged[key], &last, begun)) {
    }
}

uint64_t history_load_begin(struct history *history, uint32_t key)
{
    return atomic_load(&history->purged[key]);
}

/* When the store ended, at the latest; UINT64_MAX: not known, or not yet. */
static uint64_t end_of(struct history *history, uint32_t thread, uint64_t number, bool *taken)
{
    struct store_end *slot = &history->ring[thread][number % HISTORY_RING];
    uint64_t last = atomic_load(&history->ended[thread]), end;

    *taken = true;
    if (atomic_load(&slot->number) == number) {
        end = atomic_load(&slot->end);
        if (atomic_load(&slot->number) == number) {
            *taken = (end & 1) == ENDED_TAKEN;
            return end >> 1;
        }
    }
    if (number + HISTORY_RING / 2 > last) /* in flight, or just being overwritten */
        return UINT64_MAX;
    /* Forgotten. A store of the same thread that is still remembered ended later. */
    number = last - HISTORY_RING / 2;
    slot = &history->ring[thread][number % HISTORY_RING];
    end = atomic_load(&slot->end);
    return atomic_load(&slot->number) == number ? end >> 1 : UINT64_MAX;
}

enum history_verdict history_load_check(struct history *history, uint32_t key, uint64_t begun,
                                        uint64_t version)
{
    uint32_t thread = (uint32_t)(version >> 40) & 0xff;
    uint64_t number = version & NUMBER_MASK;
    bool taken;
    uint64_t end;

    if (version >> 48 != key || thread >= HISTORY_THREADS || !number)
        return HISTORY_OTHER_KEY;
    if (number > atomic_load(&history->begun[thread]))
        return HISTORY_NEVER_BEGUN;
    end = end_of(history, thread, number, &taken);
    if (!taken)
        return HISTORY_NOT_TAKEN;
    return end < begun ? HISTORY_PURGED : HISTORY_FINE;
}

const char *history_verdict_name(enum history_verdict verdict)
{
    static const char *const names[] = {"fine", "another key's bytes", "bytes never stored",
                                        "bytes of a store that was refused", "purged bytes"};

    return (unsigned)verdict < KVT_ARRAY_LEN(names) ? names[verdict] : "?";
}
