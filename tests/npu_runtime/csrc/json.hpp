/// Text for Python: a JSON value written front to back.

#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace npu_stub {

/// Appends a JSON string with its quotes.
inline void append_json(std::string& out, const std::string& text) {
    out += '"';
    for (const char character : text) {
        if (character == '"' || character == '\\') {
            out += '\\';
            out += character;
        } else if (static_cast<unsigned char>(character) < 0x20) {
            char escape[8];
            std::snprintf(escape, sizeof escape, "\\u%04x", character);
            out += escape;
        } else {
            out += character;
        }
    }
    out += '"';
}

inline void append_json(std::string& out, const char* text) { append_json(out, std::string(text)); }
inline void append_json(std::string& out, bool value) { out += value ? "true" : "false"; }
inline void append_json(std::string& out, int64_t value) { out += std::to_string(value); }
inline void append_json(std::string& out, int value) { out += std::to_string(value); }
inline void append_json(std::string& out, uint64_t value) { out += std::to_string(value); }
inline void append_json(std::string& out, double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.17g", value);
    out += text;
}

/// Writes `[a, b, ...]` with one call of `item(out, element)` per element.
template <typename Range, typename Item>
void append_list(std::string& out, const Range& range, Item item) {
    out += '[';
    bool is_first = true;
    for (const auto& element : range) {
        if (!is_first) out += ',';
        is_first = false;
        item(out, element);
    }
    out += ']';
}

/// Writes a JSON array of plain values.
template <typename Range>
void append_list(std::string& out, const Range& range) {
    append_list(out, range, [](std::string& text, const auto& element) { append_json(text, element); });
}

/// Writes `"name":value`, after a comma unless it follows an opening brace.
template <typename Value>
void append_member(std::string& out, const char* name, const Value& value) {
    if (out.back() != '{') out += ',';
    append_json(out, name);
    out += ':';
    append_json(out, value);
}

}  // namespace npu_stub
