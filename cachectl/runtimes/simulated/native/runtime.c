/* Device, context, stream, event and version calls. State lives in one process and is only what callers read back. */
#include "sim.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifndef SIM_DEFAULT_SOC
#error "SIM_DEFAULT_SOC, SIM_DEFAULT_CANN, SIM_DEFAULT_DEVICES and SIM_VERSION are given on the command line"
#endif

/* Read through ctypes by loaded_is_simulated(); a real libascendcl has no such symbol. */
SIM_EXPORT const char *cachectl_simulated_cann = SIM_VERSION;

/* Cube and vector cores of an Ascend910B1 (24 and 48): shown in messages only, nothing is scheduled on them. */
enum { CUBE_CORES = 24, VECTOR_CORES = 48, CORE_KINDS = 2 };

static __thread int32_t current_device;
static __thread void *current_context;
static uint32_t core_limits[CORE_KINDS] = {CUBE_CORES, VECTOR_CORES};

void *sim_handle(void) {
    static _Atomic uintptr_t next = 0x1000;
    return (void *)atomic_fetch_add(&next, 0x10);
}

const char *sim_text(const char *variable, const char *fallback) {
    const char *value = getenv(variable);
    return value && *value ? value : fallback;
}

long sim_number(const char *variable, long fallback, long least, long most) {
    const char *value = getenv(variable);
    if (!value || !*value) return fallback;
    char *end = NULL;
    long number = strtol(value, &end, 10);
    if (*end) return fallback;
    return number < least ? least : number > most ? most : number;
}

static uint32_t device_count(void) {
    return (uint32_t)sim_number("CACHECTL_SIM_DEVICES", SIM_DEFAULT_DEVICES, 0, 64);
}

/* ---- device ---- */
SIM_EXPORT int aclrtGetDeviceCount(uint32_t *count) { *count = device_count(); return SIM_OK; }
SIM_EXPORT int aclrtGetDevice(int32_t *device) { *device = current_device; return SIM_OK; }
SIM_EXPORT int aclrtSetDevice(int32_t device) {
    if (device < 0 || (uint32_t)device >= device_count()) return SIM_INVALID;
    current_device = device;
    return SIM_OK;
}
SIM_EXPORT int aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    (void)device; (void)peer;
    *can = 1;
    return SIM_OK;
}
SIM_EXPORT int aclrtDeviceGetBareTgid(int32_t *tgid) { *tgid = 1; return SIM_OK; }
SIM_EXPORT int aclrtGetLogicDevIdByUserDevId(int32_t user, int32_t *logic) { *logic = user; return SIM_OK; }
SIM_EXPORT int aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    if (flags) *flags = 0;
    *active = device == current_device;
    return SIM_OK;
}
SIM_EXPORT const char *aclrtGetSocName(void) { return sim_text("CACHECTL_SIM_SOC", SIM_DEFAULT_SOC); }
SIM_EXPORT int aclrtGetDeviceInfo(uint32_t device, int attribute, int64_t *value) {
    (void)device;
    /* 1 = AI cores, 101 = vector cores in the attribute list of hicann/runtime; all others are unknown here. */
    *value = attribute == 101 ? VECTOR_CORES : CUBE_CORES;
    return SIM_OK;
}
SIM_EXPORT int aclGetDeviceCapability(uint32_t device, int kind, int64_t *value) {
    (void)device;
    *value = kind == 1 ? VECTOR_CORES : CUBE_CORES;
    return SIM_OK;
}
SIM_EXPORT int aclGetCannAttribute(int attribute, int32_t *value) { (void)attribute; *value = 1; return SIM_OK; }

