#include "base/threads.h"

#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/memory.h"

/*
 * Workers wait for `generation` to change and count `pending` down. They spin for a short while
 * (a step has several barriers a layer, microseconds apart), then sleep on the condition, so that
 * an idle engine and a machine with a busy neighbour lose nothing to spinning.
 */
enum { SPINS = 4000, SPINS_BEFORE_YIELD = 1000 };

struct pool {
    int n_threads;
    int n_started;
    pthread_t *threads;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    pool_fn fn;
    void *arg;
    atomic_uint generation;
    atomic_int pending;
    atomic_int sleepers;
    atomic_bool stop;
};

struct worker {
    struct pool *pool;
    int index;
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

static inline void relax(int spin)
{
    if (spin >= SPINS_BEFORE_YIELD) {
        sched_yield();
        return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static unsigned wait_for_work(struct pool *pool, unsigned seen)
{
    for (int spin = 0; spin < SPINS; spin++) {
        unsigned now = atomic_load_explicit(&pool->generation, memory_order_acquire);
        if (now != seen) return now;
        relax(spin);
    }
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(&pool->sleepers, 1);
    while (atomic_load(&pool->generation) == seen) pthread_cond_wait(&pool->wake, &pool->mutex);
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->mutex);
    return atomic_load(&pool->generation);
}

static void *worker_main(void *arg)
{
    struct worker *worker = arg;
    struct pool *pool = worker->pool;
    int index = worker->index;
    free(worker);
    unsigned seen = 0;
    for (;;) {
        seen = wait_for_work(pool, seen);
        if (atomic_load(&pool->stop)) return NULL;
        pool->fn(pool->arg, index, pool->n_threads);
        atomic_fetch_sub_explicit(&pool->pending, 1, memory_order_release);
    }
}

static void announce(struct pool *pool)
{
    atomic_fetch_add(&pool->generation, 1); /* sequentially consistent: before reading sleepers */
    if (atomic_load(&pool->sleepers) == 0) return;
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
}

void pool_run(struct pool *pool, pool_fn fn, void *arg)
{
    if (pool->n_threads == 1) {
        fn(arg, 0, 1);
        return;
    }
    pool->fn = fn;
    pool->arg = arg;
    atomic_store_explicit(&pool->pending, pool->n_threads - 1, memory_order_relaxed);
    announce(pool);
    fn(arg, 0, pool->n_threads);
    for (int spin = 0; atomic_load_explicit(&pool->pending, memory_order_acquire) > 0;) {
        relax(spin);
        if (spin < SPINS_BEFORE_YIELD) spin++;
    }
}

int pool_threads(const struct pool *pool)
{
    return pool->n_threads;
}

/* cgroup v2 "max 100000" or "150000 100000": quota / period, rounded up; 0 if none. */
static int cgroup_limit(void)
{
    FILE *f = fopen("/sys/fs/cgroup/cpu.max", "r");
    if (!f) return 0;
    long quota, period;
    int n = fscanf(f, "%ld %ld", &quota, &period);
    fclose(f);
    return n == 2 && quota > 0 && period > 0 ? (int)((quota + period - 1) / period) : 0;
}

int pool_default_threads(void)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    int limit = cgroup_limit();
    if (limit > 0 && limit < n) n = limit;
    return n < 1 ? 1 : n;
}

void pool_destroy(struct pool *pool)
{
    if (!pool) return;
    atomic_store(&pool->stop, true);
    announce(pool);
    for (int i = 0; i < pool->n_started; i++) pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->mutex);
    free(pool->threads);
    free(pool);
}

linnet_status pool_create(int n_threads, struct pool **out, linnet_error *err)
{
    if (n_threads == 0) n_threads = pool_default_threads();
    if (n_threads < 1 || n_threads > 1024)
        return error_set(err, LINNET_INVALID, "threads must be between 1 and 1024, not %d",
                         n_threads);
    struct pool *pool = mem_new(1, sizeof *pool);
    if (!pool) return error_memory(err, "the thread pool", sizeof *pool);
    pool->n_threads = n_threads;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pool->threads = mem_new((size_t)n_threads, sizeof *pool->threads);
    for (int i = 1; i < n_threads; i++) {
        struct worker *worker = pool->threads ? mem_new(1, sizeof *worker) : NULL;
        if (worker) *worker = (struct worker){pool, i};
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
