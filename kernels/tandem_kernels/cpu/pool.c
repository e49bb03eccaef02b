// SPDX-License-Identifier: Apache-2.0
// A pool of kernel threads. Ops are microseconds apart, so a waiting thread spins briefly before it sleeps on a futex.
#define _GNU_SOURCE
#include "pool.h"
#include "vec.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SPINS 4000

static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static int num_workers = 0;
static _Atomic int target_threads = 1;
static _Atomic uint32_t generation = 0;
static _Atomic long next_task = 0;
static _Atomic int num_running = 0;
static _Atomic int num_sleeping = 0;
static long job_tasks;
static task_fn job_fn;
static void *job_context;
static struct { void *memory; long bytes; } scratch[MAX_THREADS];

static void run_tasks(int thread) {
    for (;;) {
        long task = atomic_fetch_add_explicit(&next_task, 1, memory_order_relaxed);
        if (task >= job_tasks) return;
        job_fn(job_context, task, thread);
    }
}

static void wait_for_change(uint32_t seen) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&generation, memory_order_acquire) != seen) return;
        __builtin_ia32_pause();
    }
    // The kernel compares generation again before it sleeps, so a job posted in between is not missed.
    atomic_fetch_add(&num_sleeping, 1);
    while (atomic_load(&generation) == seen) syscall(SYS_futex, &generation, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&num_sleeping, 1);
}

static void *worker(void *argument) {
    int thread = (int)(intptr_t)argument;
    uint32_t seen = 0;
    for (;;) {
        wait_for_change(seen);
        seen = atomic_load_explicit(&generation, memory_order_acquire);
        if (thread < atomic_load_explicit(&target_threads, memory_order_relaxed)) run_tasks(thread);
        atomic_fetch_sub_explicit(&num_running, 1, memory_order_release);
    }
    return NULL;
}

// A forked child has the parent's counters but none of its threads.
static void forget_workers(void) {
    num_workers = 0;
    generation = 0;
    num_running = 0;
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

// Number of threads that run kernels, the caller's included. Workers are started once, by the first call that sets it.
EXPORT int tandem_set_num_threads(int n) {
    if (n < 1 || n > MAX_THREADS) return -1;
    pthread_mutex_lock(&pool_lock);
    if (num_workers == 0) start_workers(n - 1);
    atomic_store(&target_threads, min_long(n, num_workers + 1));
    pthread_mutex_unlock(&pool_lock);
    return atomic_load(&target_threads);
}

void parallel_for(long num_tasks, task_fn fn, void *context) {
    // A second caller at the same time waits: thread 0's scratch belongs to whoever holds the lock.
    pthread_mutex_lock(&pool_lock);
    job_tasks = num_tasks;
    job_fn = fn;
    job_context = context;
    atomic_store_explicit(&next_task, 0, memory_order_relaxed);
    if (num_tasks > 1 && target_threads > 1 && num_workers > 0) {
        atomic_store_explicit(&num_running, num_workers, memory_order_relaxed);
        atomic_fetch_add(&generation, 1);
        if (atomic_load(&num_sleeping) > 0) syscall(SYS_futex, &generation, FUTEX_WAKE_PRIVATE, num_workers, NULL, NULL, 0);
        run_tasks(0);
        // On a busy machine a worker may have lost its core: give ours up rather than spin against it.
        for (int spins = 0; atomic_load_explicit(&num_running, memory_order_acquire) > 0; spins++) {
            if (spins < SPINS) __builtin_ia32_pause();
            else sched_yield();
        }
    } else {
        run_tasks(0);
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
