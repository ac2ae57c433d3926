#include "aclnn.hpp"

#include <algorithm>
#include <iterator>
#include <span>
#include <stdexcept>
#include <tuple>
#include <type_traits>

#include "status.hpp"

namespace fag::cann {

namespace {

/// A name as a template argument.
template <std::size_t length>
struct Name {
    char text[length];
    constexpr Name(const char (&literal)[length]) { std::copy_n(literal, length, text); }
};

// Kinds of arguments. `Type` is how C passes one; make() finds its value by name.

[[noreturn]] void refuse(const char* name, const char* rule) {
    throw std::invalid_argument(std::string("cann: ") + name + " must be " + rule + ", got none or another type.");
}

template <class Held>
const Held* find(const Values& values, const char* name) {
    const auto found = values.find(name);
    return found == values.end() ? nullptr : std::get_if<Held>(&found->second);
}

bool is_absent(const Values& values, const char* name) {
    return values.find(name) == values.end() || find<std::monostate>(values, name) != nullptr;
}

template <Name name>
struct Required {
    using Type = const aclTensor*;
    static constexpr const char *label = name.text, *kind = "tensor";
    static Type make(const Values& values, std::vector<Tensor>& tensors) {
        const TensorRef* view = find<TensorRef>(values, label);
        if (view == nullptr) refuse(label, "a tensor");
        return tensors.emplace_back(make_tensor(*view)).get();
    }
};

template <Name name>
struct Optional {
    using Type = const aclTensor*;
    static constexpr const char *label = name.text, *kind = "optional tensor";
    static Type make(const Values& values, std::vector<Tensor>& tensors) {
        return is_absent(values, label) ? nullptr : Required<name>::make(values, tensors);
    }
};

template <Name name, class Held>
struct Scalar {
    using Type = Held;
    static constexpr const char* label = name.text;
    static constexpr const char* kind = std::is_same_v<Held, double> ? "double"
                                        : std::is_same_v<Held, bool> ? "bool"
                                                                     : "int64";
    static Type make(const Values& values, std::vector<Tensor>&) {
        const Held* value = find<Held>(values, label);
        if (value == nullptr) refuse(label, kind);
        return *value;
    }
};
template <Name name>
using Real = Scalar<name, double>;
template <Name name>
using Integer = Scalar<name, std::int64_t>;
template <Name name>
using Flag = Scalar<name, bool>;

/// A layout's name. CANN takes char*, and may keep the pointer until the second phase: the text outlives everything.
template <Name name>
struct Layout {
    using Type = char*;
    static constexpr const char *label = name.text, *kind = "layout";
    static Type make(const Values& values, std::vector<Tensor>&) {
        static char texts[][5] = {"BSND", "BNSD", "TND"};
        const std::string* value = find<std::string>(values, label);
        for (char* text : texts) {
            if (value != nullptr && *value == text) return text;
        }
        refuse(label, "BSND, BNSD or TND");
    }
};

/// The arguments of an operator's first phase, in order.
template <class... Arguments>
struct Signature {
    static constexpr Argument arguments[] = {{Arguments::label, Arguments::kind}...};

