/*
 * threads.h - a pool that runs one function on all its threads at once. Work is split by index,
 * the same way each time: who computes a value never changes what it is.
 */
#ifndef LINNET_BASE_THREADS_H
#define LINNET_BASE_THREADS_H

#include <pthread.h>

#include "base/error.h"

struct pool;

typedef void (*pool_fn)(void *arg, int thread, int n_threads);

/* pthread_create with all signals blocked: they are the program's affair and must not land on a
 * thread that it does not know. 0 or an errno. */
int thread_start(pthread_t *thread, void *(*fn)(void *), void *arg);

/* n_threads counts the caller; 1 starts no thread. 0 takes the machine's (pool_default_threads). */
linnet_status pool_create(int n_threads, struct pool **out, linnet_error *err);
void pool_destroy(struct pool *pool);
int pool_threads(const struct pool *pool);

/* Cores this process may use (affinity mask, control groups' quotas). At least 1. */
int pool_default_threads(void);

/*
 * Runs fn(arg, 0..n_shares-1, n_shares), each once, on the pool's threads, the caller among them;
 * returns when all are done. Whoever is free takes the next share, in order, so a thread may run
 * several and several runs' shares may be the caller's alone: `thread` is the share's number, which
 * alone may decide what is computed and which scratch memory is used (so that has n_shares parts).
 * Shares must not wait for one another. One run at a time, and none from within a share.
 *
 * More shares than threads brought nothing where it was tried: docs/experiments.md, 10.
 */
void pool_run_shares(struct pool *pool, pool_fn fn, void *arg, int n_shares);

/* The same with one share a thread. */
void pool_run(struct pool *pool, pool_fn fn, void *arg);

/* The share [*begin, *end) of n items, in units of `grain`, that falls to a thread. */
static inline void pool_share(int64_t n, int64_t grain, int thread, int n_threads, int64_t *begin,
                              int64_t *end)
{
    int64_t units = (n + grain - 1) / grain;
    *begin = units * thread / n_threads * grain;
    *end = units * (thread + 1) / n_threads * grain;
    if (*begin > n) *begin = n;
    if (*end > n) *end = n;
}

#endif
