/* Fake CUPTI for the GPUs of fake_cuda.c: it refuses everything, as the real one does in a container without permission.
   The real one, which torch links, calls functions of the driver that fake_cuda.c does not have. */
#include <stdint.h>

enum { CUPTI_ERROR_INSUFFICIENT_PRIVILEGES = 35 };

#define REFUSED(name) int name(void) { return CUPTI_ERROR_INSUFFICIENT_PRIVILEGES; }
REFUSED(cuptiActivityDisable)
REFUSED(cuptiActivityEnable)
REFUSED(cuptiActivityEnableCudaEventDeviceTimestamps)
REFUSED(cuptiActivityEnableDriverApi)
REFUSED(cuptiActivityEnableRuntimeApi)
REFUSED(cuptiActivityFlushAll)
REFUSED(cuptiActivityGetNextRecord)
REFUSED(cuptiActivityGetNumDroppedRecords)
REFUSED(cuptiActivityPopExternalCorrelationId)
REFUSED(cuptiActivityPushExternalCorrelationId)
REFUSED(cuptiActivityRegisterCallbacks)
REFUSED(cuptiActivityRegisterTimestampCallback)
REFUSED(cuptiActivitySetAttribute)
REFUSED(cuptiEnableCallback)
REFUSED(cuptiEnableDomain)
REFUSED(cuptiFinalize)
REFUSED(cuptiSubscribe)
REFUSED(cuptiUnsubscribe)

int cuptiGetVersion(uint32_t *version) {
  *version = 130000;
  return 0;
}
int cuptiGetResultString(int result, const char **text) {
  (void)result;
  *text = "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES";
  return 0;
}
int cuptiGetCallbackName(int domain, uint32_t id, const char **name) {
  (void)domain, (void)id;
  *name = "";
  return CUPTI_ERROR_INSUFFICIENT_PRIVILEGES;
}