/* ---- core limits: kept, so that what a program sets is what it reads back ---- */
static int read_limit(int kind, uint32_t *value) {
    if (kind < 0 || kind >= CORE_KINDS) return SIM_INVALID;
    *value = core_limits[kind];
    return SIM_OK;
}
static int write_limit(int kind, uint32_t value) {
    if (kind < 0 || kind >= CORE_KINDS) return SIM_INVALID;
    core_limits[kind] = value;
    return SIM_OK;
}
SIM_EXPORT int aclrtGetDeviceResLimit(int32_t device, int kind, uint32_t *value) {
    (void)device;
    return read_limit(kind, value);
}
SIM_EXPORT int aclrtSetDeviceResLimit(int32_t device, int kind, uint32_t value) {
    (void)device;
    return write_limit(kind, value);
}
SIM_EXPORT int aclrtGetStreamResLimit(void *stream, int kind, uint32_t *value) {
    (void)stream;
    return read_limit(kind, value);
}
SIM_EXPORT int aclrtSetStreamResLimit(void *stream, int kind, uint32_t value) {
    (void)stream;
    return write_limit(kind, value);
}
SIM_EXPORT int aclrtGetResInCurrentThread(int kind, uint32_t *value) { return read_limit(kind, value); }
static int reset_limits(void) {
    core_limits[0] = CUBE_CORES;
    core_limits[1] = VECTOR_CORES;
    return SIM_OK;
}
SIM_EXPORT int aclrtResetDeviceResLimit(int32_t device) { (void)device; return reset_limits(); }
SIM_EXPORT int aclrtResetStreamResLimit(void *stream) { (void)stream; return reset_limits(); }

/* ---- context ---- */
SIM_EXPORT int aclrtGetCurrentContext(void **context) {
    if (!current_context) current_context = sim_handle();
    *context = current_context;
    return SIM_OK;
}
SIM_EXPORT int aclrtSetCurrentContext(void *context) { current_context = context; return SIM_OK; }

/* ---- streams ---- */
SIM_EXPORT int aclrtCreateStream(void **stream) { *stream = sim_handle(); return SIM_OK; }
SIM_EXPORT int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) {
    (void)priority; (void)flag;
    return aclrtCreateStream(stream);
}
SIM_EXPORT int aclrtStreamGetId(void *stream, int32_t *id) {
    *id = (int32_t)((uintptr_t)stream >> 4);
    return SIM_OK;
}
SIM_EXPORT int aclrtStreamQuery(void *stream, int *status) { (void)stream; *status = 0; /* complete */ return SIM_OK; }

/* ---- events: complete as soon as they are recorded; times are the host's clock ---- */
struct sim_event { struct timespec recorded; };

static int create_event(void **event) {
    struct sim_event *made = calloc(1, sizeof *made);
    *event = made;
    return made ? SIM_OK : SIM_NO_MEMORY;
}
SIM_EXPORT int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { (void)flag; return create_event(event); }
SIM_EXPORT int aclrtCreateEventWithFlag(void **event, uint32_t flag) { (void)flag; return create_event(event); }
SIM_EXPORT int aclrtDestroyEvent(void *event) { free(event); return SIM_OK; }
SIM_EXPORT int aclrtRecordEvent(void *event, void *stream) {
    (void)stream;
    clock_gettime(CLOCK_MONOTONIC, &((struct sim_event *)event)->recorded);
    return SIM_OK;
}
SIM_EXPORT int aclrtQueryEventStatus(void *event, int *status) { (void)event; *status = 1; return SIM_OK; }
SIM_EXPORT int aclrtQueryEventWaitStatus(void *event, int *status) { (void)event; *status = 0; return SIM_OK; }
SIM_EXPORT int aclQueryEventRecordedStatus(void *event, int *status) { (void)event; *status = 1; return SIM_OK; }
SIM_EXPORT int aclQueryEventWaitStatus(void *event, int *status) { (void)event; *status = 0; return SIM_OK; }
SIM_EXPORT int aclrtEventElapsedTime(float *milliseconds, void *start, void *end) {
    const struct timespec a = ((struct sim_event *)start)->recorded, b = ((struct sim_event *)end)->recorded;
    *milliseconds = (float)(b.tv_sec - a.tv_sec) * 1e3f + (float)(b.tv_nsec - a.tv_nsec) / 1e6f;
    return SIM_OK;
}
SIM_EXPORT int aclrtEventGetTimestamp(void *event, uint64_t *microseconds) {
    const struct timespec at = ((struct sim_event *)event)->recorded;
    *microseconds = (uint64_t)at.tv_sec * 1000000u + (uint64_t)at.tv_nsec / 1000u;
    return SIM_OK;
}
/* The stream is a queue of nothing, so a host function runs where it is launched. */
SIM_EXPORT int aclrtLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    (void)stream;
    function(data);
    return SIM_OK;
}
SIM_EXPORT int aclrtLaunchCallback(void (*function)(void *), void *data, int block, void *stream) {
    (void)block;
    return aclrtLaunchHostFunc(stream, function, data);
}

