/// Persistent threads for parallel regions.
#pragma once

#include <functional>

namespace fag::cpu {

/// Runs task(i) for i in [0, count) on `count` threads, the calling one among them, and returns when all are done.
///
/// Threads are kept for later calls: they spin briefly, then sleep. Calls from several threads at once each get their
/// own. A child process made by fork starts with none. An exception in a task reaches the caller (one of them, if
/// several are thrown); the other tasks are not interrupted. Throws std::system_error if no thread can be started.
void run_parallel(int count, const std::function<void(int)>& task);

}  // namespace fag::cpu
