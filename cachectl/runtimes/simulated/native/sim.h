/* Declarations shared by the simulated CANN. Nothing here comes from CANN's headers: the interface is declared anew
 * from what torch_npu asks for by name, and only as far as torch_npu reads or fills it. */
#ifndef CACHECTL_SIM_H
#define CACHECTL_SIM_H

#include <stddef.h>
#include <stdint.h>

#define SIM_EXPORT __attribute__((visibility("default")))

/* Every CANN call returns an int; 0 is success. */
enum { SIM_OK = 0, SIM_INVALID = 100000, SIM_NO_MEMORY = 200000 };

/* A function that has nothing to do on a machine without a device. Callers pass arguments that are never read, which
 * the calling conventions of x86-64 and aarch64 allow. */
#define SIM_NOTHING(name) SIM_EXPORT int name(void) { return SIM_OK; }

/* A fresh non-null handle: streams, events, contexts, models and task groups are only ever compared. */
void *sim_handle(void);

const char *sim_text(const char *variable, const char *fallback);
long sim_number(const char *variable, long fallback, long least, long most);

#endif
