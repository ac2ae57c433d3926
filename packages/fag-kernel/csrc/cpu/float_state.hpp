/// Rounding and subnormal handling of the current thread.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace fag::cpu {

/// Round to nearest even, keep subnormals, raise nothing - while this object lives. Frameworks change these bits in
/// the calling thread (torch.set_flush_denormal); without this a result would depend on which thread computed it.
class DefaultFloatState {
public:
#if defined(__x86_64__)
    DefaultFloatState() : saved_(_mm_getcsr()) {
        if (saved_ != kDefault) _mm_setcsr(kDefault);
    }
    ~DefaultFloatState() {
        if (saved_ != kDefault) _mm_setcsr(saved_);
    }

private:
    static constexpr unsigned kDefault = 0x1f80;
    unsigned saved_;
#elif defined(__aarch64__)
    DefaultFloatState() {
        __asm__ __volatile__("mrs %0, fpcr" : "=r"(saved_));
        __asm__ __volatile__("msr fpcr, %0" : : "r"(std::uint64_t{0}));
    }
    ~DefaultFloatState() { __asm__ __volatile__("msr fpcr, %0" : : "r"(saved_)); }

private:
    std::uint64_t saved_ = 0;
#else
    DefaultFloatState() {}
#endif
public:
    DefaultFloatState(const DefaultFloatState&) = delete;
    DefaultFloatState& operator=(const DefaultFloatState&) = delete;
};

}  // namespace fag::cpu
