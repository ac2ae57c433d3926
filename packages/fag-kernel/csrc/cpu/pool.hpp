/// Persistent threads for parallel regions.
#pragma once

#include <functional>

namespace fag::cpu {

/// Runs task(i) for i in [0, count), each i on one of `count` threads, the calling one among them, and returns when all
/// are done. `allowed` >= count is how many threads the caller may use; a team of OpenMP threads is made that large.
///
/// Threads are borrowed from an OpenMP runtime that this process uses anyway (borrowed_threads.hpp), or our own. Those
/// are kept for later calls: they spin briefly, then sleep. Calls from several threads at once each get their own. A
/// child process made by fork starts with none. An exception in a task reaches the caller (one of them, if several are
/// thrown); the other tasks are not interrupted. Throws std::system_error if no thread can be started.
void run_parallel(int count, int allowed, const std::function<void(int)>& task);

/// True if the threads of a call that may use `allowed` of them are likely to be spinning: those of OpenMP are, for some
/// milliseconds. A call of any size has just ended; so of small calls in a row, the second may wake them for the others.
/// Our own threads spin too briefly to count on.
bool threads_are_awake(int allowed);

/// Threads of our own in this process.
int num_own_threads();

}  // namespace fag::cpu
