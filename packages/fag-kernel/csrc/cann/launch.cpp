#include "launch.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "library.hpp"
#include "status.hpp"

namespace fag::cann {

namespace {

/// A name that the runtime has not seen: it knows a kernel of the same name per device and object.
std::string unique_name(const std::string& symbol) {
    static std::atomic<std::uint64_t> count = 0;
    return symbol + "_" + std::to_string(count++);
}

/// Arguments as the kernels expect them: ffts address, lock, compiler's workspace, the parameters, the grid.
///
/// The compiler needs no lock and no workspace for our kernels (the build refuses those that do): null. The driver passes
/// a struct, whose size is a multiple of its alignment.
class Arguments {
public:
    Arguments(std::uint64_t ffts_address, std::size_t num_parameters) : bytes_(kPrefix + 8 * num_parameters + kSuffix) {
        std::memcpy(bytes_.data(), &ffts_address, sizeof ffts_address);
    }

    void set_parameter(std::size_t index, std::uint64_t address) {
        std::memcpy(bytes_.data() + kPrefix + 8 * index, &address, sizeof address);
    }

    void set_grid(std::uint32_t blocks) {
        const std::uint32_t grid[] = {blocks, 1, 1};
        std::memcpy(bytes_.data() + bytes_.size() - kSuffix, grid, sizeof grid);
    }

    void* data() { return bytes_.data(); }
    std::uint32_t size() const { return static_cast<std::uint32_t>(bytes_.size()); }

private:
    static constexpr std::size_t kPrefix = 3 * 8;
    static constexpr std::size_t kSuffix = (3 * 4 + 7) / 8 * 8;
    std::vector<char> bytes_;
};

}  // namespace

DeviceFunction::DeviceFunction(std::string symbol, std::string object, bool is_vector)
    : symbol_(std::move(symbol)), object_(std::move(object)) {
    const LaunchApi& api = launch_api();
    runtime_api();  // Missing now rather than in place of the runtime's own text
    const DeviceBinary binary{is_vector ? kElfForVectorCores : kElfForAllCores, 0, object_.data(), object_.size()};
    void* module = nullptr;
    check("rtDevBinaryRegister", api.rtDevBinaryRegister(&binary, &module));
    const int code = api.rtFunctionRegister(module, &stub_, unique_name(symbol_).c_str(), symbol_.c_str(), 0);
    if (code != 0) {
        const Error error = failure("rtFunctionRegister", code);
        if (api.rtDevBinaryUnRegister != nullptr) api.rtDevBinaryUnRegister(module);
        throw error;
    }
}

LaunchSequence::LaunchSequence(std::vector<LaunchStep> steps, std::vector<std::uint64_t> offsets)
    : steps_(std::move(steps)), offsets_(std::move(offsets)) {
    for (const LaunchStep& step : steps_) {
        for (const std::size_t parameter : step.parameters) {
            if (parameter >= offsets_.size()) throw std::invalid_argument("cann: a parameter must have an address.");
        }
    }
}

void LaunchSequence::run(std::span<const std::uint64_t> addresses, aclrtStream stream) const {
    const LaunchApi& api = launch_api();
    std::uint64_t ffts_address = 0;
    std::uint32_t ffts_bytes = 0;
    check("rtGetC2cCtrlAddr", api.rtGetC2cCtrlAddr(&ffts_address, &ffts_bytes));
    for (const LaunchStep& step : steps_) {
        if (step.blocks == 0) continue;
        Arguments arguments(ffts_address, step.parameters.size());
        for (std::size_t i = 0; i < step.parameters.size(); ++i) {
            arguments.set_parameter(i, addresses[step.parameters[i]] + offsets_[step.parameters[i]]);
        }
        arguments.set_grid(step.blocks);
        // The runtime copies the arguments before it returns.
        check("rtKernelLaunch", api.rtKernelLaunch(step.function->stub(), step.blocks, arguments.data(),
                                                   arguments.size(), nullptr, stream));
    }
}

}  // namespace fag::cann
