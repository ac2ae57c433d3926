/// CANN's libraries, loaded by name at first use, and their functions.
///
/// A group of functions is resolved once and then kept. Where something is missing nothing is kept: the next call looks
/// again, since importing torch_npu may have loaded the libraries meanwhile. A library that is loaded already, by
/// torch_npu say, is not loaded a second time: the dynamic loader knows it by its name.
#pragma once

#include <stdexcept>
#include <string>

#include "api.hpp"

namespace fag::cann {

/// A library or one of its symbols is not there; the text is the reason as a phrase, without folders.
class Missing : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

const RuntimeApi& runtime_api();  ///< throws Missing
const LaunchApi& launch_api();    ///< throws Missing
const TensorApi& tensor_api();    ///< throws Missing

/// Both phases of an operator of CANN's custom package; the first one still untyped.
struct OperatorApi {
    void* get_workspace_size;
    AclnnRun run;
};

/// The operator whose second phase is `symbol`, from the first custom package that has it. Throws Missing.
///
/// Packages are those of ASCEND_CUSTOM_OPP_PATH, then those under ASCEND_OPP_PATH/vendors; without any, the library that
/// the dynamic loader finds under their name, libcust_opapi.so.
OperatorApi operator_api(const std::string& symbol);

}  // namespace fag::cann
