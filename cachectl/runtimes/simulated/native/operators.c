/* Compile options and operator descriptions. No operator runs through here: tensors of a simulated run live on the
 * CPU. An operator that gets this far (a tensor on the npu device) is refused, never silently skipped. */
#include "sim.h"

#include <string.h>

static const char COMPILE_OPTION[] = "1";

SIM_EXPORT size_t aclGetCompileoptSize(int option) { (void)option; return sizeof COMPILE_OPTION; }
SIM_EXPORT int aclGetCompileopt(int option, char *value, size_t room) {
    (void)option;
    if (room < sizeof COMPILE_OPTION) return SIM_INVALID;
    memcpy(value, COMPILE_OPTION, sizeof COMPILE_OPTION);
    return SIM_OK;
}
SIM_NOTHING(aclSetCompileopt)

SIM_EXPORT void *aclCreateTensorDesc(void) { return sim_handle(); }
SIM_EXPORT void *aclCreateDataBuffer(void) { return sim_handle(); }
SIM_EXPORT void *aclopCreateAttr(void) { return sim_handle(); }
SIM_EXPORT int aclopCompileAndExecute(void) { return SIM_INVALID; }
SIM_EXPORT int aclopCompileAndExecuteV2(void) { return SIM_INVALID; }
SIM_EXPORT size_t aclGetTensorDescNumDims(void) { return 0; }
SIM_EXPORT int aclGetTensorDescType(void) { return 0; }
SIM_EXPORT int aclGetTensorDescFormat(void) { return 2; /* ND */ }
SIM_EXPORT int aclGetTensorDescDimV2(void *desc, size_t index, int64_t *size) {
    (void)desc; (void)index;
    *size = 0;
    return SIM_OK;
}
SIM_NOTHING(aclDestroyTensorDesc)
SIM_NOTHING(aclDestroyDataBuffer)
SIM_NOTHING(aclSetTensorDescName)
SIM_NOTHING(aclSetTensorFormat)
SIM_NOTHING(aclSetTensorPlaceMent)
SIM_NOTHING(aclSetTensorShape)
SIM_NOTHING(aclopDestroyAttr)
SIM_NOTHING(aclopSetAttrBool)
SIM_NOTHING(aclopSetAttrDataType)
SIM_NOTHING(aclopSetAttrFloat)
SIM_NOTHING(aclopSetAttrInt)
SIM_NOTHING(aclopSetAttrListBool)
SIM_NOTHING(aclopSetAttrListFloat)
SIM_NOTHING(aclopSetAttrListInt)
SIM_NOTHING(aclopSetAttrListListInt)
SIM_NOTHING(aclopSetAttrString)

/* Kernel binaries: none can be loaded or launched. */
SIM_EXPORT int aclrtBinaryLoadFromData(void) { return SIM_INVALID; }
SIM_EXPORT int aclrtBinaryGetFunction(void) { return SIM_INVALID; }
SIM_EXPORT int aclrtGetFunctionAddr(void) { return SIM_INVALID; }
SIM_EXPORT int rtDevBinaryRegister(void) { return SIM_INVALID; }
SIM_EXPORT int rtFunctionRegister(void) { return SIM_INVALID; }
SIM_EXPORT int rtGetC2cCtrlAddr(void) { return SIM_INVALID; }
SIM_EXPORT int rtKernelLaunch(void) { return SIM_INVALID; }

/* Profiling is off. */
SIM_EXPORT uint64_t MsprofGetHashId(void) { return 0; }
SIM_EXPORT uint64_t MsprofSysCycleTime(void) { return 0; }
SIM_NOTHING(MsprofRegisterCallback)
SIM_NOTHING(MsprofReportAdditionalInfo)
SIM_NOTHING(MsprofReportApi)
SIM_NOTHING(MsprofReportCompactInfo)

/* Looked up by name: collective settings, and the super kernel optimiser, which may leave a graph as it is. */
SIM_NOTHING(HcclSetConfig)
SIM_NOTHING(aclskOptimize)
SIM_NOTHING(aclskScopeBegin)
SIM_NOTHING(aclskScopeEnd)

/* Nothing is dumped, so static kernel compilation finds no operator to compile and leaves the graph as it is. */
SIM_NOTHING(aclopStartDumpArgs)
SIM_NOTHING(aclopStopDumpArgs)
