/* A stand-in for NVIDIA's driver library: what nvmlInit and the queries of one host with GPUs answer.
   FAKE_GPUS describes the GPUs as "uuid:memory used in MiB:pid" (pid 0: nobody computes), separated by commas. */
#include <stdlib.h>
#include <string.h>
#include <stdio.h>

typedef int nvmlReturn_t;
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9 };
#define MOST 16

static struct { char uuid[80]; unsigned long long used; unsigned int pid; } gpus[MOST];
static unsigned int count;

typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned int pid; unsigned long long usedGpuMemory; unsigned int gpu, compute; } nvmlProcessInfo_t;

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
  (void)flags;
  const char *text = getenv("FAKE_GPUS");
  if (!text) return DRIVER_NOT_LOADED;
  char copy[2048];
  snprintf(copy, sizeof copy, "%s", text);
  count = 0;
  for (char *part = strtok(copy, ","); part && count < MOST; part = strtok(NULL, ","))
    if (sscanf(part, "%79[^:]:%llu:%u", gpus[count].uuid, &gpus[count].used, &gpus[count].pid) == 3) count++;
  return SUCCESS;
}
nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
nvmlReturn_t nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(nvmlReturn_t code) { return code == DRIVER_NOT_LOADED ? "Driver Not Loaded" : "Error"; }
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *found) { *found = count; return SUCCESS; }
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) {
  if (index >= count) return INVALID_ARGUMENT;
  *device = &gpus[index];
  return SUCCESS;
}
static unsigned int index_of(void *device) { return (unsigned int)(((char *)device - (char *)gpus) / sizeof gpus[0]); }
nvmlReturn_t nvmlDeviceGetUUID(void *device, char *uuid, unsigned int length) {
  snprintf(uuid, length, "%s", gpus[index_of(device)].uuid);
  return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetName(void *device, char *name, unsigned int length) {
  (void)device;
  snprintf(name, length, "Fake H100");
  return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMemoryInfo(void *device, nvmlMemory_t *memory) {
  memory->total = 80ull << 30;
  memory->used = gpus[index_of(device)].used << 20;
  memory->free = memory->total - memory->used;
  return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned int *size, nvmlProcessInfo_t *infos) {
  unsigned int pid = gpus[index_of(device)].pid;
  if (!pid) { *size = 0; return SUCCESS; }
  if (*size < 1) { *size = 1; return INSUFFICIENT_SIZE; }
  *size = 1;
  memset(infos, 0, sizeof *infos);
  infos[0].pid = pid;
  return SUCCESS;
}
