/* The pool: each share once, whoever runs it; idle threads sleep; the default number of threads. */
#include <sched.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/threads.h"
#include "base/threads_internal.h"
#include "scratch.h"

enum { MAX_SHARES = 64 };

struct counting {
    int seen[MAX_SHARES]; /* each by its share only: a share run twice at once is a data race */
    int n_shares;
    bool wrong;
    unsigned slow; /* microseconds that the last share takes */
};

static void count(void *arg, int share, int n_shares)
{
    struct counting *c = arg;
    if (share < 0 || share >= c->n_shares || n_shares != c->n_shares) c->wrong = true;
    if (c->slow && share == n_shares - 1) usleep(c->slow);
    c->seen[share]++;
}

static struct pool *pool_of(int n_threads)
{
    struct pool *pool;
    linnet_error err;
    assert_ok(pool_create(n_threads, &pool, &err), err);
    assert_int_equal(pool_threads(pool), n_threads);
    return pool;
}

static void each_share_once(void **state)
{
    (void)state;
    static const int shares[] = {1, 2, 3, 5, 8, 64, 4};
    for (int n_threads = 1; n_threads <= 5; n_threads++) {
        struct pool *pool = pool_of(n_threads);
        struct counting c[7];
        memset(c, 0, sizeof c);
        for (int round = 0; round < 2000; round++) {
            struct counting *now = &c[round % 7];
            now->n_shares = shares[round % 7];
            now->slow = round % 400 == 3 ? 1000 : 0; /* the others wait, perhaps asleep */
            if (round % 500 == 0) usleep(2000);      /* long enough that the workers sleep */
            pool_run_shares(pool, count, now, now->n_shares);
            assert_int_equal(now->seen[now->n_shares - 1], round / 7 + 1);
        }
        for (int i = 0; i < 7; i++) {
            assert_false(c[i].wrong);
            for (int j = 0; j < shares[i]; j++) assert_int_equal(c[i].seen[j], (1999 - i) / 7 + 1);
        }
        pool_destroy(pool);
    }
}

static void run_is_a_share_a_thread(void **state)
{
    (void)state;
    struct pool *pool = pool_of(3);
    struct counting c = {.n_shares = 3};
    for (int i = 0; i < 100; i++) pool_run(pool, count, &c);
    assert_false(c.wrong);
    for (int i = 0; i < 3; i++) assert_int_equal(c.seen[i], 100);
    pool_run_shares(pool, count, &c, 0);
    for (int i = 0; i < 3; i++) assert_int_equal(c.seen[i], 100);
    pool_destroy(pool);
}

/* One thread that spins takes 0.3 s of these 0.3 s. The least of three rounds: time that another
 * machine has stolen may be counted as ours. */
static void idle_threads_sleep(void **state)
{
    (void)state;
    struct pool *pool = pool_of(4);
    struct counting c = {.n_shares = 4};
    double idle = 1, waiting = 1;
    for (int i = 0; i < 100; i++) pool_run(pool, count, &c);
    for (int round = 0; round < 3; round++) {
        double before = cpu_seconds();
        usleep(300000);
        double took = cpu_seconds() - before;
        if (took < idle) idle = took;
    }
    c.slow = 300000; /* those that wait for a share of another */
    for (int round = 0; round < 3; round++) {
        double before = cpu_seconds();
        pool_run(pool, count, &c);
        double took = cpu_seconds() - before;
        if (took < waiting) waiting = took;
    }
    assert_true(idle < 0.1);
    assert_true(waiting < 0.1);
    pool_destroy(pool);
}

/* A share that its thread cannot finish for a while is waited for; those not begun are not. */
struct blocking {
    atomic_int finished;
    bool all_but_one_before;
};

static void block(void *arg, int share, int n_shares)
{
    struct blocking *b = arg;
    if (share == 0) {
        double begin = clock_seconds();
        while (atomic_load(&b->finished) < n_shares - 1 && clock_seconds() - begin < 10)
            usleep(100);
        b->all_but_one_before = atomic_load(&b->finished) == n_shares - 1;
    }
    atomic_fetch_add(&b->finished, 1);
}

static void shares_of_a_late_thread_are_run_by_others(void **state)
{
    (void)state;
    for (int i = 0; i < 20; i++) {
        struct pool *pool = pool_of(2); /* new: one that has waited long may run without others */
        struct blocking b = {0};
        pool_run_shares(pool, block, &b, 16);
        assert_true(b.all_but_one_before);
        assert_int_equal(b.finished, 16);
        pool_destroy(pool);
    }
}

static void numbers_out_of_range(void **state)
{
    (void)state;
    struct pool *pool;
    linnet_error err;
    assert_int_equal(pool_create(-1, &pool, &err), LINNET_INVALID);
    assert_int_equal(pool_create(1025, &pool, &err), LINNET_INVALID);
    assert_ok(pool_create(0, &pool, &err), err);
    assert_int_equal(pool_threads(pool), pool_default_threads());
    assert_in_range(pool_default_threads(), 1, sysconf(_SC_NPROCESSORS_CONF));
    pool_destroy(pool);
}

/* ---- the default number of threads --------------------------------------------------------- */

struct tree {
    char root[64];
    cpu_set_t mask;
};

/* A file with its directories. */
static void put(const struct tree *t, const char *path, const char *text)
{
    char name[512];
    snprintf(name, sizeof name, "%s%s", t->root, path);
    for (char *slash = name + strlen(t->root) + 1; (slash = strchr(slash, '/')); *slash++ = '/') {
        *slash = 0;
        mkdir(name, 0777);
    }
    FILE *f = fopen(name, "w");
    if (!f) fail_msg("cannot write %s", name);
    fputs(text, f);
    fclose(f);
}

