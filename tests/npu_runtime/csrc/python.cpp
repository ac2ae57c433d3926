/// The executor in Python: stub.py registers a function that runs operators and kernels, from a worker's thread.

#include <array>
#include <atomic>

#include "operators.hpp"

namespace npu_stub {

namespace {

/// Gets a JSON text; writes a message of at most `size` bytes and returns a code if it fails.
using Executor = int (*)(const char* request, char* message, size_t size);

std::atomic<Executor> executor{nullptr};

/// Does nothing, and takes no time from the interpreter: for measuring what the host does.
int idle(const char*, char*, size_t) { return kOk; }

}  // namespace

Outcome execute_in_python(const std::string& request) {
    const Executor function = executor;
    if (function == nullptr) return {kKernelFault, "no executor is installed; call stub.install_executors()"};
    std::array<char, 2000> message{};
    const int code = function(request.c_str(), message.data(), message.size());
    if (code != kOk) violate("the executor refused: " + std::string(message.data()));
    return {code, message.data()};
}

}  // namespace npu_stub

EXPORT void fag_stub_set_executor(npu_stub::Executor function) { npu_stub::executor = function; }
EXPORT void fag_stub_set_idle_executor() { npu_stub::executor = npu_stub::idle; }