    static int get_workspace_size(void* function, const Values& values, std::vector<Tensor>& tensors,
                                  std::uint64_t* workspace_bytes, aclOpExecutor** executor) {
        using Function = int(typename Arguments::Type..., std::uint64_t*, aclOpExecutor**);
        const std::tuple<typename Arguments::Type...> made{Arguments::make(values, tensors)...};  // in order
        return std::apply(
            [&](auto... each) { return reinterpret_cast<Function*>(function)(each..., workspace_bytes, executor); },
            made);
    }
};

/// As CANN's own package has it.
using Grad = Signature<
    Required<"q">, Required<"k">, Required<"v">, Required<"dout">, Required<"attn_out">, Required<"softmax_lse">,
    Optional<"cu_seqlens_q">, Optional<"cu_seqlens_kv">, Optional<"seqused_q">, Optional<"seqused_kv">,
    Optional<"sinks">, Optional<"attn_mask">, Optional<"metadata">,
    Real<"softmax_scale">, Integer<"mask_mode">, Integer<"win_left">, Integer<"win_right">, Integer<"max_seqlen_q">,
    Integer<"max_seqlen_kv">, Layout<"layout_q">, Layout<"layout_kv">, Layout<"layout_out">,
    Required<"dq">, Required<"dk">, Required<"dv">>;

/// An assumption, by analogy with the gradient and with the arguments of the PyTorch operator: this pair is documented
/// nowhere.
using Forward = Signature<
    Required<"q">, Required<"k">, Required<"v">, Optional<"block_table">,
    Optional<"cu_seqlens_q">, Optional<"cu_seqlens_kv">, Optional<"seqused_q">, Optional<"seqused_kv">,
    Optional<"sinks">, Optional<"metadata">, Optional<"attn_mask">,
    Real<"softmax_scale">, Integer<"mask_mode">, Integer<"win_left">, Integer<"win_right">, Integer<"max_seqlen_q">,
    Integer<"max_seqlen_kv">, Layout<"layout_q">, Layout<"layout_kv">, Layout<"layout_out">,
    Flag<"return_softmax_lse">, Required<"attn_out">, Optional<"softmax_lse">>;

struct Operator {
    const char* symbol;
    std::span<const Argument> arguments;
    decltype(&Grad::get_workspace_size) get_workspace_size;
};
constexpr Operator kOperators[] = {
    {"aclnnInnerFlashAttnGrad", Grad::arguments, &Grad::get_workspace_size},
    {"aclnnInnerFlashAttn", Forward::arguments, &Forward::get_workspace_size},
};

const Operator& find_operator(const std::string& symbol) {
    const auto* found = std::find_if(std::begin(kOperators), std::end(kOperators),
                                     [&](const Operator& each) { return symbol == each.symbol; });
    if (found == std::end(kOperators)) {
        throw std::invalid_argument("cann: operator must be one whose arguments are known, got " + symbol + ".");
    }
    return *found;
}

void check_names(const Operator& op, const Values& values) {
    for (const auto& [name, value] : values) {
        const bool is_known =  // clang before 16 captures no part of a structured binding by itself
            std::any_of(op.arguments.begin(), op.arguments.end(),
                        [&name = name](const Argument& argument) { return name == argument.name; });
        if (!is_known) {
            throw std::invalid_argument("cann: arguments must be those of " + std::string(op.symbol) + ", got " + name +
                                        ".");
        }
    }
}

}  // namespace

std::span<const Argument> aclnn_arguments(const std::string& symbol) { return find_operator(symbol).arguments; }

void DestroyExecutor::operator()(aclOpExecutor* executor) const {
    if (tensor_api().aclDestroyAclOpExecutor != nullptr) tensor_api().aclDestroyAclOpExecutor(executor);
}

AclnnCall::AclnnCall(const std::string& symbol, const Values& values) : symbol_(symbol), api_(operator_api(symbol)) {
    const Operator& op = find_operator(symbol);
    check_names(op, values);
    runtime_api();  // Missing now rather than in place of the runtime's own text
    aclOpExecutor* executor = nullptr;
    const int code = op.get_workspace_size(api_.get_workspace_size, values, tensors_, &workspace_bytes_, &executor);
    check(symbol + "GetWorkspaceSize", code);
    executor_.reset(executor);
}

void AclnnCall::run(void* workspace, aclrtStream stream) {
    if (executor_ == nullptr) throw std::invalid_argument("cann: " + symbol_ + " must run once, got a second run().");
    if (workspace == nullptr && workspace_bytes_ > 0) {
        throw std::invalid_argument("cann: workspace must have " + std::to_string(workspace_bytes_) +
                                    " bytes, got null.");
    }
    const std::vector<Tensor> tensors = std::move(tensors_);  // freed on return, as CANN allows
    check(symbol_, api_.run(workspace, workspace_bytes_, executor_.release(), stream));
}

}  // namespace fag::cann
