#include "borrowed_threads.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <thread>

#include <dlfcn.h>
#include <strings.h>
#include <sys/stat.h>

#include "pool.hpp"

namespace fag::cpu {
namespace {

/// Entry of a parallel region in the GNU runtime, which LLVM's and Intel's offer as well.
using ParallelRegion = void (*)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);

enum class Decision : int { open, borrow, refuse };

std::atomic<Decision> decision{Decision::open};
std::atomic<ParallelRegion> region{nullptr};

/// Threads of this process, or 1 if that cannot be told.
long count_threads() {
    struct stat info {};
    return stat("/proc/self/task", &info) == 0 ? static_cast<long>(info.st_nlink) - 2 : 1;
}

bool is_switched_off() {
    const char* wish = std::getenv("FAG_CPU_OPENMP");
    return wish != nullptr && std::strcmp(wish, "0") == 0;
}

/// Looks for a runtime as long as there is none. A process that was forked before this code was loaded cannot be told
/// by its history, but by its threads: those of the runtime are missing. So as many as the team needs must exist.
bool may_borrow(int team_size) {
    Decision now = decision.load(std::memory_order_acquire);
    if (now != Decision::open) return now == Decision::borrow;
    if (is_switched_off()) {
        decision.store(Decision::refuse);
        return false;
    }
    const auto found = reinterpret_cast<ParallelRegion>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    if (found == nullptr || count_threads() < team_size + num_own_threads()) return false;
    region.store(found);
    decision.store(Decision::borrow, std::memory_order_release);
    return true;
}

/// As the GNU runtime reads it: blanks around the word and its case do not matter, other words do not count.
bool is_passive() {
    const char* wish = std::getenv("OMP_WAIT_POLICY");
    if (wish == nullptr) return false;
    constexpr std::string_view kBlanks = " \t\n\v\f\r", kPassive = "passive";
    std::string_view word = wish;
    word.remove_prefix(std::min(word.find_first_not_of(kBlanks), word.size()));
    word = word.substr(0, word.find_last_not_of(kBlanks) + 1);
    return word.size() == kPassive.size() && strncasecmp(word.data(), kPassive.data(), word.size()) == 0;
}

struct Call {
    const std::function<void(int)>& task;
    int count;
    std::atomic<int> next{0};
};

void run_share(void* data) {
    auto& call = *static_cast<Call*>(data);
    for (int i = call.next.fetch_add(1); i < call.count; i = call.next.fetch_add(1)) call.task(i);
}

}  // namespace

bool run_on_borrowed_threads(int count, int team_size, const std::function<void(int)>& task) noexcept {
    if (!may_borrow(team_size)) return false;
    Call call{task, count};
    region.load()(run_share, &call, static_cast<unsigned>(team_size), 0);
    return true;
}

bool borrows_spinning_threads(int team_size) {
    static const bool passive = is_passive();
    static const auto cores = static_cast<int>(std::thread::hardware_concurrency());
    return !passive && team_size <= cores && may_borrow(team_size);
}

void forget_borrowed_threads() noexcept { decision.store(Decision::refuse); }

}  // namespace fag::cpu
