#include "library.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <system_error>
#include <vector>

namespace fag::cann {

namespace {

namespace fs = std::filesystem;

constexpr const char* kRuntime = "libascendcl.so";
constexpr const char* kCustomLibrary = "libcust_opapi.so";

/// `text` with every path cut down to its last component: reasons go into messages that users paste.
std::string without_folders(const std::string& text) {
    std::string out;
    std::istringstream words(text);
    for (std::string word; words >> word;) {
        const std::size_t slash = word.find_last_of('/');
        out += (out.empty() ? "" : " ") + (slash == std::string::npos ? word : word.substr(slash + 1));
    }
    return out;
}

/// An open library. Never closed: CANN keeps threads running in its code.
struct Library {
    void* handle;
    std::string name;
};

Library open(const std::string& path, const char* what) {
    const std::string name = fs::path(path).filename().string();
    void* handle = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (handle == nullptr) {
        throw Missing(std::string(what) + " (" + name + ") does not load: " + without_folders(dlerror()));
    }
    return {handle, name};
}

/// Those of `paths` that load, at least one; the reason of a failure is that of the first.
std::vector<Library> open_any(const std::vector<std::string>& paths, const char* what) {
    std::vector<Library> libraries;
    std::string reason;
    for (const std::string& path : paths) {
        try {
            libraries.push_back(open(path, what));
        } catch (const Missing& missing) {
            if (reason.empty()) reason = missing.what();
        }
    }
    if (libraries.empty()) throw Missing(reason);
    return libraries;
}

/// The symbol in the first of `libraries`, or in what that one depends on; null if none has it.
void* find_symbol(const std::vector<Library>& libraries, const char* symbol) {
    for (const Library& library : libraries) {
        if (void* address = dlsym(library.handle, symbol)) return address;
    }
    return nullptr;
}

void* require_symbol(const std::vector<Library>& libraries, const char* symbol) {
    void* address = find_symbol(libraries, symbol);
    if (address == nullptr) throw Missing(libraries.front().name + " has no symbol " + symbol);
    return address;
}

template <class Function>
void resolve(Function*& function, const std::vector<Library>& libraries, const char* symbol) {
    function = reinterpret_cast<Function*>(require_symbol(libraries, symbol));
}

template <class Function>
void resolve_optional(Function*& function, const std::vector<Library>& libraries, const char* symbol) {
    function = reinterpret_cast<Function*>(find_symbol(libraries, symbol));
}

std::string environment(const char* variable) {
    const char* value = std::getenv(variable);
    return value == nullptr ? "" : value;
}

std::vector<std::string> split(const std::string& text, char separator) {
    std::vector<std::string> parts;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, separator);) {
        if (!part.empty()) parts.push_back(part);
    }
    return parts;
}

/// Names of the packages in a folder of them, in CANN's order: config.ini may have a line load_priority=first,second,...
std::vector<std::string> packages_in(const fs::path& vendors) {
    std::vector<std::string> names;
    std::ifstream config(vendors / "config.ini");
    const std::string key = "load_priority=";
    for (std::string line; std::getline(config, line);) {
        if (line.starts_with(key)) names = split(line.substr(key.size()), ',');
    }
    std::vector<std::string> others;
    std::error_code ignored;  // no such folder is no error: there are no packages then
    for (const auto& entry : fs::directory_iterator(vendors, ignored)) {
        const std::string name = entry.path().filename().string();
        if (std::find(names.begin(), names.end(), name) == names.end()) others.push_back(name);
    }
    std::sort(others.begin(), others.end());
    names.insert(names.end(), others.begin(), others.end());
    return names;
}

/// The libraries of custom packages, in the order in which CANN prefers them; by bare name if no variable leads to one.
std::vector<std::string> custom_libraries() {
    std::vector<fs::path> folders;
    for (const std::string& folder : split(environment("ASCEND_CUSTOM_OPP_PATH"), ':')) folders.emplace_back(folder);
    if (const std::string opp = environment("ASCEND_OPP_PATH"); !opp.empty()) {
        const fs::path vendors = fs::path(opp) / "vendors";
        for (const std::string& name : packages_in(vendors)) folders.push_back(vendors / name);
    }
    std::vector<std::string> libraries;
    for (const fs::path& folder : folders) {
        const fs::path library = folder / "op_api" / "lib" / kCustomLibrary;
        std::error_code ignored;
        if (fs::is_regular_file(library, ignored)) libraries.push_back(library.string());
    }
    if (libraries.empty()) libraries.emplace_back(kCustomLibrary);
    return libraries;
}

RuntimeApi load_runtime_api() {
    const std::vector<Library> libraries{open(kRuntime, "the CANN runtime")};
    RuntimeApi api;
    resolve(api.aclGetRecentErrMsg, libraries, "aclGetRecentErrMsg");
    resolve(api.aclrtGetSocName, libraries, "aclrtGetSocName");
    resolve(api.aclrtGetDevice, libraries, "aclrtGetDevice");
    resolve(api.aclrtMemsetAsync, libraries, "aclrtMemsetAsync");
    return api;
}

LaunchApi load_launch_api() {
    // libascendcl.so depends on libruntime.so: where that one has another name, its symbols are found all the same.
    const std::vector<Library> libraries = open_any({"libruntime.so", kRuntime}, "the CANN runtime");
    LaunchApi api;
    resolve(api.rtDevBinaryRegister, libraries, "rtDevBinaryRegister");
    resolve_optional(api.rtDevBinaryUnRegister, libraries, "rtDevBinaryUnRegister");
    resolve(api.rtFunctionRegister, libraries, "rtFunctionRegister");
    resolve(api.rtGetC2cCtrlAddr, libraries, "rtGetC2cCtrlAddr");
    resolve(api.rtKernelLaunch, libraries, "rtKernelLaunch");
    return api;
}

TensorApi load_tensor_api() {
    const std::vector<Library> libraries = open_any({"libnnopbase.so", "libopapi.so"}, "CANN's operator base");
    TensorApi api;
    resolve(api.aclCreateTensor, libraries, "aclCreateTensor");
    resolve(api.aclDestroyTensor, libraries, "aclDestroyTensor");
    resolve_optional(api.aclDestroyAclOpExecutor, libraries, "aclDestroyAclOpExecutor");
    return api;
}

}  // namespace

// A static whose initialisation throws stays uninitialised, and the next call tries again: what library.hpp promises.

const RuntimeApi& runtime_api() {
    static const RuntimeApi api = load_runtime_api();
    return api;
}

const LaunchApi& launch_api() {
    static const LaunchApi api = load_launch_api();
    return api;
}

const TensorApi& tensor_api() {
    static const TensorApi api = load_tensor_api();
    return api;
}

OperatorApi operator_api(const std::string& symbol) {
    static std::mutex mutex;
    static std::map<std::string, OperatorApi> found;
    const std::lock_guard lock(mutex);
    if (const auto known = found.find(symbol); known != found.end()) return known->second;
    const std::vector<Library> libraries = open_any(custom_libraries(), "CANN's custom operator package");
    OperatorApi api;
    api.get_workspace_size = require_symbol(libraries, (symbol + "GetWorkspaceSize").c_str());
    resolve(api.run, libraries, symbol.c_str());
    return found.emplace(symbol, api).first->second;
}

}  // namespace fag::cann
