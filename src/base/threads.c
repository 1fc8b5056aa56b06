#include "base/threads.h"

#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/limits.h"
#include "base/memory.h"

/*
 * Both sides of a run wait in the same way: they spin for a while (a step has several runs a layer,
 * microseconds apart), then yield, then sleep, so that an idle engine leaves its cores to others.
 */
static const double SPIN_SECONDS = 20e-6, YIELD_SECONDS = 80e-6;

/* Flags of the words below, above any number of shares. */
enum { ASLEEP = 1 << 30, STOP = 1 << 29 };

struct pool {
    int n_threads;
    int n_started;
    pthread_t *threads;
    /* What is run. Read by who has claimed a share, and not changed before that is finished. */
    pool_fn fn;
    void *arg;
    unsigned n_shares;
    /* Each in a line of its own: all poll the first while the caller polls the second. */
    _Alignas(64) atomic_uint unclaimed;  /* shares, or STOP */
    _Alignas(64) atomic_uint unfinished; /* shares */
};

int thread_start(pthread_t *thread, void *(*fn)(void *), void *arg)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(thread, NULL, fn, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed;
}

/* ---- waiting ----------------------------------------------------------------------------- */

static void futex_wait(atomic_uint *word, unsigned value)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake_all(atomic_uint *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1 << 30, NULL, NULL, 0);
}

static inline void pause_core(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static bool is_there(unsigned value, bool any)
{
    return ((value & ~(unsigned)ASLEEP) != 0) == any;
}

/* Waits until the word is not 0 (any), or is 0 (!any). */
static void wait_for(atomic_uint *word, bool any)
{
    enum { PAUSES = 16 }; /* between two looks at the clock */
    double begin = 0, waited = 0;
    while (waited < SPIN_SECONDS + YIELD_SECONDS) {
        for (int i = 0; i < PAUSES; i++) {
            if (is_there(atomic_load_explicit(word, memory_order_acquire), any)) return;
            pause_core();
        }
        if (waited > SPIN_SECONDS) sched_yield();
        double now = clock_seconds();
        if (begin == 0) begin = now;
        waited = now - begin;
    }
    for (;;) { /* one load: what is looked at is what the exchange expects */
        unsigned value = atomic_load(word);
        if (is_there(value, any)) return;
        if (value & ASLEEP || atomic_compare_exchange_strong(word, &value, value | ASLEEP))
            futex_wait(word, value | ASLEEP);
    }
}

/* ---- running ----------------------------------------------------------------------------- */

/*
 * Runs shares while there are any unclaimed. They may be of a later run than the one that brought
 * the thread here: what is run is read after a share of it has been claimed.
 */
static void run_shares(struct pool *pool)
{
    unsigned left = atomic_load_explicit(&pool->unclaimed, memory_order_relaxed);
    while (left > 0 && left < STOP) {
        if (!atomic_compare_exchange_weak_explicit(&pool->unclaimed, &left, left - 1,
                                                   memory_order_acquire, memory_order_relaxed))
            continue;
        pool->fn(pool->arg, (int)(pool->n_shares - left), (int)pool->n_shares);
        if (atomic_fetch_sub_explicit(&pool->unfinished, 1, memory_order_acq_rel) == (ASLEEP | 1))
            futex_wake_all(&pool->unfinished);
        left = atomic_load_explicit(&pool->unclaimed, memory_order_relaxed);
    }
}

static void *worker_main(void *arg)
{
    struct pool *pool = arg;
    while (!(atomic_load_explicit(&pool->unclaimed, memory_order_relaxed) & STOP)) {
        wait_for(&pool->unclaimed, true);
        run_shares(pool);
    }
    return NULL;
}

static void announce(struct pool *pool, unsigned word)
{
    if (atomic_exchange(&pool->unclaimed, word) & ASLEEP) futex_wake_all(&pool->unclaimed);
}

void pool_run_shares(struct pool *pool, pool_fn fn, void *arg, int n_shares)
{
    if (pool->n_threads == 1 || n_shares == 1) {
        for (int i = 0; i < n_shares; i++) fn(arg, i, n_shares);
        return;
    }
    pool->fn = fn;
    pool->arg = arg;
    pool->n_shares = (unsigned)n_shares;
    atomic_store_explicit(&pool->unfinished, pool->n_shares, memory_order_relaxed);
    announce(pool, pool->n_shares);
    run_shares(pool);
    wait_for(&pool->unfinished, false);
}

void pool_run(struct pool *pool, pool_fn fn, void *arg)
{
    pool_run_shares(pool, fn, arg, pool->n_threads);
}

int pool_threads(const struct pool *pool)
{
    return pool->n_threads;
}

void pool_destroy(struct pool *pool)
{
    if (!pool) return;
    announce(pool, STOP);
    for (int i = 0; i < pool->n_started; i++) pthread_join(pool->threads[i], NULL);
    free(pool->threads);
    free(pool);
}

linnet_status pool_create(int n_threads, struct pool **out, linnet_error *err)
{
    if (n_threads == 0) n_threads = pool_default_threads();
    if (n_threads < 1 || n_threads > LIMIT_THREADS)
        return error_set(err, LINNET_INVALID, "threads must be between 1 and %d, not %d",
                         LIMIT_THREADS, n_threads);
    struct pool *pool = aligned_alloc(_Alignof(struct pool), sizeof *pool);
    if (!pool) return error_memory(err, "the thread pool", sizeof *pool);
    memset(pool, 0, sizeof *pool);
    pool->n_threads = n_threads;
    pool->threads = mem_new((size_t)n_threads, sizeof *pool->threads);
    for (int i = 1; i < n_threads; i++) {
        if (!pool->threads || thread_start(&pool->threads[i - 1], worker_main, pool)) {
            pool_destroy(pool);
            return error_set(err, LINNET_MEMORY, "cannot start thread %d of %d; try --threads %d",
                             i + 1, n_threads, i);
        }
        pool->n_started++;
    }
    *out = pool;
    return LINNET_OK;
}
