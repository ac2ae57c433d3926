#include "levels.hpp"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace fag::cpu {
namespace {

#if defined(__x86_64__)
struct CpuFeatures {
    bool avx2 = false;
    bool avx512 = false;
    bool avx512_bf16 = false;
    bool amx_bf16 = false;
};

bool bit(unsigned word, int at) { return (word >> at) & 1u; }

/// CPUID says what the CPU has, XCR0 which registers the operating system saves.
CpuFeatures detect() {
    CpuFeatures found;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
    const bool fma = bit(c, 12), osxsave = bit(c, 27), f16c = bit(c, 29);
    if (!osxsave) return found;
    unsigned xcr0 = 0, xcr0_high = 0;
    __asm__("xgetbv" : "=a"(xcr0), "=d"(xcr0_high) : "c"(0));
    const bool saves_ymm = (xcr0 & 0x06u) == 0x06u;
    const bool saves_zmm = (xcr0 & 0xe6u) == 0xe6u;
    const bool saves_tiles = (xcr0 & 0x60000u) == 0x60000u;
    unsigned max_subleaf = 0;
    if (!__get_cpuid_count(7, 0, &max_subleaf, &b, &c, &d)) return found;
    found.avx2 = saves_ymm && fma && f16c && bit(b, 5);
    found.avx512 = found.avx2 && saves_zmm && bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31);  // F DQ BW VL
    const bool has_tiles = saves_tiles && bit(d, 24) && bit(d, 22);  // AMX-TILE, AMX-BF16
    if (max_subleaf >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) found.avx512_bf16 = found.avx512 && bit(a, 5);
    found.amx_bf16 = found.avx512_bf16 && has_tiles;
#if defined(FAG_AVX512_EMULATION)
    // tests: this build's AVX-512 and AMX files are made of AVX2
    found.avx512 = found.avx512_bf16 = found.amx_bf16 = found.avx2;
#endif
    return found;
}

#if defined(FAG_AMX)
/// Linux gives a process the state of tiles when it asks (all of its threads, those of now and later), or refuses. That
/// enlarges what it saves of a thread, signal stacks included: so only those ask who list levels or name this one.
bool may_use_tiles() {
#if defined(FAG_AVX512_EMULATION)
    return true;
#elif defined(__linux__) && defined(SYS_arch_prctl)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return granted;
#else
    return false;
#endif
}
#endif
#elif defined(__aarch64__)
struct CpuFeatures {
    bool neon = false;
    bool bf16 = false;
};

/// What the kernel offers to processes: the CPU's features, less those that the system does not support.
CpuFeatures detect() {
    // HWCAP_ASIMD and HWCAP2_BF16, which the headers of older systems lack.
    constexpr unsigned long kAsimd = 1ul << 1, kBf16 = 1ul << 14;
    CpuFeatures found;
    found.neon = (getauxval(AT_HWCAP) & kAsimd) != 0;
    found.bf16 = found.neon && (getauxval(AT_HWCAP2) & kBf16) != 0;
    return found;
}
#endif

struct Level {
    const Isa* isa;
    bool supported;
    bool (*is_permitted)() = nullptr;    ///< asks the system; null: needs no permission
    const char* only_by_name = nullptr;  ///< why it runs only where it is named; null: it may be chosen as the best one
};

/// Weakest first.
const std::vector<Level>& levels() {
    static const std::vector<Level> table = [] {
#if defined(__x86_64__)
        const CpuFeatures cpu = detect();
        return std::vector<Level>{{&isa_portable, true},
                                  {&isa_avx2, cpu.avx2},
                                  {&isa_avx512, cpu.avx512},
                                  {&isa_avx512_bf16, cpu.avx512_bf16},
#if defined(FAG_AMX)
                                  {&isa_amx_bf16, cpu.amx_bf16, may_use_tiles, "it has never run on hardware"},
#endif
        };
#elif defined(__aarch64__)
        const CpuFeatures cpu = detect();
        return std::vector<Level>{{&isa_portable, true}, {&isa_neon, cpu.neon}, {&isa_neon_bf16, cpu.bf16}};
#else
        return std::vector<Level>{{&isa_portable, true}};
#endif
    }();
    return table;
}

enum class Chosen { by_name, by_itself };

/// The levels up to FAG_CPU_LEVEL, which is a name, that this CPU and system support and that may be chosen so.
std::vector<const Level*> runnable(Chosen how) {
    const char* cap = std::getenv("FAG_CPU_LEVEL");
    const std::string highest = cap == nullptr ? "" : cap;
    std::vector<const Level*> found;
    std::string known;
    bool is_beyond = false;
    for (const Level& level : levels()) {
        known += (known.empty() ? "" : ", ") + std::string(level.isa->name);
        const bool is_highest = highest == level.isa->name;
        const bool may_be_chosen = level.only_by_name == nullptr || how == Chosen::by_name || is_highest;
        if (level.supported && !is_beyond && may_be_chosen && (level.is_permitted == nullptr || level.is_permitted())) {
            found.push_back(&level);
        }
        is_beyond = is_beyond || is_highest;
    }
    if (!highest.empty() && !is_beyond) {
        throw std::invalid_argument("fag_kernel: FAG_CPU_LEVEL must be one of " + known + ", got '" + highest + "'.");
    }
    return found;
}

std::atomic<const Isa*> chosen{nullptr};

}  // namespace

std::vector<std::string> available_levels() {
    std::vector<std::string> names;
    for (const Level* level : runnable(Chosen::by_name)) names.emplace_back(level->isa->name);
    return names;
}

std::map<std::string, std::string> levels_only_by_name() {
    std::map<std::string, std::string> reasons;
    for (const Level* level : runnable(Chosen::by_name)) {
        if (level->only_by_name != nullptr) reasons[level->isa->name] = level->only_by_name;
    }
    return reasons;
}

void set_level(const std::string& name) {
    if (name.empty()) {
        chosen.store(nullptr);
        return;
    }
    std::string known;
    for (const Level* level : runnable(Chosen::by_name)) {
        if (name == level->isa->name) {
            chosen.store(level->isa);
            return;
        }
        known += (known.empty() ? "" : ", ") + std::string(level->isa->name);
    }
    throw std::invalid_argument("set_cpu_level: name must be one of " + known + " on this CPU, got '" + name + "'.");
}

const Isa& current_isa() {
    const Isa* isa = chosen.load();
    if (isa != nullptr) return *isa;
    // Asked once: the environment of a running process is not a place to switch kernels between two calls.
    static const Isa* const best = runnable(Chosen::by_itself).back()->isa;
    return *best;
}

}  // namespace fag::cpu
