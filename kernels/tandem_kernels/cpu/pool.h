// SPDX-License-Identifier: Apache-2.0
#pragma once

typedef void (*task_fn)(void *context, long task, int thread);

// Run fn for every task in [0, num_tasks), shared out over the pool's threads `grain` at a time; returns when all are
// done. num_tasks <= grain runs on the caller alone: waking a thread costs more than a small job.
// Which thread runs a task never shows in a result: tasks write disjoint memory and share no accumulator.
void parallel_for(long num_tasks, long grain, task_fn fn, void *context);

// Scratch memory of one thread, at least `bytes` long, 64-byte aligned, contents undefined. NULL when out of memory.
void *thread_scratch(int thread, long bytes);

#define MAX_THREADS 512
