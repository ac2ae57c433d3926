/// The C functions of CANN that this package calls, by group. CANN's headers are not needed; these declarations are
/// ours, after
///
/// - the AscendCL API reference on hiascend.com: aclrt*, aclGetRecentErrMsg, aclCreateTensor, aclDestroyTensor,
///   aclDestroyAclOpExecutor, and the two phases of an aclnn operator;
/// - the Ascend driver of triton-ascend 3.2.0 (MIT), which launches kernels of the compiler that made ours: rt*.
///
/// Members are named as the symbols are. Every int returned is 0 for success.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fag::cann {

struct aclTensor;
struct aclOpExecutor;
using aclrtStream = void*;

/// From libascendcl.so.
struct RuntimeApi {
    const char* (*aclGetRecentErrMsg)();
    const char* (*aclrtGetSocName)();
    int (*aclrtGetDevice)(std::int32_t* device);
    int (*aclrtMemsetAsync)(void* address, std::size_t capacity, std::int32_t value, std::size_t bytes,
                            aclrtStream stream);
};

/// Descriptors of tensors; from libnnopbase.so, on which CANN's operator libraries depend.
struct TensorApi {
    aclTensor* (*aclCreateTensor)(const std::int64_t* dims, std::uint64_t num_dims, int dtype,
                                  const std::int64_t* strides, std::int64_t offset, int format,
                                  const std::int64_t* storage_dims, std::uint64_t num_storage_dims, void* storage);
    int (*aclDestroyTensor)(const aclTensor* tensor);
    int (*aclDestroyAclOpExecutor)(aclOpExecutor* executor);  ///< null where CANN has none
};

/// Second phase of an aclnn operator. The first one's type depends on the operator: aclnn.cpp.
using AclnnRun = int (*)(void* workspace, std::uint64_t workspace_bytes, aclOpExecutor* executor, aclrtStream stream);

/// What a binary is to the runtime: rtDevBinary_t.
struct DeviceBinary {
    std::uint32_t magic;
    std::uint32_t version;
    const void* data;
    std::uint64_t bytes;
};
inline constexpr std::uint32_t kElfForAllCores = 0x43554245;     ///< RT_DEV_BINARY_MAGIC_ELF, cube with vector cores
inline constexpr std::uint32_t kElfForVectorCores = 0x41415246;  ///< RT_DEV_BINARY_MAGIC_ELF_AIVEC

/// From libruntime.so.
struct LaunchApi {
    int (*rtDevBinaryRegister)(const DeviceBinary* binary, void** module);
    int (*rtDevBinaryUnRegister)(void* module);  ///< null where CANN has none
    int (*rtFunctionRegister)(void* module, const void* stub, const char* stub_name, const void* symbol,
                              std::uint32_t mode);
    int (*rtGetC2cCtrlAddr)(std::uint64_t* address, std::uint32_t* bytes);
    int (*rtKernelLaunch)(const void* stub, std::uint32_t blocks, void* arguments, std::uint32_t argument_bytes,
                          void* shared_memory, aclrtStream stream);
};

}  // namespace fag::cann
