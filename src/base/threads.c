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

/*
 * Beside another program's busy thread, a thread that computes a share may be off its core for
 * milliseconds, and all wait for it: slower than doing without it. So after such a wait one thread
 * less takes part, for a time that doubles while this comes again soon.
 */
static const double LATE_SECONDS = 300e-6, SHORTEST_REST = 10e-3, LONGEST_REST = 160e-3;

/* Flags of the words below, above any number of shares. */
enum { ASLEEP = 1 << 30, STOP = 1 << 29 };

struct pool {
    int n_threads;
    int n_started;
    pthread_t *threads;
    double rest, rest_until; /* the caller's only */
    /* What is run. Read by who has claimed a share, and not changed before that is finished. */
    pool_fn fn;
    void *arg;
    unsigned n_shares;
    /* Threads that take part; those above sleep. */
    atomic_uint active;
    /* Each in a line of its own: all poll the first while the caller polls the second. */
    _Alignas(64) atomic_uint unclaimed;  /* shares, or STOP */
    _Alignas(64) atomic_uint unfinished; /* shares */
};

struct worker {
    struct pool *pool;
    unsigned index;
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

static bool is_there(atomic_uint *word, bool any)
{
    return ((atomic_load_explicit(word, memory_order_acquire) & ~(unsigned)ASLEEP) != 0) == any;
}

/* Spins until the word is not 0 (any) or 0 (!any); false if that took too long. */
static bool spin_for(atomic_uint *word, bool any)
{
    enum { PAUSES = 16 }; /* between two looks at the clock */
    double begin = 0;
    for (;;) {
        for (int i = 0; i < PAUSES; i++) {
            if (is_there(word, any)) return true;
            pause_core();
        }
        double now = clock_seconds();
        if (begin == 0) begin = now;
        if (now - begin > SPIN_SECONDS) return false;
    }
}

static void sleep_for(atomic_uint *word, bool any)
{
    double begin = clock_seconds();
    while (clock_seconds() - begin < YIELD_SECONDS) {
        if (is_there(word, any)) return;
        sched_yield();
    }
    unsigned value = atomic_load(word);
    while (!is_there(word, any)) {
        if (value & ASLEEP || atomic_compare_exchange_strong(word, &value, value | ASLEEP))
            futex_wait(word, value | ASLEEP);
        value = atomic_load(word);
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
    struct worker *worker = arg;
    struct pool *pool = worker->pool;
    unsigned index = worker->index, active;
    free(worker);
    while (!(atomic_load(&pool->unclaimed) & STOP)) {
        while ((active = atomic_load(&pool->active)) <= index) futex_wait(&pool->active, active);
        if (!spin_for(&pool->unclaimed, true)) sleep_for(&pool->unclaimed, true);
        if (atomic_load_explicit(&pool->active, memory_order_relaxed) > index) run_shares(pool);
    }
    return NULL;
}

static void announce(struct pool *pool, unsigned word)
{
    if (atomic_exchange(&pool->unclaimed, word) & ASLEEP) futex_wake_all(&pool->unclaimed);
}

static void set_active(struct pool *pool, unsigned n)
{
    if (atomic_exchange(&pool->active, n) < n) futex_wake_all(&pool->active);
}

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Waits for the others' shares. If it is long and they did not compute meanwhile, lets one rest. */
static void await_others(struct pool *pool)
{
    if (spin_for(&pool->unfinished, false)) return;
    double begin = clock_seconds(), cpu = cpu_seconds();
    sleep_for(&pool->unfinished, false);
    double now = clock_seconds(), waited = now - begin;
    if (waited < LATE_SECONDS || cpu_seconds() - cpu > waited / 2) return;
    bool again = now - pool->rest_until < LONGEST_REST;
    pool->rest = again && pool->rest > 0 ? pool->rest * 2 : SHORTEST_REST;
    if (pool->rest > LONGEST_REST) pool->rest = LONGEST_REST;
    pool->rest_until = now + pool->rest;
    set_active(pool, atomic_load(&pool->active) - 1);
}

void pool_run_shares(struct pool *pool, pool_fn fn, void *arg, int n_shares)
{
    unsigned active = atomic_load_explicit(&pool->active, memory_order_relaxed);
    if ((int)active < pool->n_threads && clock_seconds() > pool->rest_until) {
        set_active(pool, ++active);
        pool->rest_until = clock_seconds() + pool->rest;
    }
    if (active == 1 || n_shares == 1) {
        for (int i = 0; i < n_shares; i++) fn(arg, i, n_shares);
        return;
    }
    pool->fn = fn;
    pool->arg = arg;
    pool->n_shares = (unsigned)n_shares;
    atomic_store_explicit(&pool->unfinished, pool->n_shares, memory_order_relaxed);
    announce(pool, pool->n_shares);
    run_shares(pool);
    await_others(pool);
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
    set_active(pool, (unsigned)pool->n_threads + 1);
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
    atomic_store(&pool->active, (unsigned)n_threads);
    pool->threads = mem_new((size_t)n_threads, sizeof *pool->threads);
    for (int i = 1; i < n_threads; i++) {
        struct worker *worker = pool->threads ? mem_new(1, sizeof *worker) : NULL;
        if (worker) *worker = (struct worker){pool, (unsigned)i};
        if (!worker || thread_start(&pool->threads[pool->n_started], worker_main, worker)) {
            free(worker);
            pool_destroy(pool);
            return error_set(err, LINNET_MEMORY, "cannot start thread %d of %d; try --threads %d",
                             i + 1, n_threads, i);
        }
        pool->n_started++;
    }
    *out = pool;
    return LINNET_OK;
}
