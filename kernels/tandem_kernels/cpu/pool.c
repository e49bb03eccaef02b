// SPDX-License-Identifier: Apache-2.0
// A pool of kernel threads. Ops are microseconds apart, so a waiting thread spins briefly before it sleeps on a futex.
// The caller waits for tasks, not for threads: a worker that has lost its core costs nothing unless it holds a task.
// Where that happens, other programs need the cores: the caller then works alone for a while, at half speed rather than
// at a tenth.
#define _GNU_SOURCE
#include "pool.h"
#include "vec.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SPINS 4000
#define STALL_NS 50000
#define MIN_SOLO_NS 50000
#define MAX_SOLO_NS 4000000 // about a time slice of a busy machine

static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static int num_workers = 0;
static _Atomic int target_threads = 1;
static _Atomic int num_sleeping = 0;
static _Atomic uint32_t generation = 0;

// The job. Its fields change only between jobs, when every task is done. Each thread has a share of the tasks, always the
// same one in jobs of the same size: what a task wrote last time, a sequence's state say, is then still in that core's
// cache. Whoever is through with its own share helps with the others'. A share's ticket is the job's generation (upper
// half) and its next unclaimed task: a claim succeeds only if neither has moved since the fields were read.
static struct { _Alignas(128) _Atomic uint64_t ticket; } shares[MAX_THREADS];
static _Atomic long num_done = 0;
static _Atomic long job_tasks = 0;
static _Atomic long job_grain = 1;
static _Atomic int job_shares = 1;
static _Atomic(task_fn) job_fn;
static _Atomic(void *) job_context;

static int64_t solo_until_ns = 0, next_solo_ns = MIN_SOLO_NS;

static struct { void *memory; long bytes; } scratch[MAX_THREADS];

INLINE long share_start(long num_tasks, int share, int num_shares) { return num_tasks * share / num_shares; }

static void run_share(uint32_t job, int share, int thread) {
    for (;;) {
        uint64_t now = atomic_load(&shares[share].ticket);
        long first = (uint32_t)now, end = share_start(job_tasks, share + 1, job_shares), grain = job_grain;
        task_fn fn = job_fn;
        void *context = job_context;
        if (now >> 32 != job || first >= end) return;
        long last = min_long(first + grain, end);
        if (!atomic_compare_exchange_weak(&shares[share].ticket, &now, now + (last - first))) continue;
        for (long task = first; task < last; task++) fn(context, task, thread);
        atomic_fetch_add(&num_done, last - first);
    }
}

static void run_tasks(uint32_t job, int thread) {
    int num_shares = job_shares;
    for (int i = 0; i < num_shares; i++) run_share(job, (thread + i) % num_shares, thread);
}

static uint32_t wait_for_job(uint32_t seen) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load(&generation) != seen) return generation;
        __builtin_ia32_pause();
    }
    // The kernel compares generation again before it sleeps, so a job posted in between is not missed.
    atomic_fetch_add(&num_sleeping, 1);
    while (atomic_load(&generation) == seen) syscall(SYS_futex, &generation, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&num_sleeping, 1);
    return generation;
}

static void *worker(void *argument) {
    int thread = (int)(intptr_t)argument;
    uint32_t job = 0;
    for (;;) {
        job = wait_for_job(job);
        if (thread < target_threads) run_tasks(job, thread);
    }
    return NULL;
}

// A forked child has the parent's counters but none of its threads.
static void forget_workers(void) {
    num_workers = 0;
    num_sleeping = 0;
    pthread_mutex_init(&pool_lock, NULL);
}

static void start_workers(int wanted) {
    static int registered = 0;
    if (!registered) { pthread_atfork(NULL, NULL, forget_workers); registered = 1; }
    while (num_workers < wanted) {
        pthread_t id;
        if (pthread_create(&id, NULL, worker, (void *)(intptr_t)(num_workers + 1)) != 0) return;
        pthread_detach(id);
        num_workers++;
    }
}

// Number of threads that run kernels, the caller's included; returns how many there are now.
EXPORT int tandem_set_num_threads(int n) {
    if (n < 1 || n > MAX_THREADS) return -1;
    pthread_mutex_lock(&pool_lock);
    start_workers(n - 1);
    target_threads = min_long(n, num_workers + 1);
    pthread_mutex_unlock(&pool_lock);
    return target_threads;
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// A stall is a wait longer than the caller's own share of the job and a scheduler's notice. The pause doubles with each
// stall and shrinks with each job without one.
static void learn_from_wait(int64_t own_ns, int64_t wait_ns, int64_t now) {
    if (wait_ns > own_ns + STALL_NS) {
        solo_until_ns = now + next_solo_ns;
        next_solo_ns = min_long(2 * next_solo_ns, MAX_SOLO_NS);
    } else {
        int64_t shrunk = next_solo_ns - next_solo_ns / 128;
        next_solo_ns = shrunk > MIN_SOLO_NS ? shrunk : MIN_SOLO_NS;
    }
}

void parallel_for(long num_tasks, long grain, task_fn fn, void *context) {
    // A second caller at the same time waits: thread 0's scratch belongs to whoever holds the lock.
    pthread_mutex_lock(&pool_lock);
    int solo = num_tasks <= grain || target_threads == 1 || num_workers == 0;
    if (!solo && solo_until_ns > 0) {
        solo = now_ns() < solo_until_ns;
        if (!solo) solo_until_ns = 0;
    }
    if (solo) {
        for (long task = 0; task < num_tasks; task++) fn(context, task, 0);
    } else {
        uint32_t job = generation + 1;
        // Nothing can be claimed while the fields change: a late worker would run a task of half the old job.
        int num_shares = target_threads;
        for (int i = 0; i < num_shares; i++) shares[i].ticket = (uint64_t)job << 32 | UINT32_MAX;
        int64_t start = now_ns();
        job_tasks = num_tasks;
        job_grain = grain;
        job_shares = num_shares;
        job_fn = fn;
        job_context = context;
        num_done = 0;
        for (int i = 0; i < num_shares; i++)
            shares[i].ticket = (uint64_t)job << 32 | (uint32_t)share_start(num_tasks, i, num_shares);
        generation = job;
        if (num_sleeping > 0) syscall(SYS_futex, &generation, FUTEX_WAKE_PRIVATE, num_workers, NULL, NULL, 0);
        run_tasks(job, 0);
        int64_t own_done = now_ns();
        // A worker that holds a task may have lost its core: give ours up rather than spin against it.
        for (int spins = 0; num_done < num_tasks; spins++) {
            if (spins < SPINS) __builtin_ia32_pause();
            else sched_yield();
        }
        int64_t end = now_ns();
        learn_from_wait(own_done - start, end - own_done, end);
    }
    pthread_mutex_unlock(&pool_lock);
}

void *thread_scratch(int thread, long bytes) {
    if (scratch[thread].bytes < bytes) {
        free(scratch[thread].memory);
        long rounded = (bytes + 4095) & ~4095L;
        scratch[thread].memory = aligned_alloc(64, rounded);
        scratch[thread].bytes = scratch[thread].memory ? rounded : 0;
    }
    return scratch[thread].memory;
}
