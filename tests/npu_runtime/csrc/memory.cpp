/// Device and pinned memory: host memory between guard zones, and a quarantine for what was freed.
///
///     | guard 0xA7 | bytes of the caller, 0xFF at first | guard 0xA7 |
///
/// 0xFF bytes are NaN in every floating-point type, so a read of memory that nobody wrote shows in the results.
/// A freed block keeps its addresses, filled with 0xDD, until newer ones push it out: late writes show, and a late
/// task finds no live allocation.

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

#include "control.hpp"
#include "stub.hpp"

namespace npu_stub {

namespace {

constexpr size_t kGuardBytes = 512;  // also the alignment that CANN promises
constexpr unsigned char kGuardByte = 0xA7;
constexpr unsigned char kFreshByte = 0xFF;
constexpr unsigned char kFreedByte = 0xDD;
constexpr size_t kQuarantineBytes = size_t{64} << 20;
constexpr size_t kDeviceBytes = size_t{16} << 30;

struct Block {
    unsigned char* base;
    size_t bytes;
    int device;  // kHostMemory for pinned memory

    unsigned char* begin() const { return base + kGuardBytes; }
    unsigned char* end() const { return begin() + bytes; }
    unsigned char* limit() const { return base + total_bytes(bytes); }

    /// With both guards; the one behind fills up to a whole number of guards, so it is one to two of them long.
    static size_t total_bytes(size_t bytes) {
        return kGuardBytes + (bytes + kGuardBytes - 1) / kGuardBytes * kGuardBytes + kGuardBytes;
    }
};

struct Memory {
    std::mutex mutex;
    std::map<const unsigned char*, Block> live;  // by begin()
    std::deque<Block> freed;
    size_t freed_bytes = 0;
    std::map<int, size_t> used_bytes;
};

Memory& memory() {
    static Memory& instance = *new Memory;
    return instance;
}

std::string place(int device) { return device == kHostMemory ? "host" : "device " + std::to_string(device); }

std::string describe(const Block& block) {
    return std::to_string(block.bytes) + " bytes of " + place(block.device);
}

bool is_filled(const unsigned char* begin, const unsigned char* end, unsigned char value) {
    return std::all_of(begin, end, [value](unsigned char byte) { return byte == value; });
}

void check_guard(const Block& block) {
    if (!is_filled(block.base, block.begin(), kGuardByte)) {
        violate("guard zone overwritten: in front of " + describe(block));
    }
    if (!is_filled(block.end(), block.limit(), kGuardByte)) {
        violate("guard zone overwritten: behind " + describe(block));
    }
}

void check_freed(const Block& block) {
    if (!is_filled(block.begin(), block.end(), kFreedByte)) violate("write after free: to " + describe(block));
}

/// The live block that holds the address; nullptr if there is none. The mutex is held.
const Block* find(const void* address) {
    const auto* byte = static_cast<const unsigned char*>(address);
    auto after = memory().live.upper_bound(byte);
    if (after == memory().live.begin()) return nullptr;
    const Block& block = std::prev(after)->second;
    return byte < block.end() || (byte == block.begin() && block.bytes == 0) ? &block : nullptr;
}

int allocate(const char* symbol, void** address, size_t bytes, int device) {
    const Entry entry(symbol, nullptr, {{"size", static_cast<int64_t>(bytes)}});
    if (entry.code != kOk) return entry.code;
    if (device != kHostMemory && current_device() < 0) {
        return fail(kNoContext, "the thread has no context; call aclrtSetDevice");
    }
    if (bytes == 0) return fail(kInvalidArgument, "size must be positive, got 0");
    Block block{nullptr, bytes, device};
    const std::lock_guard lock(memory().mutex);
    if (memory().used_bytes[device] + bytes > kDeviceBytes) {
        return fail(kOutOfMemory, "no " + std::to_string(bytes) + " bytes left on " + place(device));
    }
    block.base = static_cast<unsigned char*>(std::aligned_alloc(kGuardBytes, Block::total_bytes(bytes)));
    if (block.base == nullptr) return fail(kOutOfMemory, "the host has no memory left");
    std::fill(block.base, block.begin(), kGuardByte);
    std::fill(block.begin(), block.end(), kFreshByte);
    std::fill(block.end(), block.limit(), kGuardByte);
    memory().live[block.begin()] = block;
    memory().used_bytes[device] += bytes;
    count_live(device == kHostMemory ? "host_allocations" : "allocations", 1);
    *address = block.begin();
    return kOk;
}

/// Moves a block to the quarantine.
int release(const char* symbol, void* address, bool is_host) {
    const Entry entry(symbol);
    if (entry.code != kOk) return entry.code;
    if (address == nullptr) return fail(kInvalidArgument, "the address is null");
    const std::lock_guard lock(memory().mutex);
    const auto found = memory().live.find(static_cast<unsigned char*>(address));
    if (found == memory().live.end()) {
        const bool was_freed = std::any_of(memory().freed.begin(), memory().freed.end(),
                                           [address](const Block& block) { return block.begin() == address; });
        violate(std::string(was_freed ? "double free: " : "free of an unknown address: ") + symbol);
        return fail(kInvalidArgument, "the address was not allocated, or is free already");
    }
    const Block block = found->second;
    if ((block.device == kHostMemory) != is_host) {
        violate(std::string("wrong kind of memory: ") + symbol + " of " + describe(block));
        return fail(kInvalidArgument, "the address belongs to the other kind of memory");
    }
    check_guard(block);
    std::fill(block.begin(), block.end(), kFreedByte);
    memory().live.erase(found);
    memory().used_bytes[block.device] -= block.bytes;
    count_live(is_host ? "host_allocations" : "allocations", -1);
    memory().freed.push_back(block);
    memory().freed_bytes += block.bytes;
    while (memory().freed_bytes > kQuarantineBytes && memory().freed.size() > 1) {
        const Block& oldest = memory().freed.front();
        check_guard(oldest);
        check_freed(oldest);
        memory().freed_bytes -= oldest.bytes;
        std::free(oldest.base);
        memory().freed.pop_front();
    }
    return kOk;
}

}  // namespace

bool check_range(const void* address, size_t bytes, int device, const std::string& purpose) {
    if (bytes == 0) return true;
    std::string complaint;
    {
        const std::lock_guard lock(memory().mutex);
        const Block* block = find(address);
        const auto* byte = static_cast<const unsigned char*>(address);
        const bool was_freed =
            block == nullptr && std::any_of(memory().freed.begin(), memory().freed.end(), [byte](const Block& old) {
                return byte >= old.begin() && byte < old.end();
            });
        if (was_freed) complaint = "use after free: ";
        else if (block == nullptr) complaint = "no device memory: ";
        else if (block->device != device) complaint = "wrong device (memory of " + place(block->device) + "): ";
        else if (bytes > static_cast<size_t>(block->end() - byte)) complaint = "beyond the end of the allocation: ";
    }
    if (complaint.empty()) return true;
    violate(complaint + purpose + ", " + std::to_string(bytes) + " bytes on " + place(device));
    return false;
}

int device_of(const void* address) {
    const std::lock_guard lock(memory().mutex);
    const Block* block = find(address);
    return block == nullptr ? -2 : block->device;
}

size_t bytes_from(const void* address, int device) {
    const std::lock_guard lock(memory().mutex);
    const Block* block = find(address);
    if (block == nullptr || block->device != device) return 0;
    return static_cast<size_t>(block->end() - static_cast<const unsigned char*>(address));
}

void check_guards() {
    const std::lock_guard lock(memory().mutex);
    for (const auto& [begin, block] : memory().live) check_guard(block);
    for (const Block& block : memory().freed) {
        check_guard(block);
        check_freed(block);
    }
}

}  // namespace npu_stub

