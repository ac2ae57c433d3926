#include "status.hpp"

#include <utility>

#include "library.hpp"

namespace fag::cann {

namespace {

/// What the runtime last reported on this thread, without white space around it. It is gone then.
std::string recent_text() {
    const char* text = runtime_api().aclGetRecentErrMsg();
    if (text == nullptr) return "";
    const std::string whole(text);
    const std::size_t first = whole.find_first_not_of(" \t\r\n");
    if (first == std::string::npos) return "";
    return whole.substr(first, whole.find_last_not_of(" \t\r\n") - first + 1);
}

}  // namespace

Error::Error(std::string call_, std::optional<int> code_, const std::string& text)
    : std::runtime_error(text), call(std::move(call_)), code(code_) {}

Error failure(std::string_view call, std::optional<int> code) { return {std::string(call), code, recent_text()}; }

}  // namespace fag::cann
