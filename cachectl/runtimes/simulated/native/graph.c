/* Graph capture: the states torch_npu asks for. Recording and replaying operators is the Python side's part
 * (process/capture.py): here nothing is executed, and a model is only a handle. */
#include "sim.h"

#include <stdio.h>
#include <stdlib.h>

enum { CAPTURE_NONE = 0, CAPTURE_ACTIVE = 1 };

/* Captures are few and short: a list of the streams being captured is enough. */
struct capture { void *stream; void *model; struct capture *next; };
static __thread struct capture *captures;

static struct capture **find(void *stream) {
    struct capture **at = &captures;
    while (*at && (*at)->stream != stream) at = &(*at)->next;
    return at;
}
/* Set by the start-up module once torch_npu is patched. Without the patches a replay would return the first call's
 * values for ever, so a process that lost them (python -I, a PYTHONPATH that was replaced) must not capture at all. */
SIM_EXPORT int cachectl_simulated_replay = 0;
SIM_EXPORT int aclmdlRICaptureBegin(void *stream, int mode) {
    (void)mode;
    if (!cachectl_simulated_replay) {
        fputs("cachectl: the simulated CANN can't replay graphs here, its start-up module was not loaded; "
              "keep what `cachectl simulate` puts on PYTHONPATH, and run python without -I, -E and -S\n", stderr);
        return SIM_INVALID;
    }
    if (*find(stream)) return SIM_INVALID;
    struct capture *made = malloc(sizeof *made);
    if (!made) return SIM_NO_MEMORY;
    *made = (struct capture){stream, sim_handle(), captures};
    captures = made;
    return SIM_OK;
}
SIM_EXPORT int aclmdlRICaptureGetInfo(void *stream, int *status, void **model) {
    struct capture *found = *find(stream);
    *status = found ? CAPTURE_ACTIVE : CAPTURE_NONE;
    if (model) *model = found ? found->model : NULL;
    return SIM_OK;
}
SIM_EXPORT int aclmdlRICaptureEnd(void *stream, void **model) {
    struct capture **at = find(stream), *found = *at;
    if (!found) return SIM_INVALID;
    *model = found->model;
    *at = found->next;
    free(found);
    return SIM_OK;
}
SIM_EXPORT int aclmdlRICaptureTaskGrpEnd(void *stream, void **group) {
    (void)stream;
    *group = sim_handle();
    return SIM_OK;
}
SIM_EXPORT int aclmdlRIGetId(void *model, uint32_t *id) {
    *id = (uint32_t)((uintptr_t)model >> 4);
    return SIM_OK;
}
SIM_NOTHING(aclmdlRICaptureTaskGrpBegin)
SIM_NOTHING(aclmdlRICaptureTaskUpdateBegin)
SIM_NOTHING(aclmdlRICaptureTaskUpdateEnd)
SIM_NOTHING(aclmdlRICaptureThreadExchangeMode)
SIM_NOTHING(aclmdlRIExecuteAsync)
SIM_NOTHING(aclmdlRIDestroy)
SIM_NOTHING(aclmdlRIDebugPrint)
SIM_NOTHING(aclmdlInitDump)
SIM_NOTHING(aclmdlSetDump)
SIM_NOTHING(aclmdlFinalizeDump)
