/// Executes the instructions of AMX that a compiler wrote, on a CPU that lacks them: each is an illegal instruction there,
/// and the signal's handler does to TileFile what its bytes say. So the machine code itself is tested: which configuration
/// is in memory when it is loaded, and which tiles and addresses an instruction names. Included at the
/// end of amx_emulated.hpp.
#pragma once

#include <signal.h>
#include <ucontext.h>

namespace fag::cpu::emulated {

/// An instruction with a VEX prefix of three bytes, as those of AMX are.
class Instruction {
public:
    Instruction(const unsigned char* code, const greg_t* registers)
        : code_(code), registers_(registers), modrm_(code[4]), size_(5) {
        if (is_memory()) find_memory();
    }

    /// Prefix and opcode; what differs between operands is left out.
    bool is(int simd_prefix, int opcode, bool in_memory) const {
        return code_[0] == 0xc4 && (code_[1] & 0x1f) == 2 && (code_[2] & 0x87) == simd_prefix && code_[3] == opcode &&
               is_memory() == in_memory;
    }
    bool has_operands() const { return modrm_ != 0xc0; }
    int first() const { return (modrm_ >> 3) & 7; }
    int second() const { return modrm_ & 7; }
    int third() const { return 15 - ((code_[2] >> 3) & 15); }
    void* base() const { return reinterpret_cast<void*>(base_); }
    std::int64_t stride() const { return stride_; }
    int size() const { return size_; }

private:
    bool is_memory() const { return (modrm_ & 0xc0) != 0xc0; }

    std::int64_t value(int number) const {
        static constexpr int kNames[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                         REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
        return registers_[kNames[number]];
    }

    /// Base, displacement, and for tiles the scaled index as the distance of rows.
    void find_memory() {
        const int mode = modrm_ >> 6;
        const int base_extension = code_[1] & 0x20 ? 0 : 8, index_extension = code_[1] & 0x40 ? 0 : 8;
        int base = modrm_ & 7;
        if (base == 4) {
            const int sib = code_[size_++], index = ((sib >> 3) & 7) + index_extension;
            base = sib & 7;
            if (index != 4) stride_ = value(index) << (sib >> 6);
        }
        const bool has_base = mode != 0 || base != 5;
        base_ = has_base ? value(base + base_extension) : 0;
        if (mode == 1) {
            base_ += static_cast<signed char>(code_[size_++]);
        } else if (mode == 2 || !has_base) {
            std::int32_t distance;
            std::memcpy(&distance, code_ + size_, sizeof distance);
            size_ += static_cast<int>(sizeof distance);
            base_ += distance;
            if (!has_base && (modrm_ & 7) == 5) base_ += registers_[REG_RIP] + size_;
        }
    }

    const unsigned char* code_;
    const greg_t* registers_;
    int modrm_;
    int size_;
    std::int64_t base_ = 0;
    std::int64_t stride_ = 0;
};

static inline void execute(int, siginfo_t*, void* context) {
    greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    const Instruction at(reinterpret_cast<const unsigned char*>(registers[REG_RIP]), registers);
    constexpr int kNone = 0, kF3 = 2, kF2 = 3;
    TileFile& tiles = tile_file();
    if (at.is(kNone, 0x49, true)) {
        tiles.configure(static_cast<const char*>(at.base()) + at.stride());
    } else if (at.is(kNone, 0x49, false) && !at.has_operands()) {
        tiles.release();
    } else if (at.is(kF2, 0x49, false)) {
        tiles.zero(at.first());
    } else if (at.is(kF2, 0x4b, true)) {
        tiles.load(at.first(), at.base(), at.stride());
    } else if (at.is(kF3, 0x4b, true)) {
        tiles.store(at.first(), at.base(), at.stride());
    } else if (at.is(kF3, 0x5c, false)) {
        tiles.dot(at.first(), at.second(), at.third());
    } else {
        signal(SIGILL, SIG_DFL);  // somebody else's
        return;
    }
    registers[REG_RIP] += at.size();
}

[[gnu::constructor]] static inline void trap() {
    struct sigaction action = {};
    action.sa_sigaction = execute;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &action, nullptr);
}

}  // namespace fag::cpu::emulated
