/// Scratch memory of one thread, reused from call to call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

namespace fag::cpu {

inline constexpr std::size_t kCacheLine = 64;

struct AlignedDelete {
    void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t{kCacheLine}); }
};

using AlignedBytes = std::unique_ptr<std::byte, AlignedDelete>;

inline AlignedBytes allocate_bytes(std::size_t bytes) {
    return AlignedBytes(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{kCacheLine})));
}

/// Hands out cache-line aligned memory until reset; the memory itself stays for the next user.
class Arena {
public:
    /// What a thread keeps between calls at most. Beyond it memory goes back, so that one long sequence does not
    /// stay on the bill of a process for ever.
    static constexpr std::size_t kKeptBytes = std::size_t{8} << 20;

    template <typename T>
    T* take(std::int64_t count) {
        std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
        if (!kBlockPerPiece) bytes = (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
        if (kBlockPerPiece || blocks_.empty() || used_ + bytes > blocks_.back().bytes) add_block(bytes);
        std::byte* p = blocks_.back().memory.get() + used_;
        used_ += bytes;
        return reinterpret_cast<T*>(p);
    }

    /// Everything handed out is free again. Several blocks become one the next time.
    void reset() {
        if (blocks_.size() > 1 || total_ > kKeptBytes) {
            wanted_ = total_ > kKeptBytes ? 0 : total_;
            blocks_.clear();
            total_ = 0;
        }
        used_ = 0;
    }

private:
    struct Block {
        AlignedBytes memory;
        std::size_t bytes;
    };

    void add_block(std::size_t needed) {
        const std::size_t bytes = kBlockPerPiece ? needed : std::max({needed, kSmallestBlock, wanted_});
        blocks_.push_back({allocate_bytes(bytes), bytes});
        wanted_ = 0;
        total_ += bytes;
        used_ = 0;
    }

    /// The address sanitizer sees whoever leaves a block, not whoever leaves his piece of it.
#if defined(__SANITIZE_ADDRESS__)
    static constexpr bool kBlockPerPiece = true;
#else
    static constexpr bool kBlockPerPiece = false;
#endif

    static constexpr std::size_t kSmallestBlock = std::size_t{256} << 10;
    std::vector<Block> blocks_;
    std::size_t used_ = 0;    ///< of the last block
    std::size_t total_ = 0;   ///< of all blocks
    std::size_t wanted_ = 0;  ///< size of the next block, from what the last user needed
};

/// Scratch of the calling thread for the lifetime of this object.
class ScopedArena {
public:
    ScopedArena() : arena_(of_this_thread()) {}
    ~ScopedArena() { arena_.reset(); }
    ScopedArena(const ScopedArena&) = delete;
    ScopedArena& operator=(const ScopedArena&) = delete;
    Arena& operator*() { return arena_; }

private:
    static Arena& of_this_thread() {
        thread_local Arena arena;
        return arena;
    }
    Arena& arena_;
};

}  // namespace fag::cpu