using namespace npu_stub;

EXPORT int aclrtMalloc(void** address, size_t size, int) {
    return allocate("aclrtMalloc", address, size, current_device());
}
EXPORT int aclrtMallocAlign32(void** address, size_t size, int) {
    return allocate("aclrtMallocAlign32", address, size, current_device());
}
EXPORT int aclrtMallocWithCfg(void** address, size_t size, int, void*) {
    return allocate("aclrtMallocWithCfg", address, size, current_device());
}
EXPORT int aclrtFree(void* address) { return release("aclrtFree", address, false); }
EXPORT int aclrtMallocHost(void** address, size_t size) {
    return allocate("aclrtMallocHost", address, size, kHostMemory);
}
EXPORT int aclrtMallocHostWithCfg(void** address, uint64_t size, void*) {
    return allocate("aclrtMallocHostWithCfg", address, size, kHostMemory);
}
EXPORT int aclrtFreeHost(void* address) { return release("aclrtFreeHost", address, true); }

EXPORT int aclrtGetMemInfo(int, size_t* free_bytes, size_t* total_bytes) {
    const Entry entry("aclrtGetMemInfo");
    if (entry.code != kOk) return entry.code;
    const std::lock_guard lock(memory().mutex);
    *total_bytes = kDeviceBytes;
    *free_bytes = kDeviceBytes - memory().used_bytes[current_device()];
    return kOk;
}

EXPORT int aclrtPointerGetAttributes(const void* address, void* attributes) {
    struct Attributes {  // aclrtPtrAttributes
        uint32_t device;
        int location;
        uint32_t page_size;
        uint32_t reserved[4];
    };
    constexpr int kHostLocation = 0;
    constexpr int kDeviceLocation = 1;
    constexpr int kUnregistered = 2;
    const Entry entry("aclrtPointerGetAttributes");
    if (entry.code != kOk) return entry.code;
    const int device = device_of(address);
    auto* found = static_cast<Attributes*>(attributes);
    *found = {};
    found->device = device >= 0 ? static_cast<uint32_t>(device) : 0;
    found->location = device >= 0 ? kDeviceLocation : device == kHostMemory ? kHostLocation : kUnregistered;
    return kOk;
}
