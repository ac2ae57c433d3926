/// Symbols that torch_npu's library binds when it is loaded, and that nothing in our tests needs.
///
/// ACCEPTED ones report success and do nothing: profiling, logging, switches. REFUSED ones would have to do something.

#include "stub.hpp"

using namespace npu_stub;

#define ACCEPTED(name) EXPORT int name() { return Entry(#name).code; }
#define REFUSED(name) \
    EXPORT int name() { \
        const Entry entry(#name); \
        if (entry.code != kOk) return entry.code; \
        return fail(kUnsupported, #name " is not part of the stand-in"); \
    }

// Profiling and logging
ACCEPTED(MsprofGetHashId)
ACCEPTED(MsprofRegisterCallback)
ACCEPTED(MsprofReportAdditionalInfo)
ACCEPTED(MsprofReportApi)
ACCEPTED(MsprofReportCompactInfo)
ACCEPTED(MsprofSysCycleTime)
ACCEPTED(aclAppLog)
ACCEPTED(aclmdlFinalizeDump)
ACCEPTED(aclmdlInitDump)
ACCEPTED(aclmdlSetDump)
ACCEPTED(aclopStartDumpArgs)

// Switches
ACCEPTED(aclSetCompileopt)
ACCEPTED(aclopSetCompileFlag)
ACCEPTED(aclrtCtxGetSysParamOpt)
ACCEPTED(aclrtCtxSetSysParamOpt)
ACCEPTED(aclrtDeviceEnablePeerAccess)
ACCEPTED(aclrtDeviceGetBareTgid)
ACCEPTED(aclrtGetLastError)
ACCEPTED(aclrtGetOpExecuteTimeout)
ACCEPTED(aclrtPeekAtLastError)
ACCEPTED(aclrtProcessReport)
ACCEPTED(aclrtSetDeviceResLimit)
ACCEPTED(aclrtSetDeviceSatMode)
ACCEPTED(aclrtSetOpExecuteTimeOut)
ACCEPTED(aclrtSetOpWaitTimeout)
ACCEPTED(aclrtSetStreamFailureMode)
ACCEPTED(aclrtSetSysParamOpt)
ACCEPTED(aclrtSetTsDevice)

// Questions about the hardware
REFUSED(aclGetCannAttribute)
REFUSED(aclGetDeviceCapability)
REFUSED(aclrtDeviceGetUuid)
REFUSED(aclrtGetDeviceInfo)
REFUSED(aclrtGetDeviceResLimit)
REFUSED(aclrtGetDeviceUtilizationRate)
REFUSED(aclrtGetDevicesTopo)
REFUSED(aclrtGetStreamResLimit)

// The older operator interface, before aclnn
REFUSED(aclCreateDataBuffer)
REFUSED(aclCreateTensorDesc)
REFUSED(aclDestroyDataBuffer)
REFUSED(aclDestroyTensorDesc)
REFUSED(aclGetTensorDescDimV2)
REFUSED(aclGetTensorDescFormat)
REFUSED(aclGetTensorDescNumDims)
REFUSED(aclGetTensorDescType)
REFUSED(aclSetTensorDescName)
REFUSED(aclSetTensorFormat)
REFUSED(aclSetTensorPlaceMent)
REFUSED(aclSetTensorShape)
REFUSED(aclopCompileAndExecute)
REFUSED(aclopCreateAttr)
REFUSED(aclopDestroyAttr)
REFUSED(aclopSetAttrBool)
REFUSED(aclopSetAttrDataType)
REFUSED(aclopSetAttrFloat)
REFUSED(aclopSetAttrInt)
REFUSED(aclopSetAttrListBool)
REFUSED(aclopSetAttrListFloat)
REFUSED(aclopSetAttrListInt)
REFUSED(aclopSetAttrListListInt)
REFUSED(aclopSetAttrString)

// Virtual and shared memory, kernels from binaries in the newer interface, prefetching
REFUSED(aclrtBinaryGetFunction)
REFUSED(aclrtBinaryLoadFromData)
REFUSED(aclrtCmoAsync)
REFUSED(aclrtFreePhysical)
REFUSED(aclrtGetFunctionAddr)
REFUSED(aclrtHostRegister)
REFUSED(aclrtHostUnregister)
REFUSED(aclrtMallocPhysical)
REFUSED(aclrtMapMem)
REFUSED(aclrtMemExportToShareableHandle)
REFUSED(aclrtMemImportFromShareableHandle)
REFUSED(aclrtMemSetPidToShareableHandle)
REFUSED(aclrtReleaseMemAddress)
REFUSED(aclrtReserveMemAddress)
REFUSED(aclrtUnmapMem)
