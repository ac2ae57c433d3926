/// Threads of an OpenMP runtime that something else in this process uses.
///
/// After each parallel region OpenMP's threads spin for some milliseconds, waiting for the next. A framework that
/// computes with OpenMP (PyTorch does) thus keeps its cores busy when it calls us, and threads of our own would have to
/// share those cores: a call of 8 ms took 11. So where there is such a runtime, its threads do our work as well.
#pragma once

#include <functional>

namespace fag::cpu {

/// Runs task(i) for all i in [0, count) on a team of `team_size` >= count OpenMP threads, the calling one among them;
/// the task must not throw. Returns false, without having done anything, if there is no runtime to borrow from, or not
/// safely: the threads of OpenMP do not survive a fork, and a runtime that had some before then hangs.
/// FAG_CPU_OPENMP=0 in the environment switches borrowing off.
///
/// The team's size should not change from call to call: the GNU runtime ends threads that a smaller team does not need.
bool run_on_borrowed_threads(int count, int team_size, const std::function<void(int)>& task) noexcept;

/// Whether run_on_borrowed_threads would do it, with threads that spin for milliseconds after their work: they do not if
/// the environment asks them to be passive, nor if there are more of them than cores.
bool borrows_spinning_threads(int team_size);

/// In a child process after fork.
void forget_borrowed_threads() noexcept;

}  // namespace fag::cpu
