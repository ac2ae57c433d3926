/// Codes of CANN's functions as exceptions.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace fag::cann {

/// A function of CANN failed; fag_kernel.cann.CannError in Python.
class Error : public std::runtime_error {
public:
    /// `code` is what the call returned, if it returns one; `text` is what the runtime says about it, may be empty.
    Error(std::string call, std::optional<int> code, const std::string& text);

    const std::string call;
    const std::optional<int> code;
};

/// The error of a call that failed just now on this thread, with the runtime's text, which is taken from it.
Error failure(std::string_view call, std::optional<int> code);

/// Throws Error unless `code`, which `call` returned, is 0.
inline void check(std::string_view call, int code) {
    if (code != 0) [[unlikely]] throw failure(call, code);
}

}  // namespace fag::cann
