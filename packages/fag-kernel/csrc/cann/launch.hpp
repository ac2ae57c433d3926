/// Kernels of our own on the device: registering a finished object, and queueing a sequence of launches.
///
/// As the Ascend driver of triton-ascend 3.2.0 does it (MIT), since the same compiler made the kernels.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "api.hpp"

namespace fag::cann {

/// A kernel that the runtime knows on the device that was current when it was made. Objects of this class are never
/// destroyed: the runtime knows the kernel by an address in it, and streams may have launches queued at any time.
class DeviceFunction {
public:
    /// Registers the kernel `symbol` of `object`; nothing stays registered after an exception.
    ///
    /// `is_vector`: runs on vector cores alone, not on cube cores with their vector cores.
    /// Throws Missing or Error.
    DeviceFunction(std::string symbol, std::string object, bool is_vector);
    DeviceFunction(const DeviceFunction&) = delete;
    DeviceFunction& operator=(const DeviceFunction&) = delete;

    const void* stub() const { return &stub_; }

private:
    const std::string symbol_;
    const std::string object_;  ///< kept: the runtime is not known to copy it
    char stub_ = 0;             ///< its address is what the runtime knows the kernel by
};

/// One kernel launch of a sequence.
struct LaunchStep {
    const DeviceFunction* function;
    std::uint32_t blocks;                 ///< 0: the launch is left out
    std::vector<std::size_t> parameters;  ///< index into the sequence's addresses, in the kernel's order
};

/// Launches that follow each other on a stream, made once and run often.
class LaunchSequence {
public:
    /// `offsets`: bytes added to each address. Throws std::invalid_argument for a parameter without an address.
    LaunchSequence(std::vector<LaunchStep> steps, std::vector<std::uint64_t> offsets);

    std::size_t num_addresses() const { return offsets_.size(); }

    /// Queues all launches on `stream` of the current device, num_addresses() addresses. Throws Missing or Error.
    void run(std::span<const std::uint64_t> addresses, aclrtStream stream) const;

private:
    const std::vector<LaunchStep> steps_;
    const std::vector<std::uint64_t> offsets_;
};

}  // namespace fag::cann