/* ---- versions: the layout torch_npu reads, full text first, then its four parts ---- */
struct sim_version { char full[128]; char part[4][64]; char reserved[128]; };

static const char *cann_version(void) { return sim_text("CACHECTL_SIM_CANN", SIM_DEFAULT_CANN); }

SIM_EXPORT int aclsysGetCANNVersion(int package, struct sim_version *version) {
    (void)package; /* one simulated toolkit: all packages carry one version, as version.info of each says too */
    memset(version, 0, sizeof *version);
    strncpy(version->full, cann_version(), sizeof version->full - 1);
    char rest[sizeof version->full], *mark = NULL;
    strcpy(rest, version->full);
    char *word = strtok_r(rest, ".", &mark);
    for (int i = 0; i < 4; i++) {
        strncpy(version->part[i], word ? word : "0", sizeof version->part[i] - 1);
        word = word ? strtok_r(NULL, ".", &mark) : NULL;
    }
    return SIM_OK;
}
SIM_EXPORT int aclsysGetVersionStr(const char *package, char *text) {
    (void)package;
    strncpy(text, cann_version(), 127);
    text[127] = 0;
    return SIM_OK;
}

/* ---- errors: there are none to tell of ---- */
SIM_EXPORT const char *aclGetRecentErrMsg(void) { return ""; }

SIM_NOTHING(aclInit)
SIM_NOTHING(aclFinalize)
SIM_NOTHING(aclAppLog)
SIM_NOTHING(aclrtResetDevice)
SIM_NOTHING(aclrtDeviceEnablePeerAccess)
SIM_NOTHING(aclrtDestroyStream)
SIM_NOTHING(aclrtDestroyStreamForce)
SIM_NOTHING(aclrtSynchronizeStream)
SIM_NOTHING(aclrtSynchronizeStreamWithTimeout)
SIM_NOTHING(aclrtSynchronizeDevice)
SIM_NOTHING(aclrtSynchronizeDeviceWithTimeout)
SIM_NOTHING(aclrtSynchronizeEvent)
SIM_NOTHING(aclrtStreamWaitEvent)
SIM_NOTHING(aclrtResetEvent)
SIM_NOTHING(aclrtProcessReport)
SIM_NOTHING(aclrtSubscribeReport)
SIM_NOTHING(aclrtUnSubscribeReport)
SIM_NOTHING(aclrtSetStreamAttribute)
SIM_NOTHING(aclrtSetStreamFailureMode)
SIM_NOTHING(aclrtSetStreamOverflowSwitch)
SIM_NOTHING(aclrtSetDeviceSatMode)
SIM_NOTHING(aclrtSetOpExecuteTimeOut)
SIM_NOTHING(aclrtSetOpExecuteTimeOutV2)
SIM_NOTHING(aclrtSetOpWaitTimeout)
SIM_NOTHING(aclrtSetSysParamOpt)
SIM_NOTHING(aclrtCtxSetSysParamOpt)
SIM_NOTHING(aclrtUseStreamResInCurrentThread)
SIM_NOTHING(aclrtUnuseStreamResInCurrentThread)
SIM_NOTHING(aclrtPeekAtLastError)
SIM_NOTHING(aclrtGetLastError)
SIM_EXPORT int aclrtGetSysParamOpt(int option, int64_t *value) { (void)option; *value = 0; return SIM_OK; }
SIM_EXPORT int aclrtGetStreamOverflowSwitch(void *stream, uint32_t *flag) { (void)stream; *flag = 0; return SIM_OK; }
