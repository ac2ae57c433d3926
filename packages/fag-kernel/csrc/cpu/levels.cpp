#include "levels.hpp"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
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
    unsigned max_subleaf = 0;
    if (!__get_cpuid_count(7, 0, &max_subleaf, &b, &c, &d)) return found;
    found.avx2 = saves_ymm && fma && f16c && bit(b, 5);
    found.avx512 = found.avx2 && saves_zmm && bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31);  // F DQ BW VL
    if (max_subleaf >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) found.avx512_bf16 = found.avx512 && bit(a, 5);
#if defined(FAG_AVX512_EMULATION)
    found.avx512 = found.avx512_bf16 = found.avx2;  // tests: this build's AVX-512 files are made of AVX2
#endif
    return found;
}
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
};

/// Weakest first.
const std::vector<Level>& levels() {
    static const std::vector<Level> table = [] {
#if defined(__x86_64__)
        const CpuFeatures cpu = detect();
        return std::vector<Level>{{&isa_portable, true},
                                  {&isa_avx2, cpu.avx2},
                                  {&isa_avx512, cpu.avx512},
                                  {&isa_avx512_bf16, cpu.avx512_bf16}};
#elif defined(__aarch64__)
        const CpuFeatures cpu = detect();
        return std::vector<Level>{{&isa_portable, true}, {&isa_neon, cpu.neon}, {&isa_neon_bf16, cpu.bf16}};
#else
        return std::vector<Level>{{&isa_portable, true}};
#endif
    }();
    return table;
}

/// The levels up to the one named by FAG_CPU_LEVEL that this CPU supports.
std::vector<const Isa*> runnable() {
    const char* wanted = std::getenv("FAG_CPU_LEVEL");
    const std::string cap = wanted == nullptr ? "" : wanted;
    std::vector<const Isa*> found;
    std::string known;
    bool cap_is_known = cap.empty();
    for (const Level& level : levels()) {
        known += (known.empty() ? "" : ", ") + std::string(level.isa->name);
        if (level.supported && (cap.empty() || !cap_is_known)) found.push_back(level.isa);
        cap_is_known = cap_is_known || cap == level.isa->name;
    }
    if (!cap_is_known) {
        throw std::invalid_argument("fag_kernel: FAG_CPU_LEVEL must be one of " + known + ", got '" + cap + "'.");
    }
    return found;
}

std::atomic<const Isa*> chosen{nullptr};

}  // namespace

std::vector<std::string> available_levels() {
    std::vector<std::string> names;
    for (const Isa* isa : runnable()) names.emplace_back(isa->name);
    return names;
}

void set_level(const std::string& name) {
    if (name.empty()) {
        chosen.store(nullptr);
        return;
    }
    std::string known;
    for (const Isa* isa : runnable()) {
        if (name == isa->name) {
            chosen.store(isa);
            return;
        }
        known += (known.empty() ? "" : ", ") + std::string(isa->name);
    }
    throw std::invalid_argument("set_cpu_level: name must be one of " + known + " on this CPU, got '" + name + "'.");
}

const Isa& current_isa() {
    const Isa* isa = chosen.load();
    if (isa != nullptr) return *isa;
    // Asked once: the environment of a running process is not a place to switch kernels between two calls.
    static const Isa* const best = runnable().back();
    return *best;
}

}  // namespace fag::cpu