/* A machine of n processors; with SMT, i and i + n / 2 are of one core. */
static struct tree machine(int n, bool smt)
{
    struct tree t;
    snprintf(t.root, sizeof t.root, "%s", scratch_create());
    CPU_ZERO(&t.mask);
    for (int i = 0; i < n; i++) {
        char path[128], list[32];
        CPU_SET(i, &t.mask);
        if (smt)
            snprintf(list, sizeof list, "%d,%d\n", i % (n / 2), i % (n / 2) + n / 2);
        else
            snprintf(list, sizeof list, "%d\n", i);
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list",
                 i);
        put(&t, path, list);
    }
    return t;
}

static void tree_remove(const struct tree *t)
{
    char command[128];
    snprintf(command, sizeof command, "rm -r '%s'", t->root);
    assert_int_equal(system(command), 0);
}

static int threads_of(const struct tree *t)
{
    return threads_for(t->root, &t->mask, sizeof t->mask);
}

static void cores_count_once(void **state)
{
    (void)state;
    struct tree t = machine(16, true);
    assert_int_equal(threads_of(&t), 8);
    CPU_CLR(3, &t.mask); /* its sibling is still there */
    assert_int_equal(threads_of(&t), 8);
    CPU_CLR(11, &t.mask);
    assert_int_equal(threads_of(&t), 7);
    put(&t, "/sys/devices/system/cpu/cpu1/topology/thread_siblings_list", "0-2,8-10\n");
    put(&t, "/sys/devices/system/cpu/cpu9/topology/thread_siblings_list", "broken\n");
    assert_int_equal(threads_of(&t), 7); /* 1 belongs to 0's, 9 is taken for a core */
    CPU_ZERO(&t.mask);
    CPU_SET(8, &t.mask);
    assert_int_equal(threads_of(&t), 1);
    tree_remove(&t);
    t = machine(6, false);
    assert_int_equal(threads_of(&t), 6);
    tree_remove(&t);
    assert_int_equal(threads_for("/nowhere", &t.mask, sizeof t.mask), 6);
    CPU_ZERO(&t.mask);
    assert_int_equal(threads_for("/nowhere", &t.mask, sizeof t.mask), 1);
}

static void control_groups_version_2(void **state)
{
    (void)state;
    struct tree t = machine(16, false);
    put(&t, "/proc/self/cgroup", "0::/user.slice/linnet.service\n");
    assert_int_equal(threads_of(&t), 16);
    put(&t, "/sys/fs/cgroup/user.slice/linnet.service/cpu.max", "max 100000\n");
    assert_int_equal(threads_of(&t), 16);
    put(&t, "/sys/fs/cgroup/user.slice/cpu.max", "350000 100000\n");
    assert_int_equal(threads_of(&t), 4);
    put(&t, "/sys/fs/cgroup/user.slice/linnet.service/cpu.max", "600000 100000\n");
    assert_int_equal(threads_of(&t), 4);
    put(&t, "/sys/fs/cgroup/user.slice/linnet.service/cpu.max", "20000 10000\n");
    assert_int_equal(threads_of(&t), 2);
    put(&t, "/sys/fs/cgroup/user.slice/linnet.service/cpu.max", "5000 100000\n");
    assert_int_equal(threads_of(&t), 1);
    put(&t, "/proc/self/cgroup", "0::/\n"); /* in a container, its own group is the root */
    assert_int_equal(threads_of(&t), 16);
    put(&t, "/sys/fs/cgroup/cpu.max", "300000 100000\n");
    assert_int_equal(threads_of(&t), 3);
    put(&t, "/proc/self/cgroup", "0::/docker/0123abc\n"); /* or has a name of the host's */
    assert_int_equal(threads_of(&t), 3);
    put(&t, "/proc/self/cgroup", "0::/user.slice/other\n");
    assert_int_equal(threads_of(&t), 3);
    put(&t, "/sys/fs/cgroup/cpu.max", "0 0\n");
    assert_int_equal(threads_of(&t), 4);
    tree_remove(&t);
}

static void control_groups_version_1(void **state)
{
    (void)state;
    struct tree t = machine(16, false);
    put(&t, "/proc/self/cgroup",
        "12:cpuset:/a/b\n9:name=systemd:/a:c\n4:cpuacct,cpu:/a/b\nnonsense\n0::/\n");
    put(&t, "/sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us", "-1\n");
    put(&t, "/sys/fs/cgroup/cpu/a/b/cpu.cfs_period_us", "100000\n");
    assert_int_equal(threads_of(&t), 16);
    put(&t, "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
    put(&t, "/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    put(&t, "/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "450000\n");
    put(&t, "/sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "50000\n");
    assert_int_equal(threads_of(&t), 9);
    put(&t, "/sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us", "250000\n");
    assert_int_equal(threads_of(&t), 3);
    put(&t, "/sys/fs/cgroup/cpu.max", "200000 100000\n"); /* both versions at once */
    assert_int_equal(threads_of(&t), 2);
    tree_remove(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_share_once),
        cmocka_unit_test(run_is_a_share_a_thread),
        cmocka_unit_test(idle_threads_sleep),
        cmocka_unit_test(shares_of_a_late_thread_are_run_by_others),
        cmocka_unit_test(numbers_out_of_range),
        cmocka_unit_test(cores_count_once),
        cmocka_unit_test(control_groups_version_2),
        cmocka_unit_test(control_groups_version_1),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
